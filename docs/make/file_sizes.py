"""Structures at equal file size, from results/bytes: gaps to dense, and losses of short runs by the bits of weights."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import svg
from evidence import Row
from measured import folded, read, signed, table, with_interval

__all__ = ["PICTURES", "in_page", "picture"]

#: record -> what is said of its bits
RECORDS = {
    "bytes/sizes.json": "",
    "bytes/three_bits.json": ", all in 3 bits",
    "bytes/larger.json": ", all in 3 bits",
}
WIDTH, LEFT, STEP, TOP, PLOT, EDGE = 400, 108, 24, 48, 230, 34
#: one colour a structure, readable on light and dark
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7F7F7F")
PICTURES = ("file-sizes", "file-sizes-bits")


def _sizes() -> Sequence[Mapping[str, Any]]:
    """Every size of both records, with its ``title``."""
    return [
        size | {"title": f"{size['bytes'] / 1000:,.0f} KB{bits}"}
        for record, bits in RECORDS.items()
        for size in read(record)["sizes"]
    ]


def _by_loss(size: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return sorted(size["entries"], key=lambda entry: entry["validation_loss"]["mean"])


def _named(entry: Mapping[str, Any]) -> str:
    return entry["name"].replace("_", " ")


def picture(theme: str, name: str) -> str:
    """The SVG, for a light or a dark page."""
    return _gaps(theme) if name == "file-sizes" else _bits(theme)


def _gaps(theme: str) -> str:
    """Gaps to dense with intervals of 95 %, size by size, the lowest loss on top."""
    ink, soft, grid, ours, _ = svg.THEMES[theme]
    gaps = [entry["gap"] for size in _sizes() for entry in size["entries"] if entry["gap"]]
    low, high = min(0.0, *(gap["low"] for gap in gaps)), max(0.0, *(gap["high"] for gap in gaps))

    def place(value: float) -> float:
        return LEFT + 8 + (value - low) / (high - low) * (WIDTH - LEFT - 100)

    parts, y = [svg.text(0, 14, "gap to dense in nats per byte; left of the line is better", soft, "start")], TOP - 8
    for size in _sizes():
        dense = next(entry for entry in size["entries"] if entry["gap"] is None)
        title = f"{size['title']}: dense {dense['validation_loss']['mean']:.3f}, {dense['stored']['bits']} bits"
        parts.append(svg.text(0, y, title, ink, "start", weight=600))
        rows = [entry for entry in _by_loss(size) if entry["gap"]]
        parts.append(svg.line(place(0), y + 8, place(0), y + 12 + STEP * len(rows), grid, 1.4))
        for row, entry in enumerate(rows):
            at, gap = y + 24 + STEP * row, entry["gap"]
            parts.append(svg.text(0, at + 4, _named(entry), ink, "start"))
            parts.append(svg.line(place(gap["low"]), at, place(gap["high"]), at, ours, 2.4))
            parts.append(svg.circle(place(gap["mean"]), at, ours))
            said = f"{signed(gap['mean'], 3)}, {entry['stored']['bits']} bits"
            parts.append(svg.text(WIDTH, at + 4, said, soft, "end", size=12))
        y += 24 + STEP * len(rows) + 26
    return svg.whole(WIDTH, y - 20, _described(), parts)


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
    size = _sizes()[0]
    lines = [(_named(entry), _best_by_bits(entry)) for entry in _by_loss(size)]
    losses = [loss for _, line in lines for loss in line.values()]
    low, high, every = min(losses), max(losses), sorted({bits for _, line in lines for bits in line})

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
    ends = sorted((place(*list(line.items())[-1])[1], number) for number, (_, line) in enumerate(lines))
    at = -100.0
    for y, number in ends:
        at, name, colour = max(y, at + 15), lines[number][0], COLOURS[number]
        parts += [svg.circle(WIDTH - 106, at, colour), svg.text(WIDTH - 98, at + 4, name, ink, "start", size=11)]
    for number, (_, line) in enumerate(lines):
        places = [place(*point) for point in line.items()]
        parts += [svg.line(*here, *there, COLOURS[number], 1.6) for here, there in itertools.pairwise(places)]
        best = place(*min(line.items(), key=lambda point: point[1]))
        parts += [svg.circle(*point, COLOURS[number], hollow=point != best) for point in places]
    words = "; ".join(f"{name} {min(line, key=line.__getitem__)}" for name, line in lines)
    return svg.whole(WIDTH, TOP + PLOT + 52, f"Loss of short runs by bits; lowest at: {words}.", parts)


def _described() -> str:
    told = [
        f"{size['title']}: "
        + ", ".join(f"{_named(e)} {signed(e['gap']['mean'], 3)}" for e in _by_loss(size) if e["gap"])
        for size in _sizes()
    ]
    return f"Gaps to dense in nats per byte at equal file size, below zero is better. {'; '.join(told)}."


def in_page() -> str:
    """Pictures and table, for the page of results/bytes."""
    rows = []
    for size in _sizes():
        for entry in _by_loss(size):
            loss, gap, stored = entry["validation_loss"], entry["gap"], entry["stored"]
            made = f"{entry['parameters'] / 1e6:.2f} M in {stored['bits']} bits, {stored['bytes']:,} bytes"
            cells = [f"{size['title']}, {_named(entry)}", f"{loss['mean']:.3f} ± {loss['std']:.3f}", "–", made, "–"]
            if gap:
                row = Row(_named(entry), "dense", gap["values"], error=gap["standard_error"])
                cells[2], cells[4] = with_interval(gap), f"**{row.verdict}**"
            rows.append(cells)
    head = ["file, structure", "loss", "gap to dense [95 %]", "parameters and file", "result"]
    alt = {
        "file-sizes": _described(),
        "file-sizes-bits": "Loss of short runs of every structure by the bits of a weight, at one file size",
    }
    below = folded("Table of losses, gaps and files", table(head, rows))
    return "\n\n".join([*(svg.themed(f"../../docs/pictures/{name}", alt[name]) for name in PICTURES), below])
