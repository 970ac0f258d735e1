"""The forest plot of claims: gaps of methods to their controls with intervals over seeds, read from results/.

A row is a line of words above a line of marks, so that the picture is readable at the width of a phone.
"""

from __future__ import annotations

import collections

import evidence
import svg
from evidence import Row
from measured import mean, signed

__all__ = ["THEMES", "in_page", "picture", "rows"]

THEMES = svg.THEMES
WIDTH, EDGE, STEP, TOP = 400, 14, 37, 130
ALT = (
    "Forest plot: gaps in nats of HDPL, CCL, Transponder, rotors and CGT to their controls, with intervals over seeds, "
    "and the papers' effects"
)
#: what became of a paper's method, above its rows
IN_SHORT = {
    "HDPL": "ahead at 1 M, mostly by its initialisation",
    "CCL": "ahead in its own model at 1 M, behind from 3 M",
    "Transponder": "behind at 0.3 M, inconclusive at 1 M",
    "Rotor from scratch": "ahead of low rank, not of dense",
    "Rotor fitted to SmolLM2": "not ahead of any",
    "CGT": "inconclusive, leads above 0.08 excluded",
}
#: so that zero leaves room to its right for what a row says there, and the last tick for its number
LOW, HIGH, TICKS = -0.46, 0.25, (-0.4, -0.2, 0.0, 0.2)
#: size of what stands at a row's right, and where the words that stand in for a far mark end
SMALL, FAR = 12, 80
#: below this many seeds a mark is hollow
SEEDS = 3


def rows(paper: str = "") -> list[Row]:
    """What is drawn, from top to bottom; of one paper, whose name its methods begin with, or of all."""
    return [row for row in evidence.rows() if row.method.lower().startswith(paper)]


def picture(theme: str, paper: str = "") -> str:
    """The SVG, for a light or a dark page; of one paper, or of all."""
    ink, soft, line, ours, papers = THEMES[theme]
    y, parts, method = TOP, [], None
    axis: list[str] = []
    found = rows(paper)
    named = collections.Counter((row.method, row.control) for row in found)
    for row in found:
        if row.method != method:
            method, y = row.method, y + 8
            parts.append(svg.text(0, y, f"{method}: {IN_SHORT[method]}", ink, "start", weight=600))
            y += 22
        several = named[row.method, row.control] > 1  # told apart by their tokens
        label = f"{row.control}, {row.budget} tokens" if several else row.control
        parts.append(svg.text(8, y, label + " *" * bool(row.ends), ink, "start"))
        parts.append(svg.text(WIDTH, y, _amount(row, not several), soft, "end", size=SMALL))
        # lines end where words stand
        axis += [
            svg.line(_place(at), y + 5, _place(at), y + 21, ink if at == 0 else line, 1.4)
            for at in TICKS
            if not _far(row) or _place(at) > FAR
        ]
        parts += _marks(row, y + 13, soft if row.unlike else ours, papers)
        y += STEP
    bottom = y - 16
    for height in (TOP - 18, bottom + 15):
        axis += [svg.text(_place(at), height, svg.number(at), soft) for at in TICKS]
    axis.append(svg.text(_place(0) - 8, TOP - 38, "← method better", soft, "end"))
    axis.append(svg.text(_place(0) + 8, TOP - 38, "worse →", soft, "start"))
    axis.append(svg.text(WIDTH, TOP - 38, "in nats", soft, "end"))
    axis.append(svg.text(WIDTH / 2, bottom + 34, "gap in validation loss, nats per token or byte", soft))
    key = [svg.circle(8, 10, ours), svg.text(20, 14, "3 seeds or more, 95 %", soft, "start")]
    key += [svg.circle(208, 10, ours, hollow=True), svg.text(220, 14, "fewer seeds", soft, "start")]
    key += [svg.diamond(8, 31, papers), svg.text(20, 35, "the paper's effect, in the same unit", soft, "start")]
    key += [
        svg.circle(8, 52, soft),
        svg.text(20, 56, "grey: the runs differ in other settings, too", soft, "start"),
    ]
    key.append(svg.text(0, 73, "* best setting at the edge", soft, "start", size=SMALL))
    key.append(svg.text(WIDTH, 73, "tokens, share of the paper's, seeds", soft, "end", size=SMALL))
    return svg.whole(WIDTH, bottom + 42, described(paper), [*axis, *key, *parts])


def _amount(row: Row, tokens: bool) -> str:
    """Tokens where asked for, their share of the paper's, and seeds."""
    seeds = f"{row.seeds} seed{'s' * (row.seeds > 1)}"
    return ", ".join(part for part in (row.budget * tokens, row.share, seeds) if part)


def _far(row: Row) -> bool:
    """Whether the paper's effect is left of the picture."""
    return row.effect is not None and row.effect < LOW


def described(paper: str = "") -> str:
    """Every gap in words, the picture's title."""
    told = [
        f"{row.method} against {row.control}{f' at {row.budget} tokens' * bool(row.budget)} {signed(mean(row.gaps), 3)}"
        for row in rows(paper)
    ]
    return f"Gaps in nats, below zero the method is better: {'; '.join(told)}."


def in_page(folder: str, paper: str = "") -> str:
    """The plot in a page, in light and in dark; ``folder``: where the pictures are, seen from the page."""
    return svg.themed(f"{folder}/{file_name(paper)}", described(paper) if paper else ALT)


def file_name(paper: str = "") -> str:
    """The name of the picture's file, without its theme."""
    return f"claims-{paper}" if paper else "claims"


def _place(value: float) -> float:
    return EDGE + (value - LOW) / (HIGH - LOW) * (WIDTH - 2 * EDGE)


def _marks(row: Row, y: float, ours: str, papers: str) -> list[str]:
    parts = []
    if _far(row):
        parts.append(svg.text(0, y + 4, f"← ◆ {svg.number(row.effect, '.2f')}", papers, "start"))
    elif row.effect is not None:
        parts.append(svg.diamond(_place(row.effect), y, papers))
    if row.bounds is not None:
        low, high = (_place(min(max(bound, LOW), HIGH)) for bound in row.bounds)
        parts.append(svg.line(low, y, high, y, ours, 2.4))
    return [*parts, svg.circle(_place(mean(row.gaps)), y, ours, hollow=row.seeds < SEEDS or row.bounds is None)]
