"""The figure of an operator's page: what was measured of it as marks with intervals, from the data of its tables.

A row is a line of words above a line of marks, as in the forest plot of claims.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import evidence
import measured
import svg
from measured import mean, signed
from relinear.system.confidence import half_width

__all__ = ["FIGURES", "FITS", "LOSSES", "file_name", "in_page", "picture"]

#: methods of results/rotor that an operator's page shows
FITS = {
    "low_rank": ("low rank 1", "low rank 4"),
    "block_hadamard": ("block-Hadamard, 64 blocks",),
    "hdpl": ("HDPL, rank 8, 8 blocks",),
    "rotor": ("rotor, double", "rotor, single", "Lemma-1 terms, depth 0, 3 terms"),
}
#: files of one budget, their reference, and the entries that an operator's page shows
LOSSES = {
    "ccl": (
        ("ccl/claims-1M/results.json",),
        "dense-equal-parameters",
        ("dense-64", "dense-second-embedding", "static", "ccl"),
    ),
    "transponder": (
        ("transponder/runs.json",),
        "dense",
        (
            "path_scalar",
            "path_channel",
            "layer_scalar",
            "layer_channel",
            "transponder",
            "dense_same_parameters",
            "dense_same_time",
        ),
    ),
    "output_gate": (("transponder/runs.json",), "dense", ("all_gate", "sdpa_gate_head", "transponder")),
}
WIDTH, LEFT, RIGHT, STEP, LINE = 400, 14, 372, 37, 17
#: marks: of ours, of ours with one seed, of another method, and of the mean output alone
DOT, RING, DIAMOND, ALONE = "dot", "ring", "diamond", "alone"
#: distances of ticks, of which the first that makes few enough is taken
STEPS, FEW = (0.02, 0.05, 0.1, 0.2, 0.5), 7
#: ticks of times relative to dense, which stand at equal ratios
TIMES = (0.5, 1.0, 2.0, 4.0)


@dataclasses.dataclass(frozen=True)
class Mark:
    """A value with its interval, and its shape."""

    at: float
    low: float
    high: float
    shape: str = DOT


@dataclasses.dataclass(frozen=True)
class Row:
    """Words, what stands at their right, and marks below; a heading where there are none."""

    label: str
    said: str = ""
    marks: Sequence[Mark] = ()


@dataclasses.dataclass(frozen=True)
class Figure:
    """A reading in words, what is measured, names of shapes, rows, and what the sides of the bold line mean."""

    reading: str
    unit: str
    key: Sequence[tuple[str, str]]
    rows: Sequence[Row]
    sides: tuple[str, str] = ("← better", "worse →")
    ratios: bool = False


# What is drawn


def _gaps(told: str, groups: Sequence[tuple[str, Sequence[tuple[str, evidence.Row]]]], whose: str = "") -> Figure:
    """Gaps to a reference under headings; the reading says what is ahead and what behind."""
    rows: list[Row] = []
    verdicts: dict[str, list[str]] = {}
    for heading, found in groups:
        rows.append(Row(heading))
        for label, row in found:
            at = mean(row.gaps)
            low, high = row.bounds or (at, at)
            said = _minus(at) + (", one seed" if row.bounds is None else "")
            rows.append(Row(label, said, [Mark(at, low, high, RING if row.bounds is None else DOT)]))
            verdicts.setdefault(row.verdict, []).append(label)
    every = sum(map(len, verdicts.values()))
    apart = [f"{verdict}: {_listed(verdicts[verdict], every)}" for verdict in _ORDER if verdict in verdicts]
    reading = whose + "; ".join(apart) if apart else "every interval spans zero"
    key = [(DOT, "mean and 95 % interval over seeds")]
    key += [(RING, "one seed")] * any(row.bounds is None for _, found in groups for _, row in found)
    return Figure(reading[0].upper() + reading[1:], f"gap in validation loss to {told}, nats", key, rows)


_ORDER = (evidence.AHEAD, evidence.BEHIND)


def _listed(labels: Sequence[str], every: int) -> str:
    return " / ".join(labels) if len(labels) < 5 else f"{len(labels)} of {every} comparisons"


def _entries(kind: str) -> list[tuple[str, evidence.Row]]:
    """The rows of the table of losses."""
    (name,), reference, entries = LOSSES[kind]
    found = measured.losses(name)
    gaps = {entry: [a - b for a, b in zip(found[entry], found[reference], strict=True)] for entry in entries}
    return [(_spelt(entry), evidence.Row("", entry, gaps[entry])) for entry in entries]


def _spelt(entry: str) -> str:
    """An entry as words."""
    return _SPELT.get(entry, entry.replace("_", " ").replace("-", " "))


_SPELT = {
    "ccl": "CCL at 1 M tokens",
    "static": "CCL without gates",
    "dense-64": "dense of its width",
    "dense-second-embedding": "dense with a second embedding",
    "dense_same_parameters": "dense of its size",
    "dense_same_time": "dense with twice the steps",
    "all_gate": "output gate on all projections",
    "sdpa_gate_head": "SDPA gate by head",
}


def _budget() -> str:
    """Tokens and seeds of the Transponder's runs."""
    runs = {name: run for name, run in measured.read("transponder/runs.json")["runs"].items() if "/dense/" in name}
    seeds = [run["settings"] for name, run in runs.items() if name.startswith("runs/")]
    tokens = seeds[0]["steps"] * seeds[0]["batch_size"] * seeds[0]["data"]["sequence_length"]
    return f"{tokens / 1e6:.2g} M tokens, {len(seeds)} seeds"


def _budgets(method: str, control: str, above: float = 0) -> list[tuple[str, evidence.Row]]:
    """A claim's gaps to one control by tokens."""
    rows = [row for row in evidence.rows() if (row.method, row.control) == (method, control) and row.tokens > above]
    return [(f"{method} at {row.budget} tokens", row) for row in rows]


def _ccl() -> Figure:
    later = _budgets("CCL", "dense of its size", 1e6)
    return _gaps("dense of its size", [("1 M tokens", _entries("ccl")), ("longer runs", later)])


def _hdpl() -> Figure:
    rows = [row for row in evidence.rows() if row.method == "HDPL"]
    budgets = dict.fromkeys(row.budget for row in rows)
    groups = [(f"{at} tokens, against", [(row.control, row) for row in rows if row.budget == at]) for at in budgets]
    return _gaps("dense models", groups, "HDPL ")


def _transponder() -> Figure:
    more = _budgets("Transponder", "plain model")
    return _gaps("the plain model", [(_budget(), _entries("transponder")), (f"{more[0][1].seeds} seeds", more)])


def _output_gate() -> Figure:
    return _gaps("the plain model", [(_budget(), _entries("output_gate"))])


def _fits(kind: str, methods: Sequence[tuple[str, str]]) -> Figure:
    """Fit errors of stand-ins for projections, beside that of the mean output alone; the first method is read."""
    rows, gained = [], []
    for layer in ("12", "20"):
        for projection in "qkv":
            errors = [[row["error"] for row in measured.fits(projection, layer, method)] for _, method in methods]
            alone = measured.constant(projection, layer)
            marks = [Mark(alone, alone, alone, ALONE)]
            for (shape, _), found in zip(methods, errors, strict=True):
                half = half_width(found) or 0.0
                marks.append(Mark(mean(found), mean(found) - half, mean(found) + half, shape))
            gained.append((projection, alone - mean(errors[0])))
            rows.append(Row(f"{projection} of layer {layer}", ", ".join(f"{mean(e):.3f}" for e in errors), marks))
    named = [measured.METHODS.get(method, method) for _, method in methods]
    who = named[0][0].upper() + named[0][1:]
    better, most = sum(by > 0 for _, by in gained), max(by for projection, by in gained if projection in "qk")
    reading = f"{who} fits better than the mean output alone in {better} of {len(rows)} projections, on q and k "
    reading += f"by at most {most:.3f}" if most > 0 else "in none"
    key = [
        *((shape, name) for (shape, _), name in zip(methods, named, strict=True)),
        (ALONE, "mean output alone; lines: 95 %"),
    ]
    unit = "relative squared error on held-out tokens (no unit)"
    return Figure(reading, unit, key, rows, ("", "0 is an exact copy; ← better"))


def _times(kind: str) -> Figure:
    """Times relative to dense."""
    timed, rows = measured.timed(kind)[1], []
    for tokens in (1, 4096):
        rows.append(Row(f"{tokens:,} token{'s' * (tokens > 1)}"))
        cases: dict[str, list[dict[str, Any]]] = {}
        for row in sorted(timed, key=lambda row: row["phase"]):
            if row["tokens"] == tokens:
                cases.setdefault(f"{row['in_features']} → {row['out_features']}, {row['dtype']}", []).append(row)
        for case, found in cases.items():
            marks = [
                Mark(row["ratio"], row["ratio_minimum"], row["ratio_maximum"], _PHASES[row["phase"]]) for row in found
            ]
            rows.append(Row(case, ", ".join(f"{row['ratio']:.2f}" for row in found), marks))
    reading = f"Faster than dense in {sum(row['ratio'] < 1 for row in timed)} of {len(timed)} timed cases"
    key = [(_PHASES["forward"], "forward"), (_PHASES["step"], "training step; lines: all runs")]
    return Figure(reading, "time as a multiple of dense's", key, rows, ("← faster", "slower →"), ratios=True)


_PHASES = {"forward": DOT, "step": DIAMOND}


#: operator -> what makes its figure
FIGURES: dict[str, Callable[[], Figure]] = {
    "block_hadamard": lambda: _fits("block_hadamard", [(DOT, FITS["block_hadamard"][0])]),
    "ccl": _ccl,
    "hdpl": _hdpl,
    "low_rank": lambda: _fits("low_rank", list(zip((DOT, DIAMOND), FITS["low_rank"], strict=True))),
    "monarch": lambda: _times("monarch"),
    "output_gate": _output_gate,
    "rotor": lambda: _fits("rotor", [(DOT, FITS["rotor"][0]), (DIAMOND, FITS["rotor"][2])]),
    "transponder": _transponder,
}


@functools.cache
def figure_of(kind: str) -> Figure:
    """The figure of an operator: two pictures, their titles and a page show it."""
    return FIGURES[kind]()


# How it is drawn


def picture(theme: str, kind: str) -> str:
    """The SVG, for a light or a dark page."""
    ink, soft, line, ours, theirs = svg.THEMES[theme]
    colors = {DOT: ours, RING: ours, DIAMOND: theirs, ALONE: soft}
    figure = figure_of(kind)
    marks = [mark for row in figure.rows for mark in row.marks]
    low, high = min(mark.low for mark in marks), max(mark.high for mark in marks)
    scaled: Callable[[float], float] = math.log if figure.ratios else float
    middle = 1.0 if figure.ratios else 0.0
    # room for a word on either side of the bold line
    room = 0.0 if figure.ratios else 0.2
    low, high = min(low, middle), max(high, middle + room * (middle - low))
    ticks = TIMES if figure.ratios else _ticks(low, high)
    ticks = [tick for tick in ticks if low - 1e-9 <= tick <= high + 1e-9]
    gaps = any(figure.sides[:1]) and not figure.ratios
    form = "g" if figure.ratios else "+" * gaps + f".{2 if ticks[1] - ticks[0] < 0.099 else 1}f"

    def place(value: float) -> float:
        return LEFT + 8 + (scaled(value) - scaled(low)) / (scaled(high) - scaled(low)) * (RIGHT - LEFT - 8)

    def drawn(mark: Mark, y: float) -> Iterator[str]:
        if mark.high > mark.low:
            yield svg.line(place(mark.low), y, place(mark.high), y, colors[mark.shape], 2.4)
        yield shape(mark.shape, place(mark.at), y)

    def shape(which: str, x: float, y: float) -> str:
        if which == DIAMOND:
            return svg.diamond(x, y, theirs)
        return svg.circle(x, y, colors[which], hollow=which != DOT)

    y, parts = 14, []
    for said in textwrap.wrap(figure.reading, 50):
        parts.append(svg.text(0, y, said, ink, "start", 600))
        y += LINE
    x, y = 8, y + 4
    for which, name in figure.key:
        wide = 36 + 7.2 * len(name)
        if x > 8 and x + wide > WIDTH:
            x, y = 8, y + 19
        parts += [shape(which, x, y - 4), svg.text(x + 12, y, name, soft, "start")]
        x += wide
    y += 24
    parts.append(svg.text(0, y, figure.unit, soft, "start"))
    y += 20
    parts += _sides(figure.sides, place(middle), y, soft)
    y += 20
    parts += [svg.text(place(tick), y, svg.number(tick, form), soft) for tick in ticks]
    y += 24
    for row in figure.rows:
        if not row.marks:
            y += 6
            parts.append(svg.text(0, y, row.label, ink, "start", 600))
            y += 22
            continue
        parts.append(svg.text(8, y, row.label, ink, "start"))
        parts.append(svg.text(WIDTH, y, row.said, soft, "end"))
        parts += [
            svg.line(place(tick), y + 5, place(tick), y + 21, ink if tick == middle else line, 1.4) for tick in ticks
        ]
        parts += [part for mark in row.marks for part in drawn(mark, y + 13)]
        y += STEP
    parts += [svg.text(place(tick), y - 1, svg.number(tick, form), soft) for tick in ticks]
    return svg.whole(WIDTH, y + 8, described(kind), parts)


def _minus(value: float) -> str:
    return signed(value, 3).replace("-", "−")


def _ticks(low: float, high: float) -> list[float]:
    step = next((step for step in STEPS if (high - low) / step <= FEW), STEPS[-1])
    return [step * index for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _sides(sides: tuple[str, str], x: float, y: float, color: str) -> Iterator[str]:
    """What left and right of the bold line mean."""
    for said, where, anchor in zip(sides, (x - 8, x + 8), ("end", "start"), strict=True):
        if said:
            yield svg.text(where, y, said, color, anchor)


def described(kind: str) -> str:
    """The reading and every row in words."""
    figure = figure_of(kind)
    names = {shape: name.partition(";")[0] for shape, name in figure.key}
    told, heading = [], ""
    for row in figure.rows:
        if row.marks:
            values = ", ".join(_said(mark.at, len(row.marks)) for mark in row.marks)
            told.append(f"{heading}{row.label} {values}")
            several = len(row.marks) > 1
            of = ", " + ", ".join(names[mark.shape] for mark in row.marks) if several else ""
        heading = "" if row.marks else f"{row.label}: "
    return f"{figure.reading}. {figure.unit[0].upper()}{figure.unit[1:]}{of}: {'; '.join(told)}."


def _said(value: float, several: int) -> str:
    """A value: a gap has a sign, one of several levels has none."""
    return signed(value, 3) if several == 1 else f"{round(value, 3) + 0.0:.3f}"


def in_page(kind: str) -> str:
    """The figure in an operator's page, in light and in dark."""
    return svg.themed(f"../pictures/{file_name(kind)}", described(kind))


def file_name(kind: str) -> str:
    """The name of the picture's file, without its theme."""
    return f"measured-{kind}"
