"""Describe the figures of a comparison, for its page and for the files in ``plots/``; an entry has one colour in all.

Every function takes the entries of ``results.json`` (of ``scale.json``) and returns panels, none if there is nothing
to show.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from relinear.compare.schema import AXES, EntryResult, Ngram, SeriesRow, Statistic, Trial, Tuning
from relinear.pages.figures import GUIDE, Axis, Guide, Panel, Series, colors
from relinear.pages.records import loss_unit
from relinear.system.grouped import grouped
from relinear.system.text import number

Colors = Mapping[str, str]


def _marks(entries: Sequence[Any], palette: Colors) -> dict[str, dict[str, Any]]:
    """Return the arguments of ``Series`` that distinguish each entry in all figures, by its name."""
    return {
        entry["name"]: {"name": entry["name"], "color": palette[entry["name"]], "number": index}
        for index, entry in enumerate(entries)
    }


def _line(mark: Mapping[str, Any], x: Sequence[float], y: Sequence[float], label: str, band: Any = None) -> Series:
    """Return a line; ``band`` is its lowest and highest values, not drawn if they are the same."""
    low, high = band if band and band[0] != band[1] else (None, None)
    return Series(**mark, x=x, y=y, low=low, high=high, size=5, label=label)


def _loss_axis(entries: Sequence[EntryResult], bounds: tuple[float, float] | None = None) -> Axis:
    return Axis(title=f"validation loss ({loss_unit(entries[0].get('settings'))})", bounds=bounds)


def curves(entries: Sequence[EntryResult], palette: Colors, ngram: Ngram | None = None) -> list[Panel]:
    """Return the validation loss against training tokens: the mean over seeds, and the band from lowest to highest.

    ``ngram`` (of ``results.json``) is a horizontal line, the loss of n-grams with as many tokens, unless it lies so far
    off that it would squeeze the curves.
    """
    shown: list[Series] = []
    bounds: list[float] = []
    marks = _marks(entries, palette)
    for entry in entries:
        curve = mean_curve(entry)
        if len(curve) < 2:
            continue
        x, mean, lowest, highest = zip(*curve, strict=True)
        label = f"{entry['name']}  {mean[-1]:.3f}"
        shown.append(_line(marks[entry["name"]], x, mean, label, (lowest, highest)))
        # the first steps span most of the range and show nothing about the operators
        later = [h for value, h in zip(x, highest, strict=True) if value >= (0.15 if len(x) > 4 else 0) * x[-1]]
        bounds += [min(lowest), max(later)]
    if not shown:
        return []
    low, high = min(bounds), max(bounds)
    guides: list[Guide] = []
    if ngram is not None and abs(ngram["validation_loss"] - (low + high) / 2) <= high - low:
        loss = ngram["validation_loss"]
        low, high = min(low, loss), max(high, loss)
        guides = [Guide(y=loss, text=f"{ngram['order']}-grams  {loss:.3f}")]
    margin = 0.06 * (high - low) or 0.1
    last = max(series.x[-1] for series in shown)
    return [Panel(shown, _token_axis(last), _loss_axis(entries, (low - margin, high + margin)), guides)]


def pareto(entries: Sequence[EntryResult], palette: Colors) -> list[Panel]:
    """Return panels of the validation loss against parameters, FLOPs per token and, if measured, time per token.

    A grey line joins the entries that no other beats in both, if there are several.
    """
    measures: dict[str, Callable[[EntryResult], float | None]] = {
        "parameters": lambda entry: entry["parameters"],
        "forward FLOPs per token": lambda entry: entry["flops_per_token"],
        "training µs per token": _training_microseconds,
    }
    marks = _marks(entries, palette)
    panels = []
    for title, measure in measures.items():
        measured = [(x, entry) for entry in entries if (x := measure(entry)) is not None]
        if not measured:
            continue
        front = pareto_front((x, entry["validation_loss"]["mean"]) for x, entry in measured)
        shown = [_marker(marks[entry["name"]], entry, x, title) for x, entry in measured]
        if len(front) > 1:
            xs, ys = zip(*front, strict=True)
            shown.insert(0, Series(name="front", color=GUIDE, x=xs, y=ys, mode="steps", legend=False))
        panels.append(Panel(shown, Axis(title=title), _loss_axis(entries)))
    return panels


def _training_microseconds(entry: EntryResult) -> float | None:
    rate = entry["speed"] and entry["speed"]["train_tokens_per_second"]
    return 1e6 / rate if rate else None


def _marker(mark: Mapping[str, Any], entry: EntryResult, x: float, unit: str) -> Series:
    name, mean, std = entry["name"], entry["validation_loss"]["mean"], entry["validation_loss"]["std"]
    text = f"{name}: {mean:.4f}{'' if std is None else f' ± {std:.4f}'}, {x:,.6g} {unit}"
    low, high = ([mean - std], [mean + std]) if std else (None, None)
    return Series(**mark, x=[x], y=[mean], low=low, high=high, texts=[text], mode="points", size=10, label=name)


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other beats in both coordinates (smaller is better), from left to right."""
    front: list[tuple[float, float]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def speeds(entries: Sequence[EntryResult], palette: Colors) -> list[Panel]:
    """Return the training and inference throughput as ratios to the reference, one row per entry."""
    timed: dict[str, Any] = {entry["name"]: entry["speed"] for entry in entries if entry.get("speed")}
    if not timed:
        return []
    reference = next(iter(timed.values())).get("reference", "dense")
    shown = []
    for mode, title, marker in (("train", "training", 0), ("inference", "inference", 2)):
        style: dict[str, Any] = {"number": marker, "mode": "points", "size": 11, "hollow": marker > 0, "legend": False}
        for name, speed in timed.items():
            ratio, rate = speed[f"{mode}_ratio"], speed[f"{mode}_tokens_per_second"]
            text = f"{name}, {title}: {ratio:.3f} of {reference}'s, {rate:,.0f} tokens per second"
            shown.append(Series(name=name, color=palette[name], x=[ratio], y=[name], texts=[text], **style))
    axis = Axis(title=f"tokens per second, {reference} = 1", from_zero=True)
    return [Panel(shown, axis, Axis(rows=True), [Guide(x=1)])]


def tuning(entries: Sequence[EntryResult], palette: Colors) -> list[Panel]:
    """Return the validation loss of the short tuning runs against the learning rate; the chosen rate is ringed."""
    shown: list[Series] = []
    style: dict[str, Any] = {"mode": "points", "size": 14, "hollow": True, "legend": False}
    marks = _marks(entries, palette)
    for entry in entries:
        trials = _chosen_trials(record) if (record := entry.get("tuning")) else []
        losses = {t["learning_rate"]: t["validation_loss"] for t in trials if t["validation_loss"] is not None}
        if losses:
            name = entry["name"]
            rates = sorted(losses)
            rate = entry["learning_rate"] if entry["learning_rate"] in losses else min(losses, key=losses.__getitem__)
            shown.append(_line(marks[name], rates, [losses[rate] for rate in rates], name))
            text = f"{name}: {rate:.3g} was chosen"
            shown.append(Series(name=name, color=palette[name], x=[rate], y=[losses[rate]], texts=[text], **style))
    rates = sorted({rate for series in shown for rate in series.x})
    ticks = {rate: f"{rate:.2g}" for rate in rates}
    bottom = Axis(title="learning rate", log=True, ticks=ticks)
    return [Panel(shown, bottom, _loss_axis(entries))] if len(rates) > 1 else []


def _chosen_trials(record: Tuning) -> list[Trial]:
    """Return the short runs at the chosen initialisation, warm-up and bits; without any, the runs of full length."""
    trials = record["trials"] or record.get("full_length", {}).get("trials", [])
    tuned: Mapping[str, Any] = record
    chosen = {key: tuned[key] for key in ("initializer_range", "warmup_ratio", "bits") if tuned.get(key) is not None}
    return [t for t in trials if all(t.get(key) == value for key, value in chosen.items())]


def series(
    entries: Sequence[EntryResult],
    palette: Colors,
    rows: Sequence[SeriesRow],
    axis: Literal["tokens", "bytes"],
    reference: str | None = None,
) -> list[Panel]:
    """Return a panel by budget or file size, none for a single one; an entry has a line if it has two points.

    By "tokens" it is the gap to the reference, with 95 % intervals or hollow without; the reference is at 0. By "bytes"
    it is the loss of the stored models, from lowest to highest, and a second panel has the bits that each entry chose.
    """
    by_bytes = axis == "bytes"
    lines: list[Series] = []
    bits: list[Series] = []
    for name, mark in _marks(entries, palette).items():
        measured: list[tuple[int, Any]] = [(row[axis], e) for row in rows for e in row["entries"] if e["name"] == name]
        points = [(x, _seed_range(e["validation_loss"]) if by_bytes else e["gap"]) for x, e in measured]
        points = [(x, point) for x, point in points if point]
        if len(points) < 2:
            continue
        x = [value for value, _ in points]
        means, low, high = ([point[key] for _, point in points] for key in ("mean", "low", "high"))
        label = f"{name}  {means[-1]:{'' if by_bytes else '+'}.3f}"
        band = None if None in low else (low, high)
        lines.append(dataclasses.replace(_line(mark, x, means, label, band), hollow=band is None))
        if by_bytes:
            bits.append(_line(mark, x, [e["bits"] or 0 for _, e in measured], name))
    ticks = {float(row[axis]): number(row[axis], ".3g") for row in rows}
    if by_bytes:
        bottom = Axis(title="bytes of the file of weights", log=True, ticks=ticks)
        side = Axis(title="bits of a weight", ticks={float(n): str(n) for n in range(2, 9)}, bounds=(1.8, 8.2))
        panels = [Panel(lines, bottom, _loss_axis(entries)), Panel(bits, bottom, side)]
    else:
        bottom = Axis(title="training tokens, each with a whole schedule", log=True, ticks=ticks)
        side = Axis(title=f"gap to {reference} ({loss_unit(entries[0].get('settings'))})")
        panels = [Panel(lines, bottom, side, [Guide(y=0)])]
    return panels if lines else []


def _seed_range(loss: Statistic) -> dict[str, float]:
    return {"mean": loss["mean"], "low": min(loss["values"]), "high": max(loss["values"])}


def scaling(entries: Sequence[Mapping[str, Any]], unit: str) -> list[Panel]:
    """Return the panels of ``scale.json``: loss against training FLOPs and time, with every entry's power law.

    Args:
        entries: the entries of ``scale.json``.
        unit: unit of the loss.
    """
    marks = _marks(entries, colors([entry["name"] for entry in entries]))
    panels = []
    for axis, title in AXES.items():
        if not entries or not all(entry[axis] for entry in entries):
            continue
        shown = []
        for entry in entries:
            x, y = zip(*sorted((p[axis], p["validation_loss"]["mean"]) for p in entry["points"]), strict=True)
            texts = [f"{entry['name']}: {loss:.4f} at {compute:.4g}" for compute, loss in zip(x, y, strict=True)]
            shown.append(Series(**marks[entry["name"]], x=x, y=y, texts=texts, mode="points"))
            law = [math.exp(entry[axis]["fit"]["log_a"]) * compute ** -entry[axis]["fit"]["b"] for compute in x]
            shown.append(Series(**marks[entry["name"]], x=x, y=law, mode="plain", legend=False))
        panels.append(Panel(shown, Axis(title=title, log=True), Axis(title=f"validation loss ({unit})")))
    return panels


def mean_curve(entry: EntryResult) -> list[tuple[float, float, float, float]]:
    """Return (tokens, mean, lowest, highest validation loss) at every step that all seeds have evaluated."""
    by_step = grouped(
        (point["step"], (point["tokens"], loss))
        for run in entry["runs"]
        for point in run["curve"]
        if (loss := point.get("validation_loss")) is not None
    )
    points: list[tuple[float, float, float, float]] = []
    for _, values in sorted(by_step.items()):
        if len(values) == len(entry["runs"]):
            losses = [loss for _, loss in values]
            points.append((values[0][0], sum(losses) / len(losses), min(losses), max(losses)))
    return points


def _token_axis(last: float) -> Axis:
    """Return the axis of training tokens from 0 to ``last``, in round numbers."""
    step = 10 ** math.floor(math.log10(max(last, 1))) / 2
    step *= next(factor for factor in (1, 2, 4, 10) if last / (step * factor) < 7)
    ticks = [step * i for i in range(int(last / step) + 1)]
    return Axis(title="training tokens", ticks={tick: number(tick, ".3g") for tick in ticks}, bounds=(0, last))
