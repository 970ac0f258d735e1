"""Define the blocks of a report page: text, tables, charts and listings. All text is plain; the template escapes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from relinear.pages.figures import Panel


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph, or with a flag a heading, a remark or the page's main result.

    Attributes:
        text: the words.
        heading: whether it is a heading.
        soft: whether it is a remark.
        lead: whether it is the main result.
    """

    text: str
    heading: bool = False
    soft: bool = False
    lead: bool = False
    kind: str = "text"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A table's cell.

    Attributes:
        text: what is shown.
        value: number to sort by; by default the text.
        small: a second line in small letters.
        title: the tooltip.
    """

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
    """A table's row.

    Attributes:
        cells: cells, or their texts.
        entry: name of the entry that it is about, for the page's filter and the colour of its dot.
        best: whether it is marked as the best one.
    """

    cells: Sequence[Cell | str]
    entry: str | None = None
    best: bool = False

    @property
    def shown(self) -> list[Cell]:
        """Return the cells, with texts converted to cells."""
        return [cell if isinstance(cell, Cell) else Cell(cell) for cell in self.cells]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that a click on its head sorts.

    Attributes:
        head: titles of the columns.
        rows: rows with a cell for each column.
        words: indices of the columns that hold text.
    """

    head: Sequence[str]
    rows: Sequence[Row]
    words: Sequence[int] = (0,)
    kind: str = "table"


@dataclasses.dataclass(frozen=True)
class Chart:
    """A figure, which the page's script draws.

    Attributes:
        description: its caption.
        panel: its content.
        height: height in pixels; on a narrow page it is less.
        inline: whether it shares a line with the inline figures next to it, if there is room for three.
        stem: name of the picture's file; figures with the same stem are its panels.
    """

    description: str
    panel: Panel
    height: int = 440
    inline: bool = False
    stem: str = ""
    kind: str = "chart"


@dataclasses.dataclass(frozen=True)
class Facts:
    """A list of names and values.

    Attributes:
        facts: name -> value.
    """

    facts: Mapping[str, str]
    kind: str = "facts"


@dataclasses.dataclass(frozen=True)
class Listing:
    """Preformatted text, which is folded.

    Attributes:
        title: heading of the folded text.
        text: the text.
    """

    title: str
    text: str
    kind: str = "listing"


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a page that has a template of its own.

    Attributes:
        template: its path in the package, ``ROOM/FILE.html``.
        values: variables of the template.
    """

    template: str
    values: Mapping[str, Any]
    kind: str = "part"


Block = Text | Table | Chart | Facts | Listing | Part


@dataclasses.dataclass(frozen=True)
class Section:
    """A page's section about one run.

    Attributes:
        title: its heading.
        command: the command of relinear that made the run.
        blocks: its content.
        entries: name of an entry -> its colour, for the page's filter.
        note: text under the heading.
    """

    title: str
    command: str
    blocks: Sequence[Block]
    entries: Mapping[str, str] = dataclasses.field(default_factory=dict)
    note: str = ""
