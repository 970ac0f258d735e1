"""The description of a figure: figures.js draws it on a page, ``drawn`` into a file by Matplotlib."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

# Okabe and Ito's colours, told apart also without colour vision, darkened where they are too light for text.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#B5468B", "#8A6D00", "#2A9DC8", "#6A3D9A", "#7F7F7F")
#: near black, for the reference
REFERENCE = "#222222"
#: lines that are not entries
GUIDE = "#7F7F7F"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis. ``ticks``: place -> label; ``bounds``: least and largest value; ``rows``: names, from above."""

    title: str = ""
    log: bool = False
    ticks: Mapping[float, str] | None = None
    bounds: tuple[float, float] | None = None
    from_zero: bool = False
    rows: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one entry, joined or not.

    Args:
        name: of the entry, which the page's filter knows; ``colour``, ``number``: what tells it apart (the marker).
        x, y: (N,) places; ``y`` may be names of rows.
        low, high: (N,) the band around a line, or the error bars of points.
        texts: what is seen when a point is pointed at: (N,), or one for all; "" for its numbers.
        mode: "line" (with markers), "plain" (a line alone), "points", or "steps".
        hollow, size, opacity, dashed: how it is drawn.
        label: at the line's end on a page, and in the legend of a file; "" is the name.
        legend: whether the legend names it.
    """

    name: str
    colour: str
    x: Sequence[float]
    y: Sequence[Any]
    number: int = 0
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    texts: Sequence[str] | str = ""
    mode: Literal["line", "plain", "points", "steps"] = "line"
    hollow: bool = False
    size: float = 7
    opacity: float = 1
    label: str = ""
    legend: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heat:
    """A map: ``values`` (rows, columns) from above, with the names of columns and rows, each once.

    ``surface`` is the stem of its picture as a surface, "" for none.
    """

    values: Sequence[Sequence[float | None]]
    x: Sequence[str]
    y: Sequence[str]
    bounds: tuple[float, float]
    what: str
    diverging: bool = False
    surface: str = ""


@dataclasses.dataclass(frozen=True)
class Guide:
    """A line at ``x``, at ``y``, or along the diagonal where neither is given; ``text`` stands at it."""

    x: float | None = None
    y: float | None = None
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes and what is in it."""

    shown: Sequence[Series | Heat]
    x: Axis = Axis()
    y: Axis = Axis()
    guides: Sequence[Guide] = ()
    title: str = ""
    legend: bool = True


def colours(names: Sequence[str], reference: str | None = None) -> dict[str, str]:
    """Return a colour by entry name: the reference, if any, is near black, the others take the palette in order."""
    remaining = [name for name in names if name != reference]
    chosen = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(remaining)}
    return {name: chosen.get(name, REFERENCE) for name in names}


def blend(first: Sequence[int], second: Sequence[int], share: float) -> str:
    """Return the colour that has ``share`` of the second one, the rest of the first: red, green and blue up to 255."""
    share = min(max(share, 0.0), 1.0)
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in zip(first, second, strict=True))


def numbered(words: Sequence[str]) -> list[str]:
    """Return words with their places in front, which tell equal ones apart along an axis."""
    return [f"{index} {word}" for index, word in enumerate(words)]


def described(value: Any) -> Any:
    """Return a panel, or what is in one, as JSON values: numbers that are not finite are none."""
    if dataclasses.is_dataclass(value):
        return {field.name: described(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): described(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [described(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
