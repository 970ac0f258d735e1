"""Compare at several budgets, widths or file sizes: a comparison for each value, in its own folder.

Every entry is trained to each budget with a schedule of its own: a prefix of a longer run is no shorter run, as its
learning rate has not come down. What is tuned at one budget is handed on to the next.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from relinear.compare.folder import now
from relinear.compare.match import at_width, config_of_preset, measure_size, operator_shapes, scaled_operators
from relinear.compare.results import tuning_notes
from relinear.compare.schema import Provenance, Results, SeriesRow
from relinear.compare.settings import CompareSettings, EntrySettings, scaled_steps

NARROWER, SHALLOWER = "dense-narrower", "dense-shallower"
_SHARE = 0.75  # of the width or the depth that the controls keep


def recipes_of_series(recipe: CompareSettings, vocab_size: int | None) -> list[CompareSettings]:
    """Return the recipe of each comparison in a series; of a single comparison only the recipe itself."""
    return [recipe_at(recipe, index, vocab_size) for index in range(len(recipe.series.values))] or [recipe]


def recipe_at(
    recipe: CompareSettings, index: int, vocab_size: int | None, results: Sequence[Results] = ()
) -> CompareSettings:
    """Return the recipe of the comparison at one value of a series.

    Args:
        recipe: recipe of the whole series.
        index: index of the value in the series.
        vocab_size: size of the tokenizer's vocabulary.
        results: results of the comparisons at smaller values, whose tuned settings it takes; empty before they have
            run.

    Raises:
        ValueError: for a width if a model is not a preset, or an entry cannot take it.
    """
    axis, _, values = recipe.series
    value = values[index]
    is_last = index == len(values) - 1
    name = f"{recipe.name} at width {value}" if axis == "width" else f"{recipe.name} at {value:,} {axis}"
    changes: dict[str, Any] = {"name": name, "budgets": None, "widths": None}
    if axis != "width" and not is_last:
        changes["speed"] = {"seconds": 0}  # measured once, at the last
    if axis == "tokens":
        changes |= _at_budget(recipe, index, results)
    elif axis == "width":
        changes |= _at_width(recipe, value, vocab_size)
    else:
        changes["match"] = recipe.match.replace(to=value)
        if not is_last:
            changes["ngram"] = None  # counted once
    return recipe.replace(**changes)


def series_results(recipe: CompareSettings, results: Sequence[Results], provenance: Provenance) -> Results:
    """Return the results of the last comparison, with a row for each in ``budgets`` or ``sizes``."""
    axis, key, values = recipe.series
    rows = [series_row(axis, value, key, at_value) for value, at_value in zip(values, results, strict=True)]
    notes = results[-1]["notes"] + (_budget_notes(recipe, rows) if recipe.budgets else [])
    combined: Any = {**results[-1], **provenance, "name": recipe.name, key: rows, "notes": notes, "finished": now()}
    return combined


def series_row(axis: str, value: int, key: str, results: Results) -> SeriesRow:
    """Return the row of one value, from the ``results`` of its comparison in the folder KEY/VALUE."""
    entries: list[Any] = [
        {
            **{field: entry[field] for field in ("name", "learning_rate", "tuning", "validation_loss", "gap")},
            "initializer_range": entry["settings"]["model_overrides"].get("initializer_range"),
            "warmup_ratio": entry["settings"].get("warmup_ratio"),
            "bits": entry["settings"].get("bits"),
            "runs": [{field: run[field] for field in ("seed", "steps", "tokens_per_second")} for run in entry["runs"]],
        }
        for entry in results["entries"]
    ]
    row: Any = {axis: value, "folder": f"{key}/{value}", "ngram": results["ngram"], "entries": entries}
    return row


# Budgets


def _at_budget(recipe: CompareSettings, index: int, results: Sequence[Results]) -> dict[str, Any]:
    """Return the changes to a recipe at one budget, with what was tuned at smaller budgets."""
    budgets = recipe.budgets or ()
    tune = recipe.tune
    ratio = budgets[index] / budgets[-1]
    train = scaled_steps(recipe.train.model_dump(exclude_unset=True), ratio)
    entries = {name: entry.replace(set=scaled_steps(entry.set, ratio)) for name, entry in recipe.entries.items()}
    changes: dict[str, Any] = {"tokens": budgets[index], "train": train, "entries": entries}
    if tune is not None and tune.at == "smallest" and index:
        # before any budget has run, as in a dry run, every entry counts as tuned there
        tuned = _tuned_settings(results) or {name: {"learning_rate": recipe.train.learning_rate} for name in entries}
        checked = index == 1 or tune.check_full_length
        diverged = set(entries) - set(tuned)  # at the smaller budgets: they are tuned anew
        entries |= {name: _with_tuned(entries[name], tuned[name]) for name in tuned}
        changes["tune"] = tune.replace(check_full_length=checked) if checked or diverged else None
    return changes


def _tuned_settings(results: Sequence[Results]) -> dict[str, dict[str, float]]:
    """Return, for each entry, what tuning has found in any of ``results``; later ones have precedence."""
    settings: dict[str, dict[str, float]] = {}
    for entry in (entry for at_value in results for entry in at_value["entries"]):
        tuning: Any = entry["tuning"] or {}
        tuned = {key: tuning[key] for key in ("initializer_range", "warmup_ratio") if key in tuning}
        settings.setdefault(entry["name"], {}).update(tuned, learning_rate=entry["learning_rate"])
    return settings


def _with_tuned(entry: EntrySettings, tuned: Mapping[str, float]) -> EntrySettings:
    """Return an entry with the learning rate and, if they were tuned, the initialisation and the warm-up."""
    changes: dict[str, float | None] = {}
    if "initializer_range" in tuned:
        # the dotted name leaves the overrides that all entries share as they are
        changes["model_overrides.initializer_range"] = tuned["initializer_range"]
    if "warmup_ratio" in tuned:
        changes |= {"warmup_ratio": tuned["warmup_ratio"], "warmup_steps": None}
    return entry.replace(learning_rate=tuned["learning_rate"], set=entry.set | changes)


def _budget_notes(recipe: CompareSettings, rows: list[SeriesRow]) -> list[str]:
    budgets = recipe.budgets or ()
    notes = [
        f"Every entry was trained to each of {len(budgets)} budgets with a complete schedule; the table is of the last."
    ]
    if recipe.tune is not None and len(budgets) > 1:
        at = {
            "smallest": "at the smallest budget, then compared with their neighbours in runs of full length at "
            + ("every larger budget" if recipe.tune.check_full_length else "the next budget"),
            "each": "at each budget",
        }
        notes.append(f"Learning rates were tuned {at[recipe.tune.at]}.")
        ranges = {"initialisation": recipe.tune.initializer_range, "warm-up": recipe.tune.warmup_ratio}
        tuned = [setting for setting, grid in ranges.items() if grid is not None]
        if tuned and recipe.tune.at == "smallest":
            notes.append(f"Each entry keeps the {' and the '.join(tuned)} that was best at the smallest budget.")
    # the notes of the last budget are there already
    for row in rows[:-1]:
        notes += [f"At {row['tokens']:,} tokens: {note}" for note in tuning_notes(row["entries"])]
    return notes


# Widths


def _at_width(recipe: CompareSettings, width: int, vocab_size: int | None) -> dict[str, Any]:
    """Return the changes to a recipe at one width: all entries scaled, and the two dense controls.

    Widths, MLPs and operators grow by the same factor, heads and depth stay, as does an operator without a size.
    """
    factor = width / _model_config(recipe, str(recipe.reference)).hidden_size
    entries: dict[str, EntrySettings] = {}
    for name in recipe.entries:
        scaled_width = round(factor * _model_config(recipe, name).hidden_size)
        entries[name] = _entry_at_width(recipe, name, scaled_width, factor, vocab_size)
    reference = next(name for name, entry in recipe.entries.items() if entry.dense)
    changes: dict[str, Any] = {"entries": entries | _controls(recipe, reference, width, vocab_size) | entries}
    per_parameter = recipe.widths.tokens_per_parameter if recipe.widths else None
    if per_parameter is not None:
        sized = recipe.replace(widths=None, **changes).settings_of(reference)
        changes["tokens"] = max(1, round(per_parameter * measure_size(sized, vocab_size).parameters))
    return changes


def _model_config(recipe: CompareSettings, name: str) -> Any:
    return config_of_preset(recipe.settings_of(name), name)


def _entry_at_width(
    recipe: CompareSettings, name: str, width: int, factor: float, vocab_size: int | None
) -> EntrySettings:
    """Return an entry at ``width``, with its operators at ``factor`` times their size."""
    settings = recipe.settings_of(name)
    config = _model_config(recipe, name)
    if width % config.num_attention_heads:
        raise ValueError(f"{name}: width {width} is not a multiple of its {config.num_attention_heads} heads")
    sized = at_width(settings, config, width)
    entry = _with_overrides(recipe, recipe.entries[name], sized.model_overrides)
    if settings.operators or entry.operator:
        operators = scaled_operators(sized, operator_shapes(sized, vocab_size), factor, name)
        entry = entry.replace(operator=None, target=None, operators=operators)
    return entry


def _with_overrides(recipe: CompareSettings, entry: EntrySettings, overrides: Mapping[str, Any]) -> EntrySettings:
    """Return an entry with these ``model_overrides`` in place of its own."""
    # the operators are written out separately, at their size
    rest = {key: value for key, value in entry.set.items() if key.split(".")[0] not in ("model_overrides", "operators")}
    shared = recipe.train.model_overrides
    if set(shared) - set(overrides):
        return entry.replace(set=rest | {"model_overrides": dict(overrides)})
    # Only what differs: an initialisation that all share is not the entry's own, and stays to be tuned.
    changed = {f"model_overrides.{key}": value for key, value in overrides.items() if shared.get(key) != value}
    return entry.replace(set=rest | changed)


def _controls(recipe: CompareSettings, reference: str, width: int, vocab_size: int | None) -> dict[str, EntrySettings]:
    """Return a narrower and a shallower dense model."""
    settings = recipe.settings_of(reference)
    config = _model_config(recipe, reference)
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    head_width = width // heads
    narrower = min(2 * round(_SHARE * head_width / 2), head_width - 2)  # rotary embeddings need even heads
    if narrower < 2 or layers < 2:
        raise ValueError(f"width {width} with {heads} heads and {layers} layers leaves no smaller dense model")
    shallower = dict(at_width(settings, config, width).model_overrides)
    shallower |= {"num_hidden_layers": min(round(_SHARE * layers), layers - 1)}
    shallower.pop("n_layer", None)
    return {
        NARROWER: _entry_at_width(recipe, reference, heads * narrower, 1.0, vocab_size),
        SHALLOWER: _with_overrides(recipe, recipe.entries[reference], shallower),
    }
