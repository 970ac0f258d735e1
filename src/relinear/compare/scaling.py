"""Fit a power law of loss against compute to each entry's widths, and find where it crosses those of dense entries.

A narrower and a shallower dense model always take part: an operator that loses to one of them saves nothing.
"""

# Legend: K sizes, R replicates

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relinear.compare.folder import read_losses, seed_folder
from relinear.compare.gaps import interval, replicates
from relinear.compare.schema import AXES, FORMAT, Provenance, Results
from relinear.compare.settings import CompareSettings

# A backward pass takes two forward ones.
_PASSES = 3
#: log a and b of power laws, (R,) each
Fit = tuple[np.ndarray, np.ndarray]
#: the fit of the means over seeds, and the fits of the replicates
FitAndReplicates = tuple[Fit, Fit]
#: an entry at a width, as in ``scale.json``
Point = Mapping[str, Any]


def fit_power_law(x: np.ndarray, losses: np.ndarray) -> Fit:
    """Fit ``loss = a * x ** -b`` by least squares of logarithms: x (K,), losses (K, R) -> log a (R,), b (R,)."""
    slope, intercept = np.polyfit(np.log(x), np.log(losses), 1)
    return intercept, -slope


def crossing(fit: Fit, other: Fit, low: float, high: float) -> np.ndarray:
    """Return where two power laws meet between ``low`` and ``high`` (R,); NaN where they do not."""
    with np.errstate(divide="ignore", invalid="ignore"):
        meeting = (fit[0] - other[0]) / (fit[1] - other[1])
    inside = (meeting >= math.log(low)) & (meeting <= math.log(high))
    return np.exp(np.where(inside, meeting, np.nan))


def scale_results(
    recipe: CompareSettings, out_dir: Path, parts: Sequence[Results], provenance: Provenance
) -> dict[str, Any]:
    """Return the values of ``scale.json`` for the comparisons at every width in ``out_dir``."""
    by_width = dict(zip(recipe.widths.widths if recipe.widths else (), parts, strict=True))
    # an entry that diverged at a width has no power law
    everywhere = set.intersection(*({entry["name"] for entry in results["entries"]} for results in by_width.values()))
    is_dense = {e["name"]: e["dense"] for e in parts[0]["entries"] if e["name"] in everywhere}
    points = {name: [_point(width, results, name) for width, results in by_width.items()] for name in is_dense}
    losses = {name: _replicated_losses(recipe, out_dir, name, points[name]) for name in is_dense}
    dense = sorted(name for name in is_dense if is_dense[name])
    fits = {axis: _fits(axis, points, losses) for axis in AXES}
    entries: list[dict[str, Any]] = []
    for name in is_dense:
        axes = {axis: _fit_on_axis(name, axis, points, fits[axis], dense) for axis in AXES}
        entries.append({"name": name, "dense": is_dense[name], "points": points[name]} | axes)
    verdicts = [
        f"{entry['name']} and {other}, by {unit}: {_verdict_text(meeting)}"
        for entry in entries
        for axis, unit in AXES.items()
        for other, meeting in ((entry[axis] or {}).get("crossings") or {}).items()
    ]
    verdicts += [
        f"{entry['name']} at width {width} has no results: {entry['text']}."
        for width, results in by_width.items()
        for entry in results.get("diverged", [])
    ]
    return {
        "format": FORMAT,
        "name": recipe.name,
        "description": recipe.description,
        "reference": recipe.reference,
        "entries": entries,
        "verdicts": verdicts,
        **provenance,
    }


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


def _replicated_losses(recipe: CompareSettings, out_dir: Path, name: str, points: Sequence[Point]) -> np.ndarray:
    """Return replicated losses (K, R), as ``replicates``: the same draws of seeds and blocks for all entries and sizes.

    With one seed they are its means (K, 1): a spread over text alone is not an interval.
    """
    rows = []
    for point in points:
        comparison = out_dir / "sizes" / str(point["width"])
        losses = [read_losses(seed_folder(comparison, name, seed)) for seed in recipe.seeds]
        rows.append(replicates(np.stack(losses).astype(float)) if losses[1:] else losses[0].mean(keepdims=True))
    # With two or three seeds a replicate may be below 0, where there is no logarithm. Any tiny value serves: an
    # interval only needs to know that the replicate lies far out.
    return np.maximum(np.stack(rows), np.finfo(float).tiny)


def _fits(
    axis: str, points: Mapping[str, Sequence[Point]], losses: Mapping[str, np.ndarray]
) -> dict[str, FitAndReplicates] | None:
    """Return every entry's fits against an axis; None if that was not measured for all of them on one machine."""
    measured = [point for of_entry in points.values() for point in of_entry]
    processors = {point["processor"] for point in measured} - {None}  # None: not noted
    if any(point[axis] is None for point in measured) or (axis == "seconds" and len(processors) > 1):
        return None
    fits = {}
    for name, of_entry in points.items():
        x = np.asarray([point[axis] for point in of_entry], float)
        means = np.asarray([[point["validation_loss"]["mean"]] for point in of_entry])
        fits[name] = fit_power_law(x, means), fit_power_law(x, losses[name])
    return fits


def _fit_on_axis(
    name: str,
    axis: str,
    points: Mapping[str, Sequence[Point]],
    fits: Mapping[str, FitAndReplicates] | None,
    dense: Sequence[str],
) -> dict[str, Any] | None:
    """Return an entry's fit against an axis, and where it crosses each dense entry; None without fits."""
    if fits is None:
        return None
    (log_a, b), replicated = fits[name]
    entry_fit: dict[str, Any] = {"log_a": float(log_a[0]), "b": float(b[0])}
    entry_fit |= {f"{key}_interval": interval(values) for key, values in zip(("log_a", "b"), replicated, strict=True)}
    crossings: dict[str, dict[str, Any] | None] = {}
    for other in dense if name not in dense else []:
        ours, theirs = ([point[axis] for point in points[each]] for each in (name, other))
        low, high = max(min(ours), min(theirs)), min(max(ours), max(theirs))
        crossings[other] = _compare_fits(fits[name], fits[other], low, high) if low < high else None
    return {"fit": entry_fit, "crossings": crossings}


def _compare_fits(fits: FitAndReplicates, other: FitAndReplicates, low: float, high: float) -> dict[str, Any]:
    """Return where (and whether) two fits, of means and of replicates, meet in a range, and their gaps at its ends."""
    meeting, replicated = (crossing(*pair, low, high) for pair in zip(fits, other, strict=True))
    inside = replicated[np.isfinite(replicated)]
    gaps = {}
    for end, x in (("low", low), ("high", high)):
        gap, resampled = (_loss_at(a, x) - _loss_at(b, x) for a, b in zip(fits, other, strict=True))
        gaps[end] = {"at": x, "gap": float(gap[0]), "interval": interval(resampled)}
    return {
        "at": float(meeting[0]) if math.isfinite(meeting[0]) else None,
        "interval": interval(inside),
        "share": len(inside) / len(replicated) if len(replicated) > 1 else None,
        "ends": gaps,
    }


def _loss_at(fit: Fit, x: float) -> np.ndarray:
    return np.exp(fit[0] - fit[1] * math.log(x))


def _verdict_text(meeting: Mapping[str, Any] | None) -> str:
    if meeting is None:
        return "no range that both have sizes in."
    low, high, share = meeting["ends"]["low"], meeting["ends"]["high"], meeting["share"]
    gaps = [f"{end['gap']:+.3f}{_interval_text(end['interval'], '+.3f')}" for end in (low, high)]
    ends = f"at {low['at']:.2g} {gaps[0]}; at {high['at']:.2g} {gaps[1]}"
    often = "one seed, no intervals" if share is None else f"a crossing in {share:.0%} of replicates"
    if meeting["at"] is None:
        side = "ahead" if high["gap"] < 0 else "behind"
        return f"do not cross in the range, {side} throughout ({ends}; {often})."
    after = "ahead beyond" if high["gap"] < 0 else "behind beyond"
    return f"cross at {meeting['at']:.2g}{_interval_text(meeting['interval'], '.2g')}, {after} ({ends}; {often})."


def _interval_text(interval: Sequence[float] | None, digits: str) -> str:
    return "" if interval is None else f" [{interval[0]:{digits}}, {interval[1]:{digits}}]"
