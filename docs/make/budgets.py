"""A paper's gaps against the tokens that they were trained on, for papers with several budgets."""

from __future__ import annotations

import itertools
import math

import svg
from evidence import Row, rows
from measured import mean, signed
from relinear.system.grouped import grouped

#: paper -> what a line is called -> the controls of its rows
PAPERS = {
    "ccl": {"dense of its size": ("dense of its size",)},
    "hdpl": {
        "dense, tuned": ("dense, tuned in all", "dense, warm-up 0.7"),
        "dense, HDPL's initialisation": ("dense, HDPL's initialisation",),
    },
    "transponder": {"plain model": ("plain model",)},
    "rotor": {
        "low rank": ("low rank",),
        "low rank, fixed network": ("low rank, fixed network",),
        "dense": ("dense",),
    },
}
WIDTH, PLOT, LEFT, RIGHT, BOTTOM = 400, 170, 52, 16, 54


def _lines(paper: str) -> dict[str, list[Row]]:
    """Rows of each line, the least tokens first."""
    own = [row for row in rows() if row.method.lower().startswith(paper)]
    return {
        name: _by_tokens([row for row in own if row.control in controls]) for name, controls in PAPERS[paper].items()
    }


def picture(theme: str, paper: str) -> str:
    """The SVG: the gap to each control against tokens, on a logarithmic axis, with intervals of 95 %."""
    ink, soft, grid, *colors = svg.THEMES[theme]
    lines = _lines(paper)
    every = [row for found in lines.values() for row in found]
    tokens = sorted({row.tokens for row in every})
    ends = [0.0, *(end for row in every for end in row.bounds or (mean(row.gaps),))]
    low, high, top = min(ends), max(ends), 32 + 18 * len(lines)
    height = top + PLOT + BOTTOM

    def place(at: float, gap: float) -> tuple[float, float]:
        share = math.log(at / tokens[0]) / math.log(tokens[-1] / tokens[0])
        return LEFT + 20 + share * (WIDTH - LEFT - RIGHT - 40), top + (high - gap) / (high - low) * PLOT

    step, digits = (0.1, 1) if high - low > 0.15 else (0.02, 2)
    parts = [svg.text(0, 14, "gap in nats, below 0 the method is better", soft, "start")]
    for tick in range(math.ceil(low / step), math.floor(high / step) + 1):
        y = place(tokens[0], tick * step)[1]
        parts.append(svg.line(LEFT, y, WIDTH - RIGHT, y, grid if tick else ink, 1))
        parts.append(svg.text(LEFT - 6, y + 4, svg.number(tick * step, f"+.{digits}f"), soft, "end"))
    parts += [svg.text(place(row.tokens, 0)[0], height - 30, row.budget, soft) for row in _by_tokens(every)]
    parts.append(svg.text((LEFT + WIDTH) / 2, height - 10, "tokens", soft))
    for number, ((name, found), color) in enumerate(zip(lines.items(), (*colors, ink), strict=False)):
        parts.append(svg.circle(8, 32 + 18 * number, color))
        parts.append(svg.text(20, 36 + 18 * number, f"minus {name}", soft, "start"))
        places = [place(row.tokens, mean(row.gaps)) for row in found]
        parts += [svg.line(*here, *there, color, 1.2) for here, there in itertools.pairwise(places)]
        for row, (x, y) in zip(found, places, strict=True):
            up, down = (place(row.tokens, end)[1] for end in row.bounds or (mean(row.gaps),) * 2)
            parts += [
                svg.line(x, up, x, down, color, 2.4),
                svg.circle(x, y, soft if row.unlike else color, hollow=row.bounds is None),
            ]
    return svg.whole(WIDTH, height, _described(paper), parts)


def _by_tokens(found: list[Row]) -> list[Row]:
    """The first row of each budget."""
    return [same[0] for _, same in sorted(grouped((row.tokens, row) for row in found).items())]


def _described(paper: str) -> str:
    told = [
        f"to {name} " + ", ".join(f"{signed(mean(row.gaps), 3)} at {row.budget}" for row in found)
        for name, found in _lines(paper).items()
    ]
    return f"Gaps in nats against tokens trained on: {'; '.join(told)}."


def in_page(folder: str, paper: str) -> str:
    """The picture in a page, in light and in dark."""
    return svg.themed(f"{folder}/budgets-{paper}", _described(paper))
