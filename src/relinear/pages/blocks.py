"""Define the blocks of a report page: text, tables, charts and listings. All text is plain; the template escapes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from relinear.pages.figures import Panel


@dataclasses.dataclass(frozen=True)
class Text:
    """Hold a paragraph, a ``heading``, a remark (``soft``), or the main result of the page (``lead``)."""

    text: str
    heading: bool = False
    soft: bool = False
    lead: bool = False
    kind: str = "text"


@dataclasses.dataclass(frozen=True)
class Cell:
    """Hold a table's cell: its text, the value to sort by (by default the text), a second small line and a tooltip."""

    text: str
    value: float | None = None
    small: str = ""
    title: str = ""

    @classmethod
    def of(cls, value: float | None, template: str = ".3f") -> Cell:
        """Return the cell of a number, sorted by its value; None shows a dash."""
        return cls("–" if value is None else format(value, template), value)


@dataclasses.dataclass(frozen=True)
class Row:
    """Hold a table's row of cells or texts; ``entry`` is its name for the page's filter and the colour of its dot."""

    cells: Sequence[Cell | str]
    entry: str | None = None
    best: bool = False

    @property
    def shown(self) -> list[Cell]:
        """Return the cells, with texts converted to cells."""
        return [cell if isinstance(cell, Cell) else Cell(cell) for cell in self.cells]


@dataclasses.dataclass(frozen=True)
class Table:
    """Hold a table that a click on its head sorts. ``words`` are the numbers of the columns of text."""

    head: Sequence[str]
    rows: Sequence[Row]
    words: Sequence[int] = (0,)
    kind: str = "table"


@dataclasses.dataclass(frozen=True)
class Chart:
    """Hold a figure: ``panel``, which a script draws, and ``image``, a data URI, for readers without scripts.

    Consecutive ``inline`` figures share a line if there is room for three. Figures with the same ``stem`` are panels
    of one picture, the file of that name, which is at the first of them.
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
    """Hold a list of names and values."""

    facts: Mapping[str, str]
    kind: str = "facts"


@dataclasses.dataclass(frozen=True)
class Listing:
    """Hold preformatted text, folded under ``title``."""

    title: str
    text: str
    kind: str = "listing"


@dataclasses.dataclass(frozen=True)
class Part:
    """Hold the template of another package, ``PACKAGE/FILE.html``, and the values for it."""

    template: str
    values: Mapping[str, Any]
    kind: str = "part"


Block = Text | Table | Chart | Facts | Listing | Part


@dataclasses.dataclass(frozen=True)
class Section:
    """Hold a page's section about one run. ``command`` made the run; ``entries``: name -> colour, for the filter."""

    title: str
    command: str
    blocks: Sequence[Block]
    entries: Mapping[str, str] = dataclasses.field(default_factory=dict)
    note: str = ""
