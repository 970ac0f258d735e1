"""Loss against compute over sizes: a power law for every entry, and where, if at all, it crosses the dense ones.

Every width is a comparison of its own, in ``sizes/WIDTH/``. With the entries of the recipe there are always a
narrower and a shallower dense model: an operator that loses to one of them saves nothing.
"""

# Legend: K sizes, R replicates

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relinear.compare.engine import Engine
from relinear.compare.folder import RUNS, SCALE, SIZES, claimed_folder, comparison_folder, read_losses
from relinear.compare.gaps import interval, replicates
from relinear.compare.match import at_width, config_of_preset, measure_size, scaled_operators
from relinear.compare.run import comparison, load_or_make_json, recorded_provenance
from relinear.compare.schema import Results
from relinear.compare.settings import CompareSettings
from relinear.data import prepare_data
from relinear.system.files import damaged_file_errors, read_json

NARROWER, SHALLOWER = "dense-narrower", "dense-shallower"
FORMAT = 1
_SHARE = 0.75  # of the width or the depth that the controls keep
# A backward pass takes two forward ones.
_PASSES = 3
AXES = {"flops": "training FLOPs", "seconds": "seconds of training"}


def scaled_up(recipe: CompareSettings, out_dir: Path, engine: Engine, overwrite: bool = False) -> dict[str, Any]:
    """Hold ``out_dir`` for a comparison at every width, unless all have ended."""
    comparison_folder(out_dir).check(recipe.model_dump(mode="json"), overwrite=overwrite)
    if (out_dir / SCALE).is_file() and not overwrite:
        return read_scale(out_dir)
    data = prepare_data(recipe.train.data, on_progress=engine.on_progress)
    widths = recipe.sizes.widths if recipe.sizes else ()
    recipes = {width: at_size(recipe, width, data.vocab_size) for width in widths}
    with claimed_folder(recipe, out_dir, [], overwrite=overwrite) as started:
        results = {width: comparison(sized, out_dir / SIZES / str(width), engine) for width, sized in recipes.items()}
        head = {"format": FORMAT, "name": recipe.name, "description": recipe.description}
        return load_or_make_json(
            out_dir / SCALE, lambda: head | _summary(recipe, out_dir, results) | recorded_provenance(started)
        )


def read_scale(directory: str | Path) -> dict[str, Any]:
    """Return what ``scale.json`` in ``directory`` says.

    Raises:
        FileNotFoundError: if nothing has finished there.
        ValueError: if the file is damaged or written by a newer relinear.
    """
    path = Path(directory) / SCALE
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: no comparison over sizes has finished there")
    with damaged_file_errors(path, "damaged", "delete it and start again"):
        results = read_json(path)
        version = results["format"]
        results["entries"][0]["points"]
    if version > FORMAT:
        raise ValueError(f"{path} has format {version}, this relinear reads up to {FORMAT}; upgrade relinear")
    return results


# Sizes


def at_size(recipe: CompareSettings, width: int, vocab_size: int | None) -> CompareSettings:
    """Return the comparison at one width: all entries scaled from the recipe's, and the two dense controls.

    Widths, MLPs and operators grow by the same factor, heads and depth stay; an operator without a size stays as it is.

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
    """Return a narrower and a shallower dense model, where the recipe has none of these names."""
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


# Fits

#: log a and b of power laws, (R,) each
Fit = tuple[np.ndarray, np.ndarray]


def fit_power_law(x: np.ndarray, losses: np.ndarray) -> Fit:
    """(log a, b) of ``loss = a * x ** -b`` by least squares of the logarithms: x (K,), losses (K, R) -> (R,), (R,)."""
    slope, intercept = np.polyfit(np.log(x), np.log(losses), 1)
    return intercept, -slope


def crossing(fit: Fit, other: Fit, low: float, high: float) -> np.ndarray:
    """Return where two power laws meet between ``low`` and ``high`` (R,); NaN where they do not."""
    with np.errstate(divide="ignore", invalid="ignore"):
        meeting = (fit[0] - other[0]) / (fit[1] - other[1])
    inside = (meeting >= math.log(low)) & (meeting <= math.log(high))
    return np.exp(np.where(inside, meeting, np.nan))


def _summary(recipe: CompareSettings, out_dir: Path, by_width: Mapping[int, Results]) -> dict[str, Any]:
    # one that diverged at a width has no line
    everywhere = set.intersection(*({entry["name"] for entry in results["entries"]} for results in by_width.values()))
    names = [entry["name"] for entry in next(iter(by_width.values()))["entries"] if entry["name"] in everywhere]
    points = {name: [_point(width, results, name) for width, results in by_width.items()] for name in names}
    losses = {name: _replicated(recipe, out_dir, name, points[name]) for name in names}
    dense = {e["name"] for e in next(iter(by_width.values()))["entries"] if e["dense"] and e["name"] in everywhere}
    entries: list[dict[str, Any]] = []
    for name in names:
        axes = {axis: _axis(name, axis, points, losses, dense) for axis in AXES}
        entries.append({"name": name, "dense": name in dense, "points": points[name]} | axes)
    verdicts = [
        f"{entry['name']} and {other}, by {unit}: {_verdict(meeting)}"
        for entry in entries
        for axis, unit in AXES.items()
        for other, meeting in ((entry[axis] or {}).get("crossings") or {}).items()
    ]
    verdicts += [
        f"{each['name']} at width {width} has no results: {each['text']}."
        for width, results in by_width.items()
        for each in results.get("diverged", [])
    ]
    return {"reference": recipe.reference, "entries": entries, "verdicts": verdicts}


def _point(width: int, results: Results, name: str) -> dict[str, Any]:
    entry = next(entry for entry in results["entries"] if entry["name"] == name)
    settings, run, speed = entry["settings"], entry["runs"][0], entry["speed"]
    tokens = run["steps"] * settings["batch_size"] * settings["accumulation"] * settings["data"]["sequence_length"]
    return {
        "width": width,
        "parameters": entry["parameters"],
        "tokens": tokens,
        "flops": _PASSES * entry["flops_per_token"] * tokens,
        "seconds": tokens / speed["train_tokens_per_second"] if speed else None,
        "processor": speed.get("processor") if speed else None,
        "learning_rate": entry["learning_rate"],
        "validation_loss": entry["validation_loss"],
        "gap": entry["gap"],
    }


def _replicated(recipe: CompareSettings, out_dir: Path, name: str, points: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Return replicated losses (K, R), as ``replicates``: the same draws of seeds and blocks for all entries and sizes.

    Of one seed its mean alone (K, 1): the spread of its text is not an interval.
    """
    rows = []
    for point in points:
        runs = out_dir / SIZES / str(point["width"]) / RUNS / name
        losses = [read_losses(runs / f"seed-{s}") for s in recipe.seeds]
        rows.append(replicates(np.stack(losses).astype(float)) if losses[1:] else losses[0].mean(keepdims=True))
    # of two or three seeds replicates may lie as far out as below 0, where there is no logarithm; so far out one is all
    # that an interval knows of them
    return np.maximum(np.stack(rows), np.finfo(float).tiny)


def _axis(
    name: str,
    axis: str,
    points: Mapping[str, Sequence[Mapping[str, Any]]],
    losses: Mapping[str, np.ndarray],
    dense: set[str],
) -> dict[str, Any] | None:
    """Return an entry's fit against an axis, and where it crosses each dense entry; None for an unknown axis."""
    xs = {other: [point[axis] for point in points[other]] for other in {name, *dense}}
    if any(None in values for values in xs.values()):
        return None
    processors = {point["processor"] for other in xs for point in points[other]} - {None}  # None: not noted
    if axis == "seconds" and len(processors) > 1:
        return None  # shared among unlike machines: times of one width are not those of another
    fits: dict[str, tuple[Fit, Fit]] = {}  # of the means, of the replicates
    for other, values in xs.items():
        means = np.asarray([[point["validation_loss"]["mean"]] for point in points[other]])
        x = np.asarray(values, float)
        fits[other] = fit_power_law(x, means), fit_power_law(x, losses[other])
    (log_a, b), replicated = fits[name]
    entry_fit: dict[str, Any] = {"log_a": float(log_a[0]), "b": float(b[0])}
    entry_fit |= {f"{key}_interval": _interval(values) for key, values in zip(("log_a", "b"), replicated, strict=True)}
    crossings: dict[str, dict[str, Any] | None] = {}
    for other in sorted(dense - {name}) if name not in dense else []:
        low, high = max(map(min, (xs[name], xs[other]))), min(map(max, (xs[name], xs[other])))
        crossings[other] = _crossing(fits[name], fits[other], low, high) if low < high else None
    return {"fit": entry_fit, "crossings": crossings}


def _interval(values: np.ndarray) -> tuple[float, float] | None:
    return interval(values) if len(values) > 1 else None


def _crossing(entry_fits: tuple[Fit, Fit], other: tuple[Fit, Fit], low: float, high: float) -> dict[str, Any]:
    """Return where (and whether) two fits meet in their common range, and their gaps at its ends."""
    middle, replicated = (crossing(*fits, low, high) for fits in zip(entry_fits, other, strict=True))
    inside = replicated[np.isfinite(replicated)]
    gaps = {}
    for end, x in (("low", low), ("high", high)):
        gap, resampled = (_at(a, x) - _at(b, x) for a, b in zip(entry_fits, other, strict=True))
        gaps[end] = {"at": x, "gap": float(gap[0]), "interval": _interval(resampled)}
    return {
        "at": float(middle[0]) if math.isfinite(middle[0]) else None,
        "interval": _interval(inside),
        "share": len(inside) / len(replicated) if len(replicated) > 1 else None,
        "ends": gaps,
    }


def _at(fit: Fit, x: float) -> np.ndarray:
    return np.exp(fit[0] - fit[1] * math.log(x))


def _verdict(meeting: Mapping[str, Any] | None) -> str:
    if meeting is None:
        return "no range that both have sizes in."
    low, high, share = meeting["ends"]["low"], meeting["ends"]["high"], meeting["share"]
    ends = "; ".join(f"at {end['at']:.2g} {end['gap']:+.3f}{_within(end['interval'], '+.3f')}" for end in (low, high))
    often = "one seed, no intervals" if share is None else f"a crossing in {share:.0%} of replicates"
    if meeting["at"] is None:
        side = "ahead" if high["gap"] < 0 else "behind"
        return f"do not cross in the range, {side} throughout ({ends}; {often})."
    after = "ahead beyond" if high["gap"] < 0 else "behind beyond"
    return f"cross at {meeting['at']:.2g}{_within(meeting['interval'], '.2g')}, {after} ({ends}; {often})."


def _within(interval: Sequence[float] | None, digits: str) -> str:
    return "" if interval is None else f" [{interval[0]:{digits}}, {interval[1]:{digits}}]"
