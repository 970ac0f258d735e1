"""Read the files in ``papers/`` (recipe or fits, tables and claims of a paper), and build a replication's page."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from relinear.compare.recipe import read_yaml
from relinear.compare.report import gap_text
from relinear.compare.schema import Gap
from relinear.compare.settings import Seeds
from relinear.contract.messages import did_you_mean
from relinear.contract.settings import PositiveInt, Settings
from relinear.pages.blocks import Block, Cell, Row, Table, Text

PAPERS = Path(__file__).parent / "papers"
#: names of a replication's files
RECORD, COMPARISON, REPORT = "replicate.json", "comparison", "report.html"
#: settings that mean the paper's own budget, model or text, and sizes that take minutes on this machine
PAPER, SMALL = "paper", "small"


class Request(Settings):
    """Hold the options of a replication, defaults filled in. budget: share of the paper's tokens."""

    paper: str
    budget: Annotated[float, BeforeValidator(lambda value: 1.0 if value == PAPER else value), Field(gt=0, le=1)]
    model: str
    data: str
    tokenizer: str | None = None
    seeds: Seeds = (0,)
    evaluate_on: str | None = None


class PaperRow(Settings):
    """Hold a row: the paper's cells in order, and our entry; None if we train none.

    Where columns are entries, the row is what they are measured by.
    """

    paper: str = ""
    entry: str | None = None
    measure: str | None = None


class PaperTable(Settings):
    """Hold a table as the paper prints it. ``ours``: column -> measure, or entry where rows are measures."""

    title: str
    head: str
    paper: list[str]
    ours: dict[str, str]
    rows: dict[str, PaperRow]


class Claim(Settings):
    """Hold a claim on an entry's loss against another's, with the paper's values of both (losses, or perplexities).

    With ``measure`` the claim compares that measure of the entry with the measure ``than`` of the other.
    """

    entry: str
    against: str
    paper: tuple[float, float] | None = None
    perplexity: bool = False
    measure: str = ""
    than: str = ""

    @property
    def gap(self) -> float | None:
        """Return the paper's gap, in nats per token or in the measure's unit."""
        if self.paper is None:
            return None
        ours, other = (math.log(value) if self.perplexity else value for value in self.paper)
        return ours - other

    def __str__(self) -> str:
        if self.measure:
            ours, other = (each.replace("_", " ") for each in (self.measure, self.than))
            return f"{ours} of {self.entry} minus {other} of {self.against}"
        return f"loss of {self.entry} minus that of {self.against}"


class Method(Settings):
    """Hold an operator to fit projections with, and the learning rate of its fit."""

    operator: str
    learning_rate: float


class Fits(Settings):
    """Plan fits: projections of one layer of a pretrained decoder, replaced by each method.

    Attributes:
        model, data: of the paper. second: its second text, on which nothing is fitted.
        tokens, evaluation: fitted on and evaluated on at a budget of one, of each text.
        decoder: training settings of the model that stands in where none is named; decoder_tokens: its budget.
        methods: by name. projections: sets that are replaced at once.
        settings: of the fits.
    """

    model: str
    data: str
    second: str
    tokens: PositiveInt
    evaluation: PositiveInt
    decoder: dict[str, Any]
    decoder_tokens: PositiveInt
    methods: dict[str, Method]
    projections: dict[str, list[str]]
    settings: dict[str, Any]


class Paper(Settings):
    """A paper.

    Attributes:
        title, about: for the page, and for lists.
        recipe: at the paper's sizes and budget; "" if it has ``fits``.
        budget: share of it that takes about ten minutes on two cores at the small sizes.
        changes: to the recipe, at every size.
        small: changes to it for a small machine.
        fits: what is fitted to a pretrained model, in place of the recipe and what belongs to it.
        data: text where none is named.
        analyze: entries whose model is saved and analysed, on ``samples`` samples.
        claims: the first is the page's verdict.
        tables, differences, reading: of the page.
    """

    title: str
    about: str
    recipe: str = ""
    fits: Fits | None = None
    data: str = "stdlib"
    budget: float = Field(gt=0)
    changes: dict[str, Any] = Field(default_factory=dict)
    small: dict[str, Any] = Field(default_factory=dict)
    analyze: list[str] = Field(default_factory=list)
    samples: PositiveInt = 64
    claims: list[Claim] = Field(min_length=1)
    tables: list[PaperTable] = Field(min_length=1)
    differences: list[str] = Field(default_factory=list)
    reading: list[str] = Field(default_factory=list)


def read_paper(name: str) -> Paper:
    """Return a paper by its name. Raises ValueError for an unknown name, with the nearest."""
    known = [path.stem for path in sorted(PAPERS.glob("*.yaml"))]
    if name not in known:
        raise ValueError(f"no paper {name!r}; {did_you_mean(name, known)}")
    return Paper.load(read_yaml(PAPERS / f"{name}.yaml"), name)


def is_here(data: str) -> bool:
    """Return whether a text is on this machine; one of the Hub is downloaded whole unless documents are limited."""
    return data == "stdlib" or Path(data).expanduser().exists()


# The page


def paper_table(table: PaperTable, cell: Callable[[str, str], Cell]) -> Table:
    """Return a table of the paper, our columns behind its own; ``cell`` makes a cell from an entry and a measure."""
    rows = []
    for name, row in table.rows.items():
        cells: list[Cell | str] = [name, *map(_printed, row.paper.split())]
        for ours in table.ours.values():
            entry, measure = (ours, row.measure) if row.measure else (row.entry, ours)
            cells.append(cell(entry, measure) if entry else "–")
        rows.append(Row(cells, row.entry))
    return Table([table.head, *table.paper, *(f"here: {name}" for name in table.ours)], rows)


def _printed(text: str) -> Cell:
    """Return a cell of the paper's, which sorts by its number."""
    value = None
    with contextlib.suppress(ValueError):
        value = float(text.strip("<%"))
    return Cell(text, value)


def paper_blocks(
    paper: Paper,
    scale: str,
    cell: Callable[[str, str], Cell],
    gap_of: Callable[[Claim], Gap | None],
    unit: str,
    facts: tuple[Mapping[str, str], Mapping[str, str]],
    share: float,
) -> list[Block]:
    """Return the page on a paper: verdict, tables, claims, what differs, how to read it.

    Args:
        paper: which. scale: what was run, in sentences. unit: of our losses.
        cell: as for ``paper_table``. gap_of: returns ours, None if there are no results.
        facts: settings with ``--budget paper``, and those of ours, by name.
        share: of the tokens with ``--budget paper``.
    """
    gaps = [gap_of(claim) for claim in paper.claims]
    blocks: list[Block] = [Text(_verdict(paper.claims[0], gaps[0], unit), lead=True), Text(scale)]
    for table in paper.tables:
        blocks += [Text(table.title, heading=True), paper_table(table, cell)]
    head = ["difference", "in the paper (losses: nats per token)", f"here (losses: {unit})", "error of the evaluation"]
    rows = []
    for claim, here in zip(paper.claims, gaps, strict=True):
        measured = Cell(gap_text(here), here and here["mean"]), Cell.of(here and here["standard_error"], ".4f")
        rows.append(Row([str(claim), Cell.of(claim.gap, "+.3f"), *measured], claim.entry))
    blocks += [
        Text("What is claimed", heading=True),
        Table(head, rows),
        Text("What differs from the paper", heading=True),
    ]
    rows = [Row([name, text, facts[1][name]]) for name, text in facts[0].items() if text != facts[1][name]]
    blocks += [Table(["", "with --budget paper", "here"], rows, words=(0, 1, 2))] if rows else []
    blocks += map(Text, paper.differences)
    reading = ["A gap below zero means that the first of the two has the lower loss."]
    if share < 1:
        reading.append(
            "Losses here are of another budget than the paper's, and may be of another text and tokenizer: compare the "
            "gaps, not the values. The order of two operators in short training need not be that of the paper's "
            "budget; --budget takes a larger share, --budget paper all of it."
        )
    return [*blocks, Text("How to read it", heading=True), *map(Text, [*reading, *paper.reading])]


def _verdict(claim: Claim, here: Gap | None, unit: str) -> str:
    """Return a sentence on a claim and our gap."""
    paper = "no figure" if claim.gap is None else f"{claim.gap:+.3f}"
    measured = "no figure" if here is None else gap_text(here)
    seeds = " (one seed)" if here and here["low"] is None else ""
    units = ("", "") if claim.measure else (" nats per token", f" {unit}")
    return f"{str(claim).capitalize()}: {paper}{units[0]} in the paper, {measured}{units[1]} here{seeds}."
