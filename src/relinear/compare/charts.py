"""The figures of a comparison for the page, to be hovered, zoomed and filtered: what ``plots`` draws, as traces.

Every function takes the entries of ``results.json`` and returns a figure of plotly (``data``, ``layout``), or None
where there is nothing to show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from relinear.compare.plots import mean_curve, pareto_front, shown_trials
from relinear.pages.blocks import axes, line, points

__all__ = ["budgets", "curves", "gaps", "pareto", "scaling", "speeds", "tuning"]

Entry = Mapping[str, Any]
Figure = dict[str, Any]
Colours = Mapping[str, str]
LOSS = "validation loss (nats per token)"
_COUNTED = "#7F7F7F"  # lines that are no entry


def curves(entries: Sequence[Entry], colours: Colours, ngram: Mapping[str, Any] | None = None) -> Figure | None:
    """Validation loss against training tokens, mean over seeds, with the band from the lowest to the highest seed."""
    data: list[dict[str, Any]] = []
    bounds: list[tuple[float, float]] = []
    for number, entry in enumerate(entries):
        curve = mean_curve(entry)
        if len(curve) < 2:
            continue
        x, mean, lowest, highest = zip(*curve, strict=True)
        band = (lowest, highest) if lowest != highest else (None, None)
        data += line(entry["name"], colours[entry["name"]], number, x, mean, *band)
        # the first steps span most of the range and show nothing about the operators
        later = [h for place, h in zip(x, highest, strict=True) if place >= (0.15 if len(x) > 4 else 0) * x[-1]]
        bounds.append((min(lowest), max(later)))
    if not data:
        return None
    low, high = min(b[0] for b in bounds), max(b[1] for b in bounds)
    layout = axes("training tokens", LOSS)
    if ngram is not None:
        low, high = min(low, ngram["validation_loss"]), max(high, ngram["validation_loss"])
        layout["shapes"] = [_across(ngram["validation_loss"])]
        layout["annotations"] = [_note(f"{ngram['order']}-grams", ngram["validation_loss"])]
    margin = 0.05 * (high - low) or 0.1
    layout["yaxis"]["range"] = [low - margin, high + margin]
    return {"data": data, "layout": layout}


def gaps(entries: Sequence[Entry], colours: Colours, reference: str | None) -> Figure | None:
    """Gap to the reference while training, mean over seeds: where all seeds of both were evaluated."""
    base = next((entry for entry in entries if entry["name"] == reference), None)
    if base is None:
        return None
    losses = {tokens: mean for tokens, mean, *_ in mean_curve(base)}
    data: list[dict[str, Any]] = []
    ends: list[float] = []
    for number, entry in enumerate(entries):
        found = [(x, mean - losses[x]) for x, mean, *_ in mean_curve(entry) if x in losses]
        if entry is base or len(found) < 2:
            continue
        x, y = zip(*found, strict=True)
        data += line(entry["name"], colours[entry["name"]], number, x, y)
        ends += y[len(y) // 4 :]
    if not data:
        return None
    layout = axes("training tokens", f"validation loss less {reference}'s") | {"shapes": [_across(0)]}
    low, high = min(0.0, *ends), max(0.0, *ends)
    margin = 0.08 * (high - low) or 0.1
    layout["yaxis"]["range"] = [low - margin, high + margin]
    return {"data": data, "layout": layout}


def pareto(entries: Sequence[Entry], colours: Colours) -> dict[str, Figure]:
    """By what it is against, validation loss against parameters, FLOPs a token and, where measured, time a token.

    A grey line joins the entries that no other beats in both.
    """
    sizes = {
        "parameters": {e["name"]: e["parameters"] for e in entries},
        "forward FLOPs per token": {e["name"]: e["flops_per_token"] for e in entries},
        "training µs per token": {e["name"]: _microseconds(e) for e in entries if _timed(e)},
    }
    figures = {}
    for title, places in sizes.items():
        shown = [(number, entry) for number, entry in enumerate(entries) if entry["name"] in places]
        if not shown:
            continue
        spots = [(places[entry["name"]], entry["validation_loss"]["mean"]) for _, entry in shown]
        data = [_front([spots[i] for i in pareto_front(spots)])]
        data += [_spot(entry, colours, number, places[entry["name"]], title) for number, entry in shown]
        figures[title] = {"data": data, "layout": axes(title, LOSS, xaxis={"nticks": 5})}
    return figures


def _timed(entry: Entry) -> bool:
    return bool(entry.get("speed") and entry["speed"]["train_tokens_per_second"] > 0)


def _microseconds(entry: Entry) -> float:
    return 1e6 / entry["speed"]["train_tokens_per_second"]


def _front(front: Sequence[tuple[float, float]]) -> dict[str, Any]:
    x, y = zip(*front, strict=True)
    shape = {"line": {"shape": "hv", "color": _COUNTED, "width": 1.2}, "showlegend": False, "hoverinfo": "skip"}
    return {"type": "scatter", "mode": "lines", "x": list(x), "y": list(y)} | shape


def _spot(entry: Entry, colours: Colours, number: int, x: float, what: str) -> dict[str, Any]:
    loss = entry["validation_loss"]
    spread = "" if loss["spread"] is None else f" ± {loss['spread']:.4f}"
    text = f"{entry['name']}: {loss['mean']:.4f}{spread}, {x:,.6g} {what}"
    error = {"error_y": {"array": [loss["spread"]], "thickness": 1.2}} if loss["spread"] else {}
    spot = points(entry["name"], colours[entry["name"]], number, [x], [loss["mean"]], [text], **error)
    return spot | {"marker": spot["marker"] | {"size": 10}}


def speeds(entries: Sequence[Entry], colours: Colours) -> Figure | None:
    """Training and inference throughput as ratios to the reference, one row an entry."""
    shown = [(number, entry) for number, entry in enumerate(entries) if entry.get("speed")]
    if not shown:
        return None
    reference = shown[0][1]["speed"].get("reference", "dense")
    data = []
    for what, name, symbol in (("train", "training", "circle"), ("inference", "inference", "diamond-open")):
        for number, entry in shown:
            speed = entry["speed"]
            ratio, rate = speed[f"{what}_ratio"], speed[f"{what}_tokens_per_second"]
            text = f"{entry['name']}, {name}: {ratio:.3f} of {reference}'s, {rate:,.0f} tokens a second"
            dot = points(entry["name"], colours[entry["name"]], number, [ratio], [entry["name"]], [text])
            data.append(dot | {"marker": {"symbol": symbol, "size": 11}, "showlegend": False})
    layout = axes(f"tokens per second / {reference}'s", "")
    layout["xaxis"]["title"]["text"] += "<br>(dot: training, open diamond: inference)"
    layout["shapes"] = [{"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1, "line": _LINE}]
    layout["xaxis"] |= {"rangemode": "tozero"}
    layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
    return {"data": data, "layout": layout}


def tuning(entries: Sequence[Entry], colours: Colours) -> Figure | None:
    """Validation loss of the tuning runs against the learning rate."""
    data: list[dict[str, Any]] = []
    for number, entry in enumerate(entries):
        trials = shown_trials(entry["tuning"]) if entry.get("tuning") else []
        finite = sorted((t["learning_rate"], t["validation_loss"]) for t in trials if t["validation_loss"] is not None)
        if finite:
            data += line(entry["name"], colours[entry["name"]], number, *zip(*finite, strict=True))
    if not data:
        return None
    return {"data": data, "layout": axes("learning rate", LOSS, xaxis={"type": "log"})}


def budgets(
    entries: Sequence[Entry], colours: Colours, budgets: Sequence[Mapping[str, Any]] | None, reference: str | None
) -> Figure | None:
    """Gap to the reference against the budget, with 95 % intervals; the reference is the line at 0."""
    if not budgets or len(budgets) < 2:
        return None
    data: list[dict[str, Any]] = []
    x = [budget["tokens"] for budget in budgets]
    for number, name in enumerate(entry["name"] for entry in entries if entry.get("gap")):
        found = [next(e["gap"] for e in budget["entries"] if e["name"] == name) for budget in budgets]
        whole = all(gap["low"] is not None for gap in found)
        band = ([gap["low"] for gap in found], [gap["high"] for gap in found]) if whole else (None, None)
        data += line(name, colours[name], number, x, [gap["mean"] for gap in found], *band)
    layout = axes("training tokens, each with a whole schedule", f"validation loss less {reference}'s")
    layout["xaxis"] |= {"type": "log", "tickvals": x}
    return {"data": data, "layout": layout | {"shapes": [_across(0)]}}


def scaling(entries: Sequence[Entry], colours: Colours, axis: str, title: str) -> Figure | None:
    """Of ``scale.json``: loss against training FLOPs or time (``axis``), points and every entry's power law."""
    if not entries or not all(entry[axis] for entry in entries):
        return None
    data: list[dict[str, Any]] = []
    for number, entry in enumerate(entries):
        x, y = zip(*sorted((p[axis], p["validation_loss"]["mean"]) for p in entry["points"]), strict=True)
        texts = [f"{entry['name']}: {loss:.4f} at {place:.4g}" for place, loss in zip(x, y, strict=True)]
        data.append(points(entry["name"], colours[entry["name"]], number, x, y, texts))
        fit = entry[axis]["fit"]
        law = line(
            entry["name"], colours[entry["name"]], number, x, [math.exp(fit["log_a"]) * p ** -fit["b"] for p in x]
        )
        data += [trace | {"mode": "lines", "showlegend": False} for trace in law]
    return {"data": data, "layout": axes(title, LOSS, xaxis={"type": "log"})}


_LINE = {"color": _COUNTED, "width": 1.2, "dash": "dash"}


def _across(y: float) -> dict[str, Any]:
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": _LINE}


def _note(text: str, y: float) -> dict[str, Any]:
    place = {"xref": "paper", "x": 1, "xanchor": "right", "y": y, "yanchor": "bottom"}
    return place | {"text": text, "showarrow": False, "font": {"color": _COUNTED}}
