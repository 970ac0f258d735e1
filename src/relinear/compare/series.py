"""Compare at several budgets, widths or file sizes: a comparison for each value, in its own folder.

Every entry is trained to each budget with a schedule of its own: a prefix of a longer run is no shorter run, as its
learning rate has not come down. What is tuned at one budget is handed on to the next.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from relinear.compare.folder import now
from relinear.compare.match import at_width, config_of_preset, measure_size, operator_shapes, scaled_operators
from relinear.compare.results import tuning_notes
from relinear.compare.schema import EntryResult, Provenance, Results, SeriesRow
from relinear.compare.settings import CompareSettings, shortened

NARROWER, SHALLOWER = "dense-narrower", "dense-shallower"
_SHARE = 0.75  # of the width or the depth that the controls keep


def comparisons(recipe: CompareSettings, vocab_size: int | None) -> list[CompareSettings]:
    """Return the comparisons that a recipe consists of: itself, or one for each value of its series."""
    return [comparison_at(recipe, index, vocab_size) for index in range(len(recipe.series.values))] or [recipe]


def comparison_at(
    recipe: CompareSettings, index: int, vocab_size: int | None, results: Sequence[Results] = ()
) -> CompareSettings:
    """Return the comparison at one value of a recipe's series.

    Args:
        recipe: with a series.
        index: of the value.
        vocab_size: of the tokenizer.
        results: of the comparisons at smaller values, whose tuned settings it takes.

    Raises:
        ValueError: for a width if a model is not a preset, or an entry cannot take it.
    """
    axis, _, sizes = recipe.series
    value = sizes[index]
    at = f"at width {value}" if axis == "width" else f"at {value:,} {axis}"
    values = recipe.model_dump(exclude_unset=True) | {"name": f"{recipe.name} {at}", "budgets": None, "sizes": None}
    if axis != "width" and value != sizes[-1]:
        values["speed"] = {"seconds": 0}  # measured once, at the last
    if axis == "tokens":
        values |= _at_budget(recipe, index, values, results)
    elif axis == "width":
        values |= _at_width(recipe, value, values, vocab_size)
    else:
        values["match"] = recipe.match.model_dump() | {"to": value}
        if value != sizes[-1]:
            values["ngram"] = None  # counted once
    return CompareSettings.load(values, values["name"])


def series_results(recipe: CompareSettings, results: Sequence[Results], provenance: Provenance) -> Results:
    """Return the results of the last comparison, with a row for each in ``budgets`` or ``sizes``."""
    axis, key, values = recipe.series
    rows = [series_row(axis, value, key, each) for value, each in zip(values, results, strict=True)]
    notes = results[-1]["notes"] + (_budget_notes(recipe, rows) if recipe.budgets else [])
    whole: Any = {**results[-1], **provenance, "name": recipe.name, key: rows, "notes": notes, "finished": now()}
    return whole


def series_row(axis: str, value: int, key: str, results: Results) -> SeriesRow:
    """Return one value's row of the whole results: ``results`` are its own, in the folder KEY/VALUE."""
    entries: list[Any] = [
        {
            **{key: entry[key] for key in ("name", "learning_rate", "tuning", "validation_loss", "gap")},
            "initializer_range": entry["settings"]["model_overrides"].get("initializer_range"),
            "warmup_ratio": entry["settings"].get("warmup_ratio"),
            "bits": entry["settings"].get("bits"),
            "runs": [{key: run[key] for key in ("seed", "steps", "tokens_per_second")} for run in entry["runs"]],
        }
        for entry in results["entries"]
    ]
    row: Any = {axis: value, "folder": f"{key}/{value}", "ngram": results["ngram"], "entries": entries}
    return row


# Budgets


def _at_budget(
    recipe: CompareSettings, index: int, values: dict[str, Any], results: Sequence[Results]
) -> dict[str, Any]:
    """Return the changes in ``values`` at one budget, with what smaller budgets have found."""
    budgets, tune = recipe.budgets or (), recipe.tune
    share = budgets[index] / budgets[-1]
    train = shortened(values.get("train", {}), share)
    entries = {
        name: entry | {"set": shortened(entry.get("set", {}), share)} for name, entry in values["entries"].items()
    }
    changes: dict[str, Any] = {"tokens": budgets[index], "train": train, "entries": entries}
    if tune is not None and tune.at == "smallest" and index:
        chosen: dict[str, dict[str, float]] = {}
        for entry in (entry for each in results for entry in each["entries"]):
            chosen.setdefault(entry["name"], {}).update(_choice(entry))
        checked = index == 1 or tune.check_full_length
        diverged = set(entries) - set(chosen)  # at the smaller budgets: they are tuned anew
        changes["entries"] = {
            name: _with_choice(entry, chosen[name]) if name in chosen else entry for name, entry in entries.items()
        }
        changes["tune"] = tune.model_dump() | {"check_full_length": checked} if checked or diverged else None
    return changes


def _with_choice(entry: dict[str, Any], choice: Mapping[str, float]) -> dict[str, Any]:
    """Return an entry with the learning rate and, if they were tuned, the initialisation and the warm-up."""
    change: dict[str, float | None] = {}
    if "initializer_range" in choice:
        # by its dotted name: the overrides that all entries share stay as they are
        change["model_overrides.initializer_range"] = choice["initializer_range"]
    if "warmup_ratio" in choice:
        change |= {"warmup_ratio": choice["warmup_ratio"], "warmup_steps": None}
    return entry | {"learning_rate": choice["learning_rate"], "set": entry["set"] | change}


def _choice(entry: EntryResult) -> dict[str, float]:
    """Return the tuned settings in an entry's results."""
    tuned: Any = entry["tuning"] or {}
    chosen = {key: tuned[key] for key in ("initializer_range", "warmup_ratio") if key in tuned}
    return {"learning_rate": entry["learning_rate"]} | chosen


def _budget_notes(recipe: CompareSettings, rows: list[SeriesRow]) -> list[str]:
    budgets = recipe.budgets or ()
    notes = [
        f"Every entry was trained to each of {len(budgets)} budgets with a complete schedule; the table is of the last."
    ]
    if recipe.tune is not None and len(budgets) > 1:
        at = {
            "smallest": "at the smallest budget, and held against their neighbours in whole runs at "
            + ("each after it" if recipe.tune.check_full_length else "the next"),
            "each": "at each budget",
        }
        notes.append(f"Learning rates were tuned {at[recipe.tune.at]}.")
        ranges = {"initialisation": recipe.tune.initializer_range, "warm-up": recipe.tune.warmup_ratio}
        tuned = [what for what, grid in ranges.items() if grid is not None]
        if tuned and recipe.tune.at == "smallest":
            notes.append(f"The {' and the '.join(tuned)} of an entry: the smallest budget's best throughout.")
    # of the last budget the table itself tells
    for row in rows[:-1]:
        notes += [f"At {row['tokens']:,} tokens: {note}" for note in tuning_notes(row["entries"])]
    return notes


# Widths


def _at_width(recipe: CompareSettings, width: int, values: dict[str, Any], vocab_size: int | None) -> dict[str, Any]:
    """Return the changes in ``values`` at one width: all entries scaled from the recipe's, and the two dense controls.

    Widths, MLPs and operators grow by the same factor, heads and depth stay, as does an operator without a size.
    """
    factor = width / _config(recipe, str(recipe.reference)).hidden_size
    entries: dict[str, Any] = {}
    for name, entry in values["entries"].items():
        scaled_width = round(factor * _config(recipe, name).hidden_size)
        entries[name] = entry | _scaled(recipe, name, scaled_width, factor, vocab_size)
    reference = next(name for name, entry in recipe.entries.items() if entry.dense)
    changes: dict[str, Any] = {"entries": entries | _controls(recipe, reference, width, vocab_size)}
    per_parameter = recipe.sizes.tokens_per_parameter if recipe.sizes else None
    if per_parameter is not None:
        sized = CompareSettings.load(values | changes).settings_of(reference)
        changes["tokens"] = max(1, round(per_parameter * measure_size(sized, vocab_size).parameters))
    return changes


def _config(recipe: CompareSettings, name: str) -> Any:
    return config_of_preset(recipe.settings_of(name), name)


def _scaled(recipe: CompareSettings, name: str, width: int, factor: float, vocab_size: int | None) -> dict[str, Any]:
    """Return the changes in an entry at ``width``."""
    settings, config = recipe.settings_of(name), _config(recipe, name)
    if width % config.num_attention_heads:
        raise ValueError(f"{name}: width {width} is not a multiple of its {config.num_attention_heads} heads")
    sized = at_width(settings, config, width)
    entry = recipe.entries[name]
    changes: dict[str, Any] = {"set": _with_overrides(recipe, entry.set, sized.model_overrides)}
    if settings.operators or recipe.entries[name].operator:
        operators = scaled_operators(sized, operator_shapes(sized, vocab_size), factor, name)
        changes |= {"operator": None, "target": None, "operators": operators}
    return changes


def _with_overrides(recipe: CompareSettings, changes: Mapping[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return an entry's ``set`` with these ``model_overrides`` in place of its own."""
    # operators are written out at their size beside it
    rest = {key: value for key, value in changes.items() if key.split(".")[0] not in ("model_overrides", "operators")}
    shared = recipe.train.model_overrides
    if set(shared) - set(overrides):
        return rest | {"model_overrides": dict(overrides)}
    # Only what differs: an initialisation that all share is not the entry's own, and stays to be tuned.
    return rest | {f"model_overrides.{key}": value for key, value in overrides.items() if shared.get(key) != value}


def _controls(recipe: CompareSettings, reference: str, width: int, vocab_size: int | None) -> dict[str, Any]:
    """Return a narrower and a shallower dense model, unless the recipe has entries of these names."""
    settings, entry, config = recipe.settings_of(reference), recipe.entries[reference], _config(recipe, reference)
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    head = width // heads
    narrow = min(2 * round(_SHARE * head / 2), head - 2)  # rotary embeddings need even heads
    if narrow < 2 or layers < 2:
        raise ValueError(f"width {width} with {heads} heads and {layers} layers leaves no smaller dense model")
    shallow = at_width(settings, config, width).model_overrides
    shallow |= {"num_hidden_layers": min(round(_SHARE * layers), layers - 1)}
    shallow.pop("n_layer", None)
    shared = entry.model_dump(exclude_unset=True)
    results = {
        NARROWER: shared | _scaled(recipe, reference, heads * narrow, 1.0, vocab_size),
        SHALLOWER: shared | {"set": _with_overrides(recipe, entry.set, shallow)},
    }
    return {name: control for name, control in results.items() if name not in recipe.entries}
