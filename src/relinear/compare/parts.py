"""Split a comparison at several budgets, widths or file sizes into one comparison for each, in its own folder.

Every entry is trained to each budget with a schedule of its own: a prefix of a longer run is no shorter run, as its
learning rate has not come down. What is tuned at one budget is handed on to the next.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from relinear.compare.folder import BUDGETS, SIZES, now
from relinear.compare.match import at_width, config_of_preset, measure_size, scaled_operators
from relinear.compare.results import tuning_notes
from relinear.compare.schema import Budget, EntryResult, Provenance, Results
from relinear.compare.settings import CompareSettings, shortened

NARROWER, SHALLOWER = "dense-narrower", "dense-shallower"
_SHARE = 0.75  # of the width or the depth that the controls keep


def part_folders(recipe: CompareSettings) -> list[str]:
    """Return the folders of the comparisons that a recipe consists of, by budget, width or file size; [] for one."""
    if recipe.budgets is not None:
        return [f"{BUDGETS}/{tokens}" for tokens in recipe.budgets]
    sizes = recipe.sizes.widths if recipe.sizes is not None else recipe.file_sizes
    return [f"{SIZES}/{size}" for size in sizes] if len(sizes) > 1 else []


def part_of(
    recipe: CompareSettings, index: int, vocab_size: int | None, results: Sequence[Results] = ()
) -> CompareSettings:
    """Return the comparison in one of ``part_folders``; ``results`` are those of the parts before it."""
    if recipe.budgets is not None:
        return at_budget(recipe, index, chosen_by(results))
    if recipe.sizes is not None:
        return at_size(recipe, recipe.sizes.widths[index], vocab_size)
    return at_file_size(recipe, recipe.file_sizes[index])


def over_parts(recipe: CompareSettings, results: Sequence[Results], provenance: Provenance) -> Results:
    """Return the results of the last part, with those of each in ``budgets`` or ``sizes``."""
    axis, unit = ("sizes", "bytes") if recipe.budgets is None else ("budgets", "tokens")
    folders = part_folders(recipe)
    rows = [budget_row(unit, folder, part) for folder, part in zip(folders, results, strict=True)]
    notes = results[-1]["notes"] + (_budget_notes(recipe, rows) if recipe.budgets else [])
    whole: Any = {**results[-1], **provenance, "name": recipe.name, axis: rows, "notes": notes, "finished": now()}
    return whole


def chosen_by(budgets: Sequence[Results]) -> dict[str, dict[str, float]]:
    """Return the tuned settings of every entry in the results of comparisons; later results win."""
    chosen: dict[str, dict[str, float]] = {}
    for results in budgets:
        for entry in results["entries"]:
            chosen.setdefault(entry["name"], {}).update(_choice(entry))
    return chosen


def at_budget(recipe: CompareSettings, index: int, chosen: Mapping[str, Mapping[str, float]]) -> CompareSettings:
    """Return the comparison at one budget.

    Args:
        recipe: with ``budgets``.
        index: of the budget.
        chosen: what smaller budgets have found, as ``with_choices`` takes it.
    """
    budgets = recipe.budgets or ()
    share = budgets[index] / budgets[-1]
    values = recipe.model_dump(exclude_unset=True)
    values |= {"budgets": None, "tokens": budgets[index], "name": f"{recipe.name} at {budgets[index]:,} tokens"}
    values["train"] = shortened(values.get("train", {}), share)
    values["entries"] = {
        name: entry | {"set": shortened(entry.get("set", {}), share)} for name, entry in values["entries"].items()
    }
    if index < len(budgets) - 1:
        values["speed"] = {"seconds": 0}  # the same at every budget
    if recipe.tune is not None and recipe.tune.at == "smallest" and index:
        values["entries"] = with_choices(values["entries"], chosen)
        checked = index == 1 or recipe.tune.check_full_length
        diverged = set(values["entries"]) - set(chosen)  # at the smaller budgets: they are tuned anew
        values["tune"] = recipe.tune.model_dump() | {"check_full_length": checked} if checked or diverged else None
    return CompareSettings.load(values, f"budget of {budgets[index]:,} tokens")


def with_choices(
    entries: Mapping[str, dict[str, Any]], chosen: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, Any]]:
    """Return entries with the ``learning_rate`` and, where tuned, the initialisation and the warm-up of each."""
    rows = {}
    for name, entry in entries.items():
        if (choice := chosen.get(name)) is None:
            rows[name] = entry
            continue
        rows[name] = entry | {"learning_rate": choice["learning_rate"]}
        change: dict[str, float | None] = {}
        if "initializer_range" in choice:
            # by its dotted name: the overrides that all entries share stay as they are
            change["model_overrides.initializer_range"] = choice["initializer_range"]
        if "warmup_ratio" in choice:
            change |= {"warmup_ratio": choice["warmup_ratio"], "warmup_steps": None}
        if change:
            rows[name] |= {"set": entry.get("set", {}) | change}
    return rows


def _choice(entry: EntryResult) -> dict[str, float]:
    tuned: Any = entry["tuning"] or {}
    chosen = {key: tuned[key] for key in ("initializer_range", "warmup_ratio") if key in tuned}
    return {"learning_rate": entry["learning_rate"]} | chosen


def at_file_size(recipe: CompareSettings, size: int) -> CompareSettings:
    """Return the comparison at one of several sizes of the file."""
    values = recipe.model_dump(exclude_unset=True) | {"name": f"{recipe.name} at {size:,} bytes"}
    values["match"] = recipe.match.model_dump() | {"to": size}
    if size < recipe.file_sizes[-1]:
        values |= {"speed": {"seconds": 0}, "ngram": None}  # stated once
    return CompareSettings.load(values, f"files of {size:,} bytes")


def budget_row(unit: str, folder: str, results: Results) -> Budget:
    """Return one budget's, or size's, row of the whole results: ``results`` are its own, in ``folder``."""
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
    row: Any = {unit: int(folder.rpartition("/")[2]), "folder": folder, "ngram": results["ngram"], "entries": entries}
    return row


def _budget_notes(recipe: CompareSettings, rows: list[Budget]) -> list[str]:
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


def at_size(recipe: CompareSettings, width: int, vocab_size: int | None) -> CompareSettings:
    """Return the comparison at one width: all entries scaled from the recipe's, and the two dense controls.

    Widths, MLPs and operators grow by the same factor, heads and depth stay, as does an operator without a size.

    Raises:
        ValueError: if a model is not a preset, or an entry cannot take the width.
    """
    base = _config(recipe, str(recipe.reference)).hidden_size
    factor = width / base
    values = recipe.model_dump(exclude_unset=True) | {"sizes": None, "name": f"{recipe.name} at width {width}"}
    entries: dict[str, Any] = {}
    for name, entry in values["entries"].items():
        scaled_width = round(factor * _config(recipe, name).hidden_size)
        entries[name] = entry | _scaled(recipe, name, scaled_width, factor, vocab_size)
    reference = next(name for name, entry in recipe.entries.items() if entry.dense)
    entries |= _controls(recipe, reference, width, vocab_size)
    values |= {"entries": entries}
    per_parameter = recipe.sizes.tokens_per_parameter if recipe.sizes else None
    if per_parameter is not None:
        sized = CompareSettings.load(values).settings_of(reference)
        values["tokens"] = max(1, round(per_parameter * measure_size(sized, vocab_size).parameters))
    return CompareSettings.load(values, f"width {width}")


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
        operators = scaled_operators(sized, vocab_size, factor)
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
