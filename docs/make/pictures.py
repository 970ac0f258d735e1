"""A picture of every operator: the shapes of its factors from left to right, as small SVG."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence

BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#B5468B", "#8a8a92"
INK, SOFT, PAPER, LIGHT = "#1d1d1f", "#5f5f66", "#ffffff", "#ececf0"
#: on dark pages
_DARK = (
    f"<style>@media(prefers-color-scheme:dark){{text{{fill:#e6edf3}}[fill='{PAPER}']{{fill:#21262d}}"
    f"[fill='{LIGHT}']{{fill:#3d444d}}}}</style>"
)
GAP, MARGIN, MIDDLE, HEIGHT = 9, 18, 84, 178


@dataclasses.dataclass(frozen=True)
class Box:
    """A factor: ``width`` by ``height``; ``pattern``: full, blocks, signs, moves, or pivots (an identity in front)."""

    label: str
    width: int
    height: int
    colour: str = BLUE
    pattern: str = "full"
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Sign:
    """Text between factors."""

    text: str
    size: int = 20


def vector(label: str, height: int = 88, note: str = "") -> Box:
    """A vector: what goes in, or comes out."""
    return Box(label, 9, height, GREY, note=note)


def tall(label: str, colour: str = ORANGE, note: str = "") -> Box:
    """From few dimensions to many."""
    return Box(label, 18, 88, colour, note=note)


def flat(label: str, colour: str = ORANGE, pattern: str = "full", note: str = "") -> Box:
    """From many dimensions to few."""
    return Box(label, 88, 18, colour, pattern, note)


def square(label: str, colour: str = BLUE, pattern: str = "full", note: str = "", side: int = 88) -> Box:
    """As many in as out."""
    return Box(label, side, side, colour, pattern, note)


IN, OUT, TIMES, PLUS = vector("x"), vector("y"), Sign("⊙"), Sign("+")
EQUALS = Sign("=")
#: what follows stands below: on a phone one line would be too small to read
BREAK = Sign("\n")

PICTURES: dict[str, tuple[str, Sequence[Box | Sign]]] = {
    "low_rank": (
        "Two thin matrices, one after the other",
        [OUT, EQUALS, tall("U", note="O × R"), flat("V", note="R × I"), IN],
    ),
    "pivoted_low_rank": (
        "Two thin matrices, the first with an identity that is not stored",
        [
            OUT,
            EQUALS,
            tall("U", note="O × R"),
            flat("[ I  M ]", pattern="pivots", note="R × I, I not stored"),
            Sign("P"),
            IN,
        ],
    ),
    "block_hadamard": (
        "A block-diagonal matrix after a Hadamard transform",
        [OUT, EQUALS, square("B", pattern="blocks", note="K blocks"), square("H", GREY, "signs", "fixed"), IN],
    ),
    "monarch": (
        "Two block-diagonal matrices with permutations around the second",
        [
            OUT,
            EQUALS,
            square("P", GREY, "moves", "fixed", 62),
            square("L", pattern="blocks", note="K blocks"),
            square("Pᵀ", GREY, "moves", "fixed", 62),
            square("R", ORANGE, "blocks", "K blocks"),
            IN,
        ],
    ),
    "quantized": (
        "A matrix of integers of few bits, times a scale for each group of inputs",
        [
            OUT,
            EQUALS,
            Sign("(", 40),
            square("Q", note="2 to 8 bits"),
            TIMES,
            square("s", GREEN, "blocks"),
            Sign(")", 40),
            IN,
        ],
    ),
    "hdpl": (
        "A block-diagonal path beside a bottleneck whose middle is drawn at random in training",
        [
            OUT,
            EQUALS,
            square("W", pattern="blocks", note="detail, K blocks"),
            IN,
            PLUS,
            tall("D", note="O × R"),
            Sign("silu( z ),", 16),
            BREAK,
            Sign("z ~ N(", 16),
            flat("μ", GREEN, note="R × I"),
            IN,
            Sign(",", 16),
            flat("log σ²", PINK, note="R × I"),
            IN,
            Sign(")", 16),
        ],
    ),
    "ccl": (
        "A low-rank layer whose middle and output are gated by a context that all layers share",
        [
            OUT,
            EQUALS,
            Box("g out", 9, 88, GREEN, note="from c"),
            TIMES,
            Sign("(", 40),
            tall("W mix", note="O × R"),
            BREAK,
            Sign("(", 26),
            Box("g basis", 9, 30, GREEN, note="from c"),
            TIMES,
            Sign("norm", 14),
            flat("W basis", BLUE, note="R × I"),
            IN,
            Sign(")", 26),
            Sign("+ b", 16),
            Sign(")", 40),
        ],
    ),
    "transponder": (
        "A projection times a gate that reads the same input through a bottleneck",
        [
            OUT,
            EQUALS,
            Sign("(", 40),
            square("W", note="as it was"),
            IN,
            Sign("+ b )", 16),
            BREAK,
            TIMES,
            Sign("2σ( α", 16),
            tall("B", GREEN, "O × R"),
            Sign("σ(", 16),
            flat("A", GREEN, note="R × I"),
            IN,
            Sign("))", 16),
        ],
    ),
    "output_gate": (
        "A projection times a gate as large as itself",
        [
            OUT,
            EQUALS,
            Sign("(", 40),
            square("W", note="as it was"),
            IN,
            Sign("+ b )", 16),
            TIMES,
            Sign("σ(", 16),
            square("W gate", GREEN, note="O × I"),
            IN,
            Sign(")", 16),
        ],
    ),
    "rotor": (
        "A rotor from the left and one from the right, each the exponential of a few plane rotations",
        [
            Box("y", 58, 58, GREY, note="2ⁿ numbers"),
            EQUALS,
            Sign("Σ", 30),
            square("r = exp(b)", PINK, note="n(n−1)/2 numbers", side=58),
            Box("x", 58, 58, GREY, note="2ⁿ numbers"),
            square("s̃ = exp(−c)", PINK, note="n(n−1)/2 numbers", side=58),
        ],
    ),
}


def picture(kind: str) -> str:
    """The SVG of an operator."""
    title, items = PICTURES[kind]
    parts, x, width, height = [], MARGIN, 0, HEIGHT
    for item in items:
        if item is BREAK:
            parts += ["</g>", f'<g transform="translate(0 {height})">']
            x, height = MARGIN, height + HEIGHT
            continue
        room = _width(item)
        parts.append(_sign(item, x) if isinstance(item, Sign) else _box(item, x + (room - item.width) / 2))
        x += room + GAP
        width = max(width, round(x - GAP + MARGIN))
    parts = ["<g>", *parts, "</g>"] if height > HEIGHT else parts
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" text-anchor="middle">'
    )
    ground = _DARK + f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>'
    return "\n".join([head, f"<title>{html.escape(title)}</title>", ground, *parts, "</svg>"]) + "\n"


def thumbnail(kind: str, scale: float = 0.5) -> str:
    """The factors of an operator alone, without words, on no ground: for pages in light and in dark."""
    parts, x = [], 1.0
    for item in PICTURES[kind][1]:
        if isinstance(item, Sign):
            if item.text in "⊙+":
                parts.append(_text(x + 8, 32, 18, GREY, item.text))
                x += 16 + GAP / 2
        elif item.colour != GREY or item.pattern != "full":
            small = dataclasses.replace(item, width=round(scale * item.width), height=round(scale * item.height))
            parts += _shape(small, x, 26 - small.height / 2, f'{GREY}" fill-opacity="0.2')
            x += small.width + GAP / 2
    width = round(x - GAP / 2 + 1)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="52" viewBox="0 0 {width} 52" '
    return "\n".join([f'{head}font-family="system-ui, sans-serif" text-anchor="middle">', *parts, "</svg>"]) + "\n"


def _width(item: Box | Sign) -> float:
    """Room that an item takes, that of its texts included."""
    if isinstance(item, Sign):
        return 0.56 * item.size * len(item.text)
    return max(item.width, 7.4 * len(item.label), 6.4 * len(item.note))


def _sign(sign: Sign, x: float) -> str:
    middle = x + _width(sign) / 2
    return _text(middle, MIDDLE + 0.34 * sign.size, sign.size, INK, sign.text)


def _text(x: float, y: float, size: int, colour: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{round(y, 1)}" font-size="{size}" fill="{colour}">{html.escape(text)}</text>'


def _box(box: Box, x: float) -> str:
    y = MIDDLE - box.height / 2
    middle, below = x + box.width / 2, MIDDLE + 44 + 22
    texts = [_text(middle, below, 13, INK, box.label)]
    if box.note:
        texts.append(_text(middle, below + 17, 11, SOFT, box.note))
    return "\n".join([*_shape(box, x, y, LIGHT), *texts])


def _shape(box: Box, x: float, y: float, ground: str) -> list[str]:
    """The factor itself."""
    plain = box.pattern == "full"
    frame = _rect(x, y, box.width, box.height, box.colour if plain else ground)
    return [frame] if plain else [frame, *_PATTERNS[box.pattern](box, x, y)]


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="{colour}"/>'


def _blocks(box: Box, x: float, y: float, count: int = 4) -> list[str]:
    wide, high = box.width / count, box.height / count
    return [_rect(x + i * wide, y + i * high, wide, high, box.colour) for i in range(count)]


def _signs(box: Box, x: float, y: float, count: int = 8) -> list[str]:
    """Those of a Hadamard matrix: entry (i, j) is negative where i and j share an odd number of bits."""
    side = box.width / count
    odd = [(i, j) for i in range(count) for j in range(count) if (i & j).bit_count() % 2]
    return [_rect(x + j * side, y + i * side, side, side, box.colour) for i, j in odd]


def _moves(box: Box, x: float, y: float, count: int = 8) -> list[str]:
    """A permutation: those that swap the halves of an index, which is what Monarch's does."""
    side = box.width / count
    return [_rect(x + (4 * (i % 2) + i // 2) * side, y + i * side, side, side, box.colour) for i in range(count)]


def _pivots(box: Box, x: float, y: float) -> list[str]:
    """An identity as wide as the box is high, then what is stored."""
    side, count = box.height, 6
    ones = [_rect(x + i * side / count, y + i * side / count, side / count, side / count, GREY) for i in range(count)]
    return [*ones, _rect(x + side + 2, y, box.width - side - 2, side, box.colour)]


_PATTERNS = {"blocks": _blocks, "signs": _signs, "moves": _moves, "pivots": _pivots}
