"""Describe figures as data, which figures.js draws on a page and ``matplotlib_figures`` in a file."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

# Okabe and Ito's colours, which colour-blind readers can distinguish; those too light for text are darkened.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#B5468B", "#8A6D00", "#2A9DC8", "#6A3D9A", "#7F7F7F")
#: near black, for the reference entry
REFERENCE = "#222222"
#: grey, for lines that are not entries
GUIDE = "#7F7F7F"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """Describe an axis.

    Attributes:
        title: title, with the unit.
        log: whether it is logarithmic.
        ticks: position -> label; None chooses them.
        bounds: (least, largest); None fits them to the data.
        from_zero: whether it reaches to zero.
        rows: whether it has names in place of numbers, the first at the top.
    """

    title: str = ""
    log: bool = False
    ticks: Mapping[float, str] | None = None
    bounds: tuple[float, float] | None = None
    from_zero: bool = False
    rows: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """Describe the points of one entry, joined or not.

    Attributes:
        name: name of the entry, for the page's filter.
        x: (N,) coordinates.
        y: (N,) coordinates, or names of rows.
        number: index of its marker and default colour.
        color: overrides that colour.
        low: (N,) the lower end of the band around a line, or of the error bars of points.
        high: (N,) the upper end.
        texts: tooltips of the points, (N,), or one for all; "" shows the numbers.
        mode: "line" (with markers), "plain" (only a line), "points", or "steps".
        hollow: whether markers are outlines.
        size: size of the markers.
        opacity: opacity of line, markers and band.
        label: text at the line's end on a page, and in the legend of a file; "" takes the name.
        legend: whether the legend lists it.
    """

    name: str
    x: Sequence[float]
    y: Sequence[Any]
    number: int = 0
    color: str = ""
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    texts: Sequence[str] | str = ""
    mode: Literal["line", "plain", "points", "steps"] = "line"
    hollow: bool = False
    size: float = 7
    opacity: float = 1
    label: str = ""
    legend: bool = True

    def __post_init__(self) -> None:
        if not self.color:
            object.__setattr__(self, "color", PALETTE[self.number % len(PALETTE)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heat:
    """Describe a heat map.

    Attributes:
        values: (rows, columns), from the top.
        x: names of the columns.
        y: names of the rows.
        bounds: the values of the outermost colours.
        what: the meaning of a value, for the scale of colours.
        diverging: whether colours differ below and above the middle of the bounds.
    """

    values: Sequence[Sequence[float | None]]
    x: Sequence[str]
    y: Sequence[str]
    bounds: tuple[float, float]
    what: str
    diverging: bool = False


@dataclasses.dataclass(frozen=True)
class Guide:
    """Describe a reference line: at ``x``, at ``y``, or without both along the diagonal.

    Attributes:
        x: position of a vertical line.
        y: position of a horizontal line.
        text: its label.
    """

    x: float | None = None
    y: float | None = None
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Panel:
    """Describe one pair of axes and its content.

    Attributes:
        shown: series, or one heat map.
        x: the axis at the bottom.
        y: the axis at the left.
        guides: reference lines.
        title: title in a file; a page shows the caption instead.
        legend: whether there is a legend.
    """

    shown: Sequence[Series | Heat]
    x: Axis = Axis()
    y: Axis = Axis()
    guides: Sequence[Guide] = ()
    title: str = ""
    legend: bool = True


def colors(names: Sequence[str], reference: str | None = None) -> dict[str, str]:
    """Return name -> colour: near black for the reference, if any, and the palette's colours in order for the rest."""
    remaining = [name for name in names if name != reference]
    chosen = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(remaining)}
    return {name: chosen.get(name, REFERENCE) for name in names}


def numbered(words: Sequence[str]) -> list[str]:
    """Return words with their index in front, so that equal words differ along an axis."""
    return [f"{index} {word}" for index, word in enumerate(words)]


def described(value: Any) -> Any:
    """Return a panel, or a part of one, as JSON values; numbers that are not finite become None."""
    if dataclasses.is_dataclass(value):
        return {field.name: described(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): described(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [described(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
