"""What a page is put together from. All text is plain: the template escapes it."""

from __future__ import annotations

import base64
import dataclasses
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relinear.system.files import read_json

__all__ = [
    "PALETTE",
    "Block", "Cell", "Chart", "Facts", "Listing", "Part", "Picture", "Row", "Section", "Table", "Text", "as_yaml",
    "axes", "heat", "in_words", "line", "numbered", "or_surface", "picture_of", "plain", "points", "read_values",
    "what_ran",
]  # fmt: skip

# Okabe and Ito's colours, told apart also without colour vision, darkened where they are too light for text.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#B5468B", "#8A6D00", "#2A9DC8", "#6A3D9A", "#7F7F7F")
#: a picture with more bytes than this goes in as pixels, where there are any
_LARGEST_SVG = 400_000
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "pentagon")


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph; ``heading`` puts a heading in its place, ``soft`` makes it a remark."""

    text: str
    heading: bool = False
    soft: bool = False
    kind: str = "text"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell: what it shows, a second line in small print, and what it is sorted by (its text by default)."""

    text: str
    value: float | None = None
    small: str = ""
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of cells or texts; ``entry`` is what the filter knows it by, ``colour`` that of its dot."""

    cells: Sequence[Cell | str]
    entry: str | None = None
    colour: str | None = None
    best: bool = False

    @property
    def shown(self) -> list[Cell]:
        """All of them as cells."""
        return [cell if isinstance(cell, Cell) else Cell(cell) for cell in self.cells]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that sorts by a click on its head. ``words`` are the columns of text, by number."""

    head: Sequence[str]
    rows: Sequence[Row]
    words: Sequence[int] = (0,)
    kind: str = "table"


@dataclasses.dataclass(frozen=True)
class Chart:
    """A figure: ``figure`` for plotly (``data``, ``layout``), ``image`` the same without it (a data URI), or both.

    Live figures that follow each other and are ``beside`` share a line where there is room for three.
    """

    description: str
    figure: Mapping[str, Any] | None = None
    image: str | None = None
    height: int = 440
    beside: bool = False
    kind: str = "chart"


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture (a data URI) with its caption; None is one that there is no room for."""

    description: str
    image: str | None
    kind: str = "picture"


@dataclasses.dataclass(frozen=True)
class Facts:
    """Names and what they are."""

    facts: Mapping[str, str]
    kind: str = "facts"


@dataclasses.dataclass(frozen=True)
class Listing:
    """Text as it stands, folded away under ``title`` unless ``open``."""

    title: str
    text: str
    open: bool = False
    kind: str = "listing"


@dataclasses.dataclass(frozen=True)
class Part:
    """A template of another room, ``ROOM/FILE.html``, and what it is filled with."""

    template: str
    values: Mapping[str, Any]
    kind: str = "part"


Block = Text | Table | Chart | Picture | Facts | Listing | Part


@dataclasses.dataclass(frozen=True)
class Section:
    """What a page says of one run. ``entries``: name -> colour, for the filter; ``command`` names the kind of run."""

    title: str
    command: str
    blocks: Sequence[Block]
    entries: Mapping[str, str] = dataclasses.field(default_factory=dict)
    note: str = ""


# Traces. Plotly reads a little markup in texts, so that they are escaped for it; colours are set by the page.


def _trace(entry: str, colour: str, number: int, **values: Any) -> dict[str, Any]:
    name = plain(entry)
    symbol = _SYMBOLS[number % len(_SYMBOLS)]
    known = {"type": "scatter", "name": name, "legendgroup": name, "marker": {"symbol": symbol, "size": 7}}
    return known | {"meta": {"entry": entry, "colour": colour}} | values


def line(
    entry: str,
    colour: str,
    number: int,
    x: Sequence[float],
    y: Sequence[float],
    low: Sequence[float] | None = None,
    high: Sequence[float] | None = None,
) -> list[dict[str, Any]]:
    """Traces of an entry's line with its markers, and of the band from ``low`` to ``high`` around it."""
    traces = []
    if low is not None and high is not None:
        band = {"x": [*x, *reversed(x)], "y": [*high, *reversed(low)], "fill": "toself", "mode": "none"}
        traces.append(_trace(entry, colour, number, **band, hoverinfo="skip", showlegend=False))
    template = "%{fullData.name}<br>%{x:,.5~g}: %{y:.4f}<extra></extra>"
    shown = {"mode": "lines+markers", "x": list(x), "y": list(y), "hovertemplate": template}
    return [*traces, _trace(entry, colour, number, **shown)]


def points(
    entry: str,
    colour: str,
    number: int,
    x: Sequence[float],
    y: Sequence[float] | Sequence[str],
    texts: Sequence[str] | str,
    **values: Any,
) -> dict[str, Any]:
    """A trace of an entry's points, each with a text (or all with one) that is seen when it is pointed at.

    ``y`` are numbers, or names of rows.
    """
    shown = plain(texts) if isinstance(texts, str) else [plain(text) for text in texts]
    heights = [plain(value) if isinstance(value, str) else value for value in y]
    place = {"mode": "markers", "x": list(x), "y": heights, "text": shown}
    return _trace(entry, colour, number, **place, hovertemplate="%{text}<extra></extra>", **values)


#: from least to most, and from below to above a middle; both are told apart without colour vision
_RISING = ((0, "#F4F7FB"), (0.25, "#BCD3EA"), (0.5, "#6FA3D3"), (0.75, "#2A6CA8"), (1, "#08306B"))
_DIVERGING = ((0, "#2166AC"), (0.25, "#92C5DE"), (0.5, "#F7F7F7"), (0.75, "#F4A582"), (1, "#B2182B"))


def plain(text: str) -> str:
    """Text as plotly shows it as it stands: in names, along axes, and where something is pointed at."""
    return html.escape(text, quote=False)


def heat(
    values: Sequence[Sequence[float]],
    x: Sequence[str],
    y: Sequence[str],
    bounds: tuple[float, float],
    what: str,
    diverging: bool = False,
) -> dict[str, Any]:
    """A trace of a map: ``values`` row by row from below, with the names of columns and rows, each once."""
    bar = {"title": {"text": plain(what), "side": "right"}, "thickness": 12, "outlinewidth": 0}
    names = {"x": [plain(name) for name in x], "y": [plain(name) for name in y]}
    scale = {
        "zmin": bounds[0],
        "zmax": bounds[1],
        "colorscale": [list(s) for s in (_DIVERGING if diverging else _RISING)],
    }
    # the page turns a rising scale round on a dark ground, so that nothing stays as dark as what is around it
    shown = {
        "hovertemplate": "%{y}<br>%{x}: %{z:.3f}<extra></extra>",
        "colorbar": bar,
        "meta": {"map": True, "rising": not diverging},
    }
    return {"type": "heatmap", "z": [list(row) for row in values], **names, **scale, **shown}


def or_surface(trace: Mapping[str, Any], layout: Mapping[str, Any], height: str) -> dict[str, Any]:
    """A figure of a map (a trace of ``heat``) with buttons that raise it to a surface, which can be turned, and back.

    ``height`` is what stands on the third axis.
    """
    kinds = {"map": "heatmap", "surface": "surface"}
    buttons = [{"label": label, "method": "restyle", "args": [{"type": kind}]} for label, kind in kinds.items()]
    menu = {"type": "buttons", "direction": "right", "buttons": buttons, "showactive": False, "y": 1.01}
    place = {"x": 0, "xanchor": "left", "yanchor": "bottom"}
    sides = {"xaxis": "", "yaxis": "", "zaxis": height}
    scene = {side: {"title": {"text": plain(text)}, "nticks": 6} for side, text in sides.items()}
    both = trace | {"cmin": trace["zmin"], "cmax": trace["zmax"]}  # a surface's own names for the ends of its scale
    return {"data": [both], "layout": layout | {"scene": scene, "updatemenus": [menu | place]}}


def numbered(words: Sequence[str]) -> list[str]:
    """Words with their places in front, which tell equal ones apart along an axis."""
    return [f"{place} {word}" for place, word in enumerate(words)]


def axes(x: str, y: str, **values: Any) -> dict[str, Any]:
    """A layout with titles at its axes; ``xaxis`` and ``yaxis`` in ``values`` add to them."""
    sides = {"xaxis": x, "yaxis": y}
    titles = {side: {"title": {"text": plain(text)}} for side, text in sides.items()}
    return values | {side: titles[side] | values.get(side, {}) for side in sides}


# What is read from a directory


def picture_of(stem: str | Path) -> str | None:
    """STEM.svg, or where it is large or missing STEM.png, as a data URI; None where there is neither."""
    svg, png = Path(f"{stem}.svg"), Path(f"{stem}.png")
    if svg.is_file() and (svg.stat().st_size <= _LARGEST_SVG or not png.is_file()):
        return f"data:image/svg+xml;base64,{base64.b64encode(svg.read_bytes()).decode('ascii')}"
    if png.is_file():
        return f"data:image/png;base64,{base64.b64encode(png.read_bytes()).decode('ascii')}"
    return None


def read_values(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a file that is none, FileNotFoundError where there is none."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no JSON object; delete it and carry out its command again")
    return values


def as_yaml(value: Any) -> str:
    """Settings as they are written in a recipe. Raises ValueError for ones that are nested without end."""
    import yaml

    try:
        return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)
    except RecursionError:
        raise ValueError("values are nested too deeply to be shown; restore the file from a copy") from None


def what_ran(record: Mapping[str, Any], more: Mapping[str, str] | None = None) -> list[Block]:
    """The paragraph "What was run": command, ``more``, and machine with versions, as far as ``record`` has them."""
    facts = {"command": str(record["command"])} if record.get("command") else {}
    facts |= more or {}
    facts |= {
        name.removesuffix("_bytes").replace("_", " "): in_words(name, value)
        for name, value in (record.get("machine") or {}).items()
    }
    return [Text("What was run", heading=True), Facts(facts)] if facts else []


def in_words(name: str, value: Any) -> str:
    """A fact as a reader takes it: what is called bytes in GiB, lists with commas."""
    if name.endswith("bytes") and isinstance(value, int | float):
        return f"{value / 2**30:.2f} GiB"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
