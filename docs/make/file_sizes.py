"""Structures at equal file size, from results/bytes: gaps to dense, and losses of short runs by the bits of weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import svg
from evidence import AHEAD, BEHIND, Row
from measured import folded, read, signed, table, with_interval
from relinear.system.grouped import grouped

__all__ = ["PICTURES", "in_claims", "in_page", "picture", "verdicts"]

#: record -> what is said of its bits
RECORDS = {
    "bytes/sizes.json": "",
    "bytes/three_bits.json": ", all in 3 bits",
    "bytes/larger.json": ", all in 3 bits",
    "bytes/one_megabyte.json": ", all in 3 bits",
}
#: bits of a weight in the lines over sizes
BITS = 3
WIDTH, LEFT, STEP, TOP, PLOT, EDGE = 400, 108, 24, 48, 230, 34
#: panels in a row; between their left edges, their upper edges, and of each its width and height
COLUMNS, ASIDE, BELOW, ACROSS, DOWN = 3, 122, 186, 112, 136
MARGIN = 18
#: one colour a structure, readable on light and dark
COLORS = ("#7F7F7F", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1")
NAMES = {
    "low_rank": "low rank",
    "hdpl": "HDPL",
    "monarch": "Monarch",
    "block_hadamard": "block-Hadamard",
    "ccl": "CCL",
    "transponder": "Transponder",
}


def _sizes() -> Sequence[Mapping[str, Any]]:
    """Every size of the records, with its ``title``; a size may lack entries, but not dense."""
    return [
        size | {"title": _size(size["bytes"]) + bits}
        for record, bits in RECORDS.items()
        for size in read(record)["sizes"]
    ]


def _size(number: float) -> str:
    """500 KB, 1 MB."""
    return f"{number / 1e3:g} KB" if number < 1e6 else f"{number / 1e6:g} MB"


def _by_loss(size: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return sorted(size["entries"], key=lambda entry: entry["validation_loss"]["mean"])


def _named(entry: Mapping[str, Any]) -> str:
    return NAMES.get(entry["name"], entry["name"])


def _colors() -> dict[str, str]:
    """The same for a structure in every picture."""
    return dict(zip(map(_named, _sizes()[0]["entries"]), COLORS, strict=True))


def _result(entry: Mapping[str, Any]) -> str:
    """What follows from the gap to dense."""
    return Row(_named(entry), "dense", entry["gap"]["values"], error=entry["gap"]["standard_error"]).verdict


def verdicts() -> dict[str, list[str]]:
    """Whether it is worth its bytes -> structures: held if ahead at every size of every plan, partly if at some."""
    found = grouped((_named(entry), _result(entry)) for size in _sizes() for entry in _by_loss(size) if entry["gap"])

    def verdict(results: Sequence[str]) -> str:
        if AHEAD in results:
            return "held" if set(results) == {AHEAD} else "partly"
        return "did not hold" if set(results) == {BEHIND} else "inconclusive"

    return grouped((verdict(results), name) for name, results in found.items())


def picture(theme: str, name: str) -> str:
    """The SVG, for a light or a dark page."""
    return PICTURES[name][0](theme)


def _lines() -> dict[str, dict[int, Mapping[str, Any]]]:
    """Structure -> bytes -> gap to dense, both in 3 bits, whichever plan it was; the lowest gaps first."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for size in _sizes():
        for entry in size["entries"]:
            if entry["gap"] and entry["stored"]["bits"] == BITS:
                found.setdefault(_named(entry), {})[size["bytes"]] = entry["gap"]
    return dict(sorted(found.items(), key=lambda line: min(gap["mean"] for gap in line[1].values())))


def _over_sizes(theme: str) -> str:
    """Gaps to dense against bytes: a panel a structure, as bands of all in one would hide each other."""
    ink, soft, grid, *_ = svg.THEMES[theme]
    lines, colors, top = _lines(), _colors(), 76
    gaps = [gap for line in lines.values() for gap in line.values()]
    low, high = min(0.0, *(gap["low"] for gap in gaps)), max(0.0, *(gap["high"] for gap in gaps))
    sizes = sorted({size for line in lines.values() for size in line})

    def place(number: int, size: int, gap: float) -> tuple[float, float]:
        row, column = divmod(number, COLUMNS)
        share = math.log(size / sizes[0]) / math.log(sizes[-1] / sizes[0])
        across = EDGE + 8 + column * ASIDE + MARGIN + share * (ACROSS - 2 * MARGIN)
        return across, top + row * BELOW + (high - gap) / (high - low) * DOWN

    parts = [
        svg.text(0, 14, "gap to dense in nats per byte; below 0 is better", soft, "start"),
        svg.text(0, 32, f"all in {BITS} bits; band: 95 % interval; grey: the others", soft, "start"),
    ]
    for number, (name, line) in enumerate(lines.items()):
        left = place(number, sizes[0], 0)[0] - MARGIN
        parts.append(svg.text(left, place(number, sizes[0], high)[1] - 10, name, ink, "start", weight=600, size=12))
        for tick in range(math.ceil(low * 10), math.floor(high * 10) + 1):
            y = place(number, sizes[0], tick / 10)[1]
            parts.append(svg.line(left, y, left + ACROSS, y, grid if tick else ink, 1))
            if number % COLUMNS == 0:
                parts.append(svg.text(left - 6, y + 4, svg.number(tick / 10), soft, "end"))
        for size in sizes:
            x, y = place(number, size, low)
            parts.append(svg.text(x, y + 18, f"{size / 1e3:g}", soft, size=11))
        for other in lines.values():
            places = [place(number, size, gap["mean"]) for size, gap in other.items()]
            color, width = (colors[name], 2.4) if other is line else (soft, 0.5)
            parts += [svg.line(*here, *there, color, width) for here, there in itertools.pairwise(places)]
        edges = [[place(number, size, gap[end]) for size, gap in line.items()] for end in ("low", "high")]
        parts.append(svg.area([*edges[0], *edges[1][::-1]], colors[name]))
        for size, gap in line.items():
            ends = (place(number, size, gap[end]) for end in ("low", "high"))
            parts.append(svg.line(*next(ends), *next(ends), colors[name], 1.4))
            parts.append(svg.circle(*place(number, size, gap["mean"]), colors[name], radius=3))
    bottom = place(len(lines) - 1, sizes[0], low)[1]
    parts.append(svg.text(WIDTH, bottom + 40, "size of the file in KB, logarithmic", soft, "end"))
    return svg.whole(WIDTH, math.ceil(bottom + 48), _described_over_sizes(), parts)


def _described_over_sizes() -> str:
    told = [
        f"{name} " + ", ".join(f"{signed(gap['mean'], 3)} in {_size(size)}" for size, gap in line.items())
        for name, line in _lines().items()
    ]
    return f"Gaps to dense in nats per byte by file size, all in {BITS} bits, below zero is better: {'; '.join(told)}."


def _chosen(theme: str) -> str:
    """With bits chosen by short runs: gaps to dense with intervals of 95 %, the lowest loss on top."""
    ink, soft, grid, *_ = svg.THEMES[theme]
    size, colors = _sizes()[0], _colors()
    rows = [entry for entry in _by_loss(size) if entry["gap"]]
    bottom = TOP + STEP * len(rows)
    low, high = min(0.0, *(row["gap"]["low"] for row in rows)), max(0.0, *(row["gap"]["high"] for row in rows))

    def place(value: float) -> float:
        return LEFT + 8 + (value - low) / (high - low) * (WIDTH - LEFT - 66)

    dense = next(entry for entry in size["entries"] if entry["gap"] is None)
    parts = [
        svg.text(0, 14, f"{size['title']}, each with the bits that its short runs chose", ink, "start", weight=600),
        svg.text(0, 34, f"gap to dense ({dense['stored']['bits']} bits), nats per byte; left is better", soft, "start"),
    ]
    for tick in range(math.ceil(low * 10), math.floor(high * 10) + 1):
        parts.append(svg.line(place(tick / 10), TOP, place(tick / 10), bottom, grid if tick else ink, 1))
        parts.append(svg.text(place(tick / 10), bottom + 16, svg.number(tick / 10), soft))
    for row, entry in enumerate(rows):
        y, gap, color = TOP + 12 + STEP * row, entry["gap"], colors[_named(entry)]
        parts.append(svg.text(0, y + 4, _named(entry), ink, "start"))
        parts.append(svg.line(place(gap["low"]), y, place(gap["high"]), y, color, 2.4))
        parts.append(svg.circle(place(gap["mean"]), y, color))
        parts.append(svg.text(WIDTH, y + 4, f"{entry['stored']['bits']} bits", soft, "end", size=12))
    return svg.whole(WIDTH, bottom + 24, _described_chosen(), parts)


def _described_chosen() -> str:
    size = _sizes()[0]
    told = ", ".join(f"{_named(one)} {signed(one['gap']['mean'], 3)}" for one in _by_loss(size) if one["gap"])
    return f"Gaps to dense in nats per byte in {size['title']}, with bits chosen by short runs: {told}."


def _best_by_bits(entry: Mapping[str, Any]) -> dict[int, float]:
    """Bits -> the lowest loss of the short runs in so many."""
    trials = [trial for trial in entry["tuning"]["trials"] if trial["validation_loss"] is not None]
    return {
        bits: min(trial["validation_loss"] for trial in trials if trial["bits"] == bits)
        for bits in sorted({trial["bits"] for trial in trials})
    }


def _bits(theme: str) -> str:
    """At the first size: the best short run of every structure by the bits of a weight."""
    ink, soft, grid, *_ = svg.THEMES[theme]
    size, colors = _sizes()[0], _colors()
    lines = {_named(entry): _best_by_bits(entry) for entry in _by_loss(size)}
    losses = [loss for line in lines.values() for loss in line.values()]
    low, high, every = min(losses), max(losses), sorted({bits for line in lines.values() for bits in line})

    def place(bits: int, loss: float) -> tuple[float, float]:
        across = EDGE + 12 + (bits - every[0]) / (every[-1] - every[0]) * (WIDTH - EDGE - 130)
        return across, TOP + (high - loss) / (high - low) * PLOT

    parts = [svg.text(0, 14, f"loss of short runs in {size['title']}, nats per byte; filled: the best", soft, "start")]
    for step in range(5):
        tick = low + (high - low) * step / 4
        y = place(every[0], tick)[1]
        parts += [svg.line(EDGE + 4, y, WIDTH - 112, y, grid, 1), svg.text(EDGE, y + 4, f"{tick:.2f}", soft, "end")]
    parts += [svg.text(place(bits, low)[0], TOP + PLOT + 24, str(bits), soft) for bits in every]
    parts.append(svg.text(WIDTH / 2 - 30, TOP + PLOT + 44, "bits per weight", soft))
    at = -100.0
    for y, name in sorted((place(*list(line.items())[-1])[1], name) for name, line in lines.items()):
        at = max(y, at + 15)
        parts += [svg.circle(WIDTH - 106, at, colors[name]), svg.text(WIDTH - 98, at + 4, name, ink, "start", size=11)]
    for name, line in lines.items():
        places = [place(*point) for point in line.items()]
        parts += [svg.line(*here, *there, colors[name], 1.6) for here, there in itertools.pairwise(places)]
        best = place(*min(line.items(), key=lambda point: point[1]))
        parts += [svg.circle(*point, colors[name], hollow=point != best) for point in places]
    return svg.whole(WIDTH, TOP + PLOT + 52, _described_bits(), parts)


def _described_bits() -> str:
    best = {_named(entry): _best_by_bits(entry) for entry in _by_loss(_sizes()[0])}
    told = "; ".join(f"{name} {min(line, key=line.__getitem__)}" for name, line in best.items())
    return f"Loss of short runs by the bits of a weight, in {_sizes()[0]['title']}; lowest at: {told}."


#: name of the file -> what draws it, and what says it in words
PICTURES = {
    "file-sizes": (_over_sizes, _described_over_sizes),
    "file-sizes-chosen": (_chosen, _described_chosen),
    "file-sizes-bits": (_bits, _described_bits),
}


def _shown(folder: str, name: str) -> str:
    return svg.themed(f"{folder}/{name}", PICTURES[name][1]())


def in_claims() -> str:
    """Pictures of gaps over sizes and of the bits that won, for the page of claims."""
    return "\n\n".join(_shown("pictures", name) for name in ("file-sizes", "file-sizes-bits"))


def in_page() -> str:
    """Pictures and table, for the page of results/bytes."""
    rows = []
    for size in _sizes():
        for entry in _by_loss(size):
            loss, gap, stored = entry["validation_loss"], entry["gap"], entry["stored"]
            made = f"{entry['parameters'] / 1e6:.2f} M in {stored['bits']} bits, {stored['bytes']:,} bytes"
            cells = [f"{size['title']}, {_named(entry)}", f"{loss['mean']:.3f} ± {loss['std']:.3f}", "–", made, "–"]
            if gap:
                cells[2], cells[4] = with_interval(gap), f"**{_result(entry)}**"
            rows.append(cells)
    head = ["file, structure", "loss", "gap to dense [95 %]", "parameters and file", "result"]
    below = folded("Table of losses, gaps and files", table(head, rows))
    return "\n\n".join([*(_shown("../../docs/pictures", name) for name in PICTURES), below])
