"""Figures of a comparison: one colour an entry in every figure, labels at the lines.

Every function takes the entries of ``results.json`` and returns a matplotlib Figure, or None where there is nothing to
show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from relinear.analysis.plots import colours, new_figure

__all__ = [
    "budgets",
    "curves",
    "mean_curve",
    "pareto",
    "pareto_front",
    "scaling",
    "shown_trials",
    "speeds",
    "spread_labels",
    "tuning",
]

Entry = Mapping[str, Any]
_COUNTED = "#8C8C8C"  # the n-gram line, which is no entry


def spread_labels(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the ``wanted`` ones, at least ``gap`` apart and within [low, high] where they fit."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    gap = min(gap, (high - low) / max(1, len(wanted) - 1)) if len(wanted) > 1 else gap
    placed = [min(max(w, low), high) for w in wanted]
    for before, after in pairwise(order):
        placed[after] = max(placed[after], placed[before] + gap)
    if order and placed[order[-1]] > high:
        placed[order[-1]] = high
        for after, before in pairwise(order[::-1]):
            placed[before] = min(placed[before], placed[after] - gap)
    return placed


def curves(entries: Sequence[Entry], ngram: Mapping[str, Any] | None = None) -> Any:
    """Validation loss against training tokens, mean over seeds, with the band from the lowest to the highest seed.

    ``ngram`` (of ``results.json``) is a line across: what counting comes to with as many tokens.
    """
    palette = colours(entries)
    series = {entry["name"]: mean_curve(entry) for entry in entries}
    series = {name: points for name, points in series.items() if len(points) > 1}
    if not series:
        return None
    figure, (axes,) = new_figure(8.4, 4.6)
    last_token = max(points[-1][0] for points in series.values())
    scale, unit = _si(last_token)
    bottom = min(point[2] for points in series.values() for point in points)
    # The first steps span most of the range and show nothing about the operators: leave them above the frame.
    # (With a handful of evaluations there would be nothing left to see.)
    cut = 0.15 if min(len(points) for points in series.values()) > 4 else 0.0
    top = max(next((p[3] for p in points if p[0] >= cut * points[-1][0]), points[0][3]) for points in series.values())
    if ngram is not None:
        bottom, top = min(bottom, ngram["validation_loss"]), max(top, ngram["validation_loss"])
        axes.axhline(ngram["validation_loss"], color=_COUNTED, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    margin = 0.05 * (top - bottom) or 0.1
    low, high = bottom - margin, top + margin
    for name, points in series.items():
        x = [p[0] / scale for p in points]
        axes.plot(x, [p[1] for p in points], color=palette[name], linewidth=1.8, marker="o", markersize=2.5)
        if any(p[2] != p[3] for p in points):
            axes.fill_between(x, [p[2] for p in points], [p[3] for p in points], color=palette[name], alpha=0.15, lw=0)
    ends: dict[str, tuple[float, ...]] = {name: points[-1] for name, points in series.items()}
    if ngram is not None:
        counted = f"{ngram['order']}-grams"
        ends[counted], palette = (last_token, ngram["validation_loss"]), palette | {counted: _COUNTED}
    places = spread_labels([end[1] for end in ends.values()], 0.05 * (high - low), low, high)
    for (name, end), place in zip(ends.items(), places, strict=True):
        _label_at_end(axes, f"{name}  {end[1]:.3f}", end[0] / scale, end[1], place, palette[name])
    axes.set_ylim(low, high)
    axes.set_xlim(0, last_token / scale)
    axes.set_xlabel(f"training tokens ({unit})" if unit else "training tokens")
    axes.set_ylabel("validation loss (nats per token)")
    starts = [points[0][1] for points in series.values() if points[0][0] == 0]
    note = (
        f"; at step 0 it is {sum(starts) / len(starts):.2f}, above the frame" if starts and min(starts) > high else ""
    )
    seeds = max(len(entry["runs"]) for entry in entries)
    counted = "1 seed" if seeds == 1 else f"mean and range of {seeds} seeds"
    axes.set_title(f"Validation loss while training ({counted}{note})", loc="left")
    return figure


def _label_at_end(axes: Any, text: str, x: float, y: float, place: float, colour: str) -> None:
    axes.annotate(
        text,
        xy=(x, y),
        xytext=(1.03, place),
        textcoords=axes.get_yaxis_transform(),
        color=colour,
        va="center",
        fontsize=9.5,
        annotation_clip=False,
        arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.6, "alpha": 0.6, "shrinkA": 1, "shrinkB": 2},
    )


def mean_curve(entry: Entry) -> list[tuple[float, float, float, float]]:
    """(tokens, mean, lowest, highest validation loss) at every step that all seeds have evaluated."""
    by_step: dict[int, list[tuple[float, float]]] = {}
    for run in entry["runs"]:
        for point in run["curve"]:
            if point.get("validation_loss") is not None:
                by_step.setdefault(point["step"], []).append((point["tokens"], point["validation_loss"]))
    points = []
    for _, values in sorted(by_step.items()):
        if len(values) == len(entry["runs"]):
            losses = [loss for _, loss in values]
            points.append((values[0][0], sum(losses) / len(losses), min(losses), max(losses)))
    return points


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other point beats in both coordinates (smaller is better), from left to right."""
    front: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if not front or points[i][1] < points[front[-1]][1]:
            front.append(i)
    return front


def pareto(entries: Sequence[Entry]) -> Any:
    """Validation loss against parameters and against FLOPs a token, with the entries that nothing beats connected."""
    if not entries:
        return None
    palette = colours(entries)
    figure, panels = new_figure(9.6, 4.2, 2, sharey=True)
    for axes, key, name in (
        (panels[0], "parameters", "parameters"),
        (panels[1], "flops_per_token", "forward FLOPs per token"),
    ):
        points = [(entry[key], entry["validation_loss"]["mean"]) for entry in entries]
        scale, unit = _si(max(p[0] for p in points))
        xs, ys = [p[0] / scale for p in points], [p[1] for p in points]
        front = pareto_front(points)
        axes.step([xs[i] for i in front], [ys[i] for i in front], where="post", color="#AAAAAA", lw=1.2, zorder=1)
        for entry, x, y in zip(entries, xs, ys, strict=True):
            error = entry["validation_loss"]["spread"]
            axes.errorbar(
                x, y, yerr=error or None, fmt="o", ms=7, color=palette[entry["name"]], capsize=3, lw=1.2, zorder=3
            )
        width = max(xs) - min(xs) or 0.1 * max(xs)
        axes.set_xlim(min(xs) - 0.12 * width, max(xs) + 0.12 * width)
        _label_points(axes, [entry["name"] for entry in entries], xs, ys, palette)
        axes.set_xlabel(f"{name} ({unit})" if unit else name)
    panels[0].set_ylabel("validation loss (nats per token)")
    panels[0].set_title("Loss against size", loc="left")
    panels[1].set_title("Loss against compute", loc="left")
    figure.text(
        0.995, 0.005, "grey: entries that no other beats in both", ha="right", va="bottom", fontsize=8, color="#777777"
    )
    figure.get_layout_engine().set(rect=(0, 0.035, 1, 0.965))
    return figure


def _label_points(axes: Any, names: Sequence[str], xs: Sequence[float], ys: Sequence[float], palette: Any) -> None:
    """Names beside their points: on the side with more room, moved apart where points lie close together."""
    low, high = min(ys), max(ys)
    margin = 0.15 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    left, right = axes.get_xlim()
    gap = 0.055 * (high - low + 2 * margin)
    for on_left in (False, True):
        side = [i for i, x in enumerate(xs) if (x > (left + right) / 2) == on_left]
        places = spread_labels([ys[i] for i in side], gap, low - 0.9 * margin, high + 0.9 * margin)
        for i, place in zip(side, places, strict=True):
            moved = abs(place - ys[i]) > 0.2 * gap
            axes.annotate(
                names[i],
                xy=(xs[i], ys[i]),
                xytext=(xs[i] + (-1 if on_left else 1) * 0.035 * (right - left), place),
                ha="right" if on_left else "left",
                va="center",
                fontsize=9,
                color=palette[names[i]],
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
                arrowprops={"arrowstyle": "-", "color": palette[names[i]], "lw": 0.5, "alpha": 0.6} if moved else None,
            )


def speeds(entries: Sequence[Entry]) -> Any:
    """Training and inference throughput as ratios to the dense reference, one row an entry."""
    shown = [entry for entry in entries if entry.get("speed")]
    if not shown:
        return None
    palette = colours(entries)
    figure, panels = new_figure(9.6, 0.9 + 0.42 * len(shown), 2, sharey=True)
    reference = shown[0]["speed"].get("reference", "dense")
    for axes, what in zip(panels, ("train", "inference"), strict=True):
        axes.axvline(1, color="#888888", lw=1, zorder=1)
        largest = max(entry["speed"][f"{what}_ratio"] for entry in shown)
        for row, entry in enumerate(shown):
            ratio = entry["speed"][f"{what}_ratio"]
            axes.barh(row, ratio, height=0.55, color=palette[entry["name"]], alpha=0.85, zorder=2)
            rate = entry["speed"][f"{what}_tokens_per_second"]
            axes.text(
                ratio + 0.02 * largest,
                row,
                f"{ratio:.2f}  ({_short(rate)} tok/s)",
                va="center",
                fontsize=8.5,
                color="#333333",
            )
        axes.set_xlim(0, 1.45 * max(1.0, largest))
        axes.set_title(f"{'Training' if what == 'train' else 'Inference'} speed", loc="left")
        axes.set_xlabel(f"tokens per second / {reference}'s")
        axes.grid(visible=False, axis="y")
    panels[0].set_yticks(range(len(shown)), [entry["name"] for entry in shown])
    panels[0].invert_yaxis()
    return figure


def tuning(entries: Sequence[Entry]) -> Any:
    """Validation loss of the short tuning runs against the learning rate; the chosen rate is ringed."""
    tuned = [entry for entry in entries if entry.get("tuning")]
    if not tuned:
        return None
    palette = colours(entries)
    figure, (axes,) = new_figure(8.4, 4.2)
    ends = {}
    for entry in tuned:
        trials = sorted((t["learning_rate"], t["validation_loss"]) for t in shown_trials(entry["tuning"]))
        finite = [(rate, loss) for rate, loss in trials if loss is not None]
        if not finite:
            continue
        axes.plot(*zip(*finite, strict=True), color=palette[entry["name"]], marker="o", ms=4, lw=1.5)
        chosen = [t for t in finite if t[0] == entry["learning_rate"]]
        best = chosen[0] if chosen else min(finite, key=lambda t: t[1])
        axes.plot(*best, marker="o", ms=10, mfc="none", color=palette[entry["name"]])
        ends[entry["name"]] = finite[-1]
    if not ends:
        return None
    axes.set_xscale("log")
    low, high = axes.get_ylim()
    places = spread_labels([end[1] for end in ends.values()], 0.055 * (high - low), low, high)
    for (name, end), place in zip(ends.items(), places, strict=True):
        _label_at_end(axes, name, end[0], end[1], place, palette[name])
    axes.set_xlabel("learning rate")
    axes.set_ylabel("validation loss (nats per token)")
    axes.set_title("Tuning: short runs by learning rate (ring: chosen)", loc="left")
    rates = sorted({t["learning_rate"] for entry in tuned for t in shown_trials(entry["tuning"])})
    axes.set_xticks(rates, [f"{rate:.2g}" for rate in rates])
    axes.minorticks_off()
    return figure


def budgets(entries: Sequence[Entry], budgets: Sequence[Mapping[str, Any]] | None, reference: str | None) -> Any:
    """Gap to the reference against the budget, with 95 % intervals; the reference is the line at 0."""
    if not budgets or len(budgets) < 2:
        return None
    palette = colours(entries)
    figure, (axes,) = new_figure(8.4, 4.6)
    tokens = [budget["tokens"] for budget in budgets]
    axes.set_xscale("log")
    axes.axhline(0, color="#888888", lw=1, zorder=1)
    ends: dict[str, float] = {}
    for name in (entry["name"] for entry in entries if entry.get("gap")):
        gaps = [next(e["gap"] for e in budget["entries"] if e["name"] == name) for budget in budgets]
        _gap_line(axes, tokens, gaps, palette[name])
        ends[name] = gaps[-1]["mean"]
    low, high = axes.get_ylim()
    places = spread_labels(list(ends.values()), 0.055 * (high - low), low, high)
    for (name, end), place in zip(ends.items(), places, strict=True):
        _label_at_end(axes, f"{name}  {end:+.3f}", tokens[-1], end, place, palette[name])
    axes.set_ylim(low, high)
    axes.set_xticks(tokens, [_short(value) for value in tokens])
    axes.minorticks_off()
    axes.set_xlabel("training tokens, each with a whole schedule")
    axes.set_ylabel(f"validation loss less {reference}'s")
    axes.set_title(f"Gap to {reference} by budget (95 % intervals; below 0 is better)", loc="left")
    return figure


def _gap_line(axes: Any, x: Sequence[float], gaps: Sequence[Mapping[str, Any]], colour: str) -> None:
    means = [gap["mean"] for gap in gaps]
    axes.plot(x, means, color=colour, marker="o", ms=4, lw=1.6)
    if all(gap["low"] is not None for gap in gaps):
        axes.fill_between(
            x, [gap["low"] for gap in gaps], [gap["high"] for gap in gaps], color=colour, alpha=0.15, lw=0
        )


def scaling(results: Mapping[str, Any]) -> Any:
    """Of ``scale.json``: loss against training FLOPs and against training time, with every entry's power law."""
    entries = results["entries"]
    shown = [axis for axis in ("flops", "seconds") if all(entry[axis] for entry in entries)]
    palette = colours(entries)
    dense = [entry["name"] for entry in entries if entry["dense"]]
    # dense models share a colour; line and marker tell them apart
    styles = dict(zip(dense, (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D")), strict=False))
    figure, panels = new_figure(4.8 * len(shown) + 1.2, 4.6, len(shown), sharey=True)
    for axes, axis in zip(panels, shown, strict=True):
        for entry in entries:
            x, y = zip(*sorted((p[axis], p["validation_loss"]["mean"]) for p in entry["points"]), strict=True)
            fit = [math.exp(entry[axis]["fit"]["log_a"]) * place ** -entry[axis]["fit"]["b"] for place in x]
            style, marker = styles.get(entry["name"], ("-", "o"))
            axes.plot(x, fit, color=palette[entry["name"]], lw=1.4, linestyle=style, label=entry["name"])
            axes.plot(x, y, marker, ms=4.5, color=palette[entry["name"]])
        places = [point[axis] for entry in entries for point in entry["points"]]
        low, high = min(places), max(places)
        axes.set_xscale("log")
        ticks = [low, math.sqrt(low * high), high]
        axes.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("training FLOPs" if axis == "flops" else "seconds of training")
    panels[0].set_ylabel("validation loss (nats per token)")
    panels[0].set_title("Loss against compute", loc="left")
    panels[-1].legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure


def shown_trials(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The short runs at the initialisation and warm-up that were chosen; where there are none, those of full length."""
    trials = record["trials"] or record.get("full_length", {}).get("trials", [])
    chosen = {key: record[key] for key in ("initializer_range", "warmup_ratio") if record.get(key) is not None}
    return [t for t in trials if all(t.get(key) == value for key, value in chosen.items())]


def _si(largest: float) -> tuple[float, str]:
    for scale, unit in ((1e12, "trillions"), (1e9, "billions"), (1e6, "millions"), (1e3, "thousands")):
        if largest >= scale:
            return scale, unit
    return 1.0, ""


def _short(value: float) -> str:
    for scale, unit in ((1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"
