"""Describe the figures of a comparison, for its page and for the files in ``plots/``; an entry has one colour in all.

Every function takes the entries of ``results.json`` (of ``scale.json``) and returns panels, none if there is nothing
to show.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from relinear.compare.schema import AXES, EntryResult, Ngram, SeriesRow, Statistic, Trial, Tuning
from relinear.pages.figures import GUIDE, REFERENCE, Axis, Guide, Panel, Series, colors
from relinear.system.grouped import grouped

Colors = Mapping[str, str]


def loss_unit(train: Mapping[str, Any] | None) -> str:
    """Return the unit of losses under settings of training: nats per byte if tokens are bytes, else per token."""
    data = (train or {}).get("data") or {}
    return f"nats per {'byte' if data.get('tokenizer') == 'bytes' else 'token'}"


def _loss_axis(entries: Sequence[EntryResult], bounds: tuple[float, float] | None = None) -> Axis:
    return Axis(title=f"validation loss ({loss_unit(entries[0].get('settings'))})", bounds=bounds)


def curves(entries: Sequence[EntryResult], palette: Colors, ngram: Ngram | None = None) -> list[Panel]:
    """Return the validation loss against training tokens: the mean over seeds, and the band from lowest to highest.

    ``ngram`` (of ``results.json``) is a horizontal line, the loss of n-grams with as many tokens, unless it lies so far
    off that it would squeeze the curves.
    """
    shown: list[Series] = []
    bounds: list[float] = []
    for number, entry in enumerate(entries):
        curve = mean_curve(entry)
        if len(curve) < 2:
            continue
        x, mean, lowest, highest = zip(*curve, strict=True)
        label = f"{entry['name']}  {mean[-1]:.3f}"
        shown.append(_line(entry["name"], palette, number, x, mean, lowest, highest, label))
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
    """Return the validation loss against parameters, FLOPs per token and, where measured, time a token: a panel each.

    A grey line joins the entries that no other beats in both, if there are several.
    """
    measures = {
        "parameters": {e["name"]: e["parameters"] for e in entries},
        "forward FLOPs per token": {e["name"]: e["flops_per_token"] for e in entries},
        "training µs per token": {e["name"]: 1e6 / e["speed"]["train_tokens_per_second"] for e in entries if _timed(e)},
    }
    panels = []
    for title, xs in measures.items():
        measured = [(number, entry) for number, entry in enumerate(entries) if entry["name"] in xs]
        if not measured:
            continue
        points = [(xs[entry["name"]], entry["validation_loss"]["mean"]) for _, entry in measured]
        x, y = zip(*(points[i] for i in pareto_front(points)), strict=True)
        front = [Series(name="front", color=GUIDE, x=x, y=y, mode="steps", legend=False)] * (len(x) > 1)
        markers = [_marker(entry, palette, number, xs[entry["name"]], title) for number, entry in measured]
        panels.append(Panel([*front, *markers], Axis(title=title), _loss_axis(entries)))
    return panels


def _timed(entry: EntryResult) -> bool:
    return bool(entry.get("speed") and entry["speed"]["train_tokens_per_second"] > 0)


def _marker(entry: EntryResult, palette: Colors, number: int, x: float, unit: str) -> Series:
    name, mean, std = entry["name"], entry["validation_loss"]["mean"], entry["validation_loss"]["std"]
    text = f"{name}: {mean:.4f}{'' if std is None else f' ± {std:.4f}'}, {x:,.6g} {unit}"
    style: dict[str, Any] = {"number": number, "mode": "points", "size": 10, "label": name}
    style |= {"low": [mean - std], "high": [mean + std]} if std else {}
    return Series(name=name, color=palette[name], x=[x], y=[mean], texts=[text], **style)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return indices of points that no other beats in both coordinates (smaller is better), from left to right."""
    front: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if not front or points[i][1] < points[front[-1]][1]:
            front.append(i)
    return front


def speeds(entries: Sequence[EntryResult], palette: Colors) -> list[Panel]:
    """Return the training and inference throughput as ratios to the reference, one row per entry."""
    timed: list[tuple[str, Any]] = [(entry["name"], entry["speed"]) for entry in entries if entry.get("speed")]
    if not timed:
        return []
    reference = timed[0][1].get("reference", "dense")
    shown = []
    for mode, title, number in (("train", "training", 0), ("inference", "inference", 2)):
        for name, speed in timed:
            ratio, rate = speed[f"{mode}_ratio"], speed[f"{mode}_tokens_per_second"]
            text = f"{name}, {title}: {ratio:.3f} of {reference}'s, {rate:,.0f} tokens per second"
            style: dict[str, Any] = {"mode": "points", "size": 11, "hollow": number > 0, "legend": False}
            point: dict[str, Any] = {"x": [ratio], "y": [name], "texts": [text]}
            shown.append(Series(name=name, color=palette[name], number=number, **point, **style))
    axis = Axis(title=f"tokens per second, {reference} = 1", from_zero=True)
    return [Panel(shown, axis, Axis(rows=True), [Guide(x=1)])]


def tuning(entries: Sequence[EntryResult], palette: Colors) -> list[Panel]:
    """Return the validation loss of the short tuning runs against the learning rate; the chosen rate is ringed."""
    shown: list[Series] = []
    for number, entry in enumerate(entries):
        trials = _chosen_trials(record) if (record := entry.get("tuning")) else []
        finite = sorted((t["learning_rate"], t["validation_loss"]) for t in trials if t["validation_loss"] is not None)
        if finite:
            name, best = entry["name"], min(finite, key=lambda trial: trial[1])
            ring = next((trial for trial in finite if trial[0] == entry["learning_rate"]), best)
            x, y = zip(*finite, strict=True)
            shown.append(_line(name, palette, number, x, y, label=name))
            style: dict[str, Any] = {"mode": "points", "size": 14, "hollow": True, "legend": False}
            text = f"{name}: {ring[0]:.3g} was chosen"
            shown.append(Series(name=name, color=palette[name], x=[ring[0]], y=[ring[1]], texts=[text], **style))
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
    for number, name in enumerate(entry["name"] for entry in entries):
        measured: list[tuple[int, Any]] = [(row[axis], e) for row in rows for e in row["entries"] if e["name"] == name]
        points = [(x, _seed_range(e["validation_loss"]) if by_bytes else e["gap"]) for x, e in measured]
        points = [(x, point) for x, point in points if point]
        if len(points) < 2:
            continue
        x = [value for value, _ in points]
        means, low, high = ([point[key] for _, point in points] for key in ("mean", "low", "high"))
        label = f"{name}  {means[-1]:{'' if by_bytes else '+'}.3f}"
        if None in low:
            lines.append(dataclasses.replace(_line(name, palette, number, x, means, label=label), hollow=True))
        else:
            lines.append(_line(name, palette, number, x, means, low, high, label))
        if by_bytes:
            bits.append(_line(name, palette, number, x, [e["bits"] or 0 for _, e in measured], label=name))
    ticks = {float(row[axis]): _short(row[axis]) for row in rows}
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

    ``unit``: of the loss.
    """
    palette = colors([entry["name"] for entry in entries])
    panels = []
    for axis, title in AXES.items():
        if not entries or not all(entry[axis] for entry in entries):
            continue
        shown = []
        for number, entry in enumerate(entries):
            x, y = zip(*sorted((p[axis], p["validation_loss"]["mean"]) for p in entry["points"]), strict=True)
            texts = [f"{entry['name']}: {loss:.4f} at {compute:.4g}" for compute, loss in zip(x, y, strict=True)]
            shared: dict[str, Any] = {"name": entry["name"], "color": palette[entry["name"]], "number": number, "x": x}
            shown.append(Series(**shared, y=y, texts=texts, mode="points"))
            law = [math.exp(entry[axis]["fit"]["log_a"]) * compute ** -entry[axis]["fit"]["b"] for compute in x]
            shown.append(Series(**shared, y=law, mode="plain", legend=False))
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


def _line(
    name: str,
    palette: Colors,
    number: int,
    x: Sequence[float],
    y: Sequence[float],
    low: Sequence[float] | None = None,
    high: Sequence[float] | None = None,
    label: str = "",
) -> Series:
    low, high = (None, None) if low == high else (low, high)
    color = palette.get(name, REFERENCE)
    return Series(name=name, color=color, number=number, x=x, y=y, low=low, high=high, size=5, label=label)


def _token_axis(last: float) -> Axis:
    """Return the axis of training tokens from 0 to ``last``, in round numbers."""
    step = 10 ** math.floor(math.log10(max(last, 1))) / 2
    step *= next(factor for factor in (1, 2, 4, 10) if last / (step * factor) < 7)
    ticks = [step * i for i in range(int(last / step) + 1)]
    return Axis(title="training tokens", ticks={tick: _short(tick) for tick in ticks}, bounds=(0, last))


def _short(value: float) -> str:
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"
