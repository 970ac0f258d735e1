"""The blocks of a page. All text is plain: the template escapes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from relinear.pages.figures import Panel


@dataclasses.dataclass(frozen=True)
class Text:
    """Show a paragraph, or a ``heading``, a remark (``soft``), or the page's verdict (``lead``)."""

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
    def of(cls, value: float | None, template: str = ".3f") -> Cell:
        """Return the cell of a number, which sorts by its value; a dash for None."""
        return cls("–" if value is None else format(value, template), value)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of cells or texts; ``entry`` is what the filter knows it by, ``colour`` that of its dot."""

    cells: Sequence[Cell | str]
    entry: str | None = None
    colour: str | None = None
    best: bool = False

    @property
    def shown(self) -> list[Cell]:
        """Return all of them as cells."""
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

    Figures that follow each other and are ``inline`` share a line if there is room for three. Those of one
    ``stem`` are panels of one picture, the file of that name, which stands at the first of them.
    """

    description: str
    panel: Panel | None = None
    image: str | None = None
    height: int = 440
    inline: bool = False
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
    """A page's section on one run. ``entries``: name -> colour, for the filter; ``command`` names the kind of run."""

    title: str
    command: str
    blocks: Sequence[Block]
    entries: Mapping[str, str] = dataclasses.field(default_factory=dict)
    note: str = ""
