"""What a page is put together from. All text is plain: the template escapes it."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relinear.pages.figures import Panel
from relinear.system.files import read_json

#: a picture with more bytes than this goes in as pixels, where there are any
_LARGEST_SVG = 400_000


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph; ``heading`` puts a heading in its place, ``soft`` makes it a remark, ``lead`` the page's verdict."""

    text: str
    heading: bool = False
    soft: bool = False
    lead: bool = False
    kind: str = "text"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell: what it shows, a second line in small print, and what it is sorted by (its text by default)."""

    text: str
    value: float | None = None
    small: str = ""
    title: str = ""

    @classmethod
    def of(cls, value: float | None, form: str = ".3f") -> Cell:
        """Return the cell of a number, which sorts by its value; a dash for None."""
        return cls("–" if value is None else format(value, form), value)


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
    """A figure: ``panel``, which the page draws; ``image``, a data URI, the same without a script; with neither, none.

    Figures that follow each other and are ``beside`` share a line where there is room for three. Those of one
    ``stem`` are panels of one picture, the file of that name, which stands at the first of them.
    """

    description: str
    panel: Panel | None = None
    image: str | None = None
    height: int = 440
    beside: bool = False
    stem: str = ""
    kind: str = "chart"


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


Block = Text | Table | Chart | Facts | Listing | Part


@dataclasses.dataclass(frozen=True)
class Section:
    """What a page says of one run. ``entries``: name -> colour, for the filter; ``command`` names the kind of run."""

    title: str
    command: str
    blocks: Sequence[Block]
    entries: Mapping[str, str] = dataclasses.field(default_factory=dict)
    note: str = ""


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
    """Return a JSON object. Raises ValueError for a file that is none, FileNotFoundError where there is none."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no JSON object; delete it and carry out its command again")
    return values


def as_yaml(value: Any) -> str:
    """Return settings as they are written in a recipe. Raises ValueError for ones that are nested without end."""
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


def about(record: Mapping[str, Any], *words: str | None) -> str:
    """Return the line under a page's title: ``words`` and the date of ``record``, as far as they are known."""
    return " · ".join(map(str, filter(None, [*words, record.get("date")])))


def in_words(name: str, value: Any) -> str:
    """Return a fact as a reader takes it: what is called bytes in GiB, lists with commas."""
    if name.endswith("bytes") and isinstance(value, int | float):
        return f"{value / 2**30:.2f} GiB"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
