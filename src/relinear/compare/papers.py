"""Read the files in ``papers/`` (recipe or fits, tables and claims of a paper), and build a replication's page."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from relinear.compare.report import gap_text
from relinear.compare.schema import Gap
from relinear.compare.settings import Seeds
from relinear.pages.blocks import Block, Cell, Row, Table, Text
from relinear.settings.base import PositiveInt, Settings
from relinear.settings.messages import did_you_mean
from relinear.settings.yaml_settings import read_yaml

PAPERS = Path(__file__).parent / "papers"
#: names of a replication's files
RECORD, COMPARISON, REPORT = "replicate.json", "comparison", "report.html"
#: options: the paper's own budget, model or text; sizes that take minutes on this machine
PAPER, SMALL = "paper", "small"


class Request(Settings):
    """Options of a replication, with defaults filled in.

    Attributes:
        paper: name of the paper.
        budget: share of the paper's tokens.
        model: "small", "paper", or a model as in a recipe.
        data: "paper", or a text as in a recipe.
        tokenizer: tokenizer of the text; None takes that of the sizes.
        seeds: seeds of the runs.
        evaluate_on: second text, for what is fitted to a pretrained model.
    """

    paper: str
    budget: Annotated[float, BeforeValidator(lambda value: 1.0 if value == PAPER else value), Field(gt=0, le=1)]
    model: str
    data: str
    tokenizer: str | None = None
    seeds: Seeds = (0,)
    evaluate_on: str | None = None


class PaperRow(Settings):
    """A row of a table.

    Attributes:
        paper: the paper's cells in order, separated by spaces.
        entry: our entry in this row; None if we train none.
        measure: what the row measures, in tables whose columns are entries.
    """

    paper: str = ""
    entry: str | None = None
    measure: str | None = None


class PaperTable(Settings):
    """A table as the paper prints it.

    Attributes:
        title: heading of the table.
        head: head of the first column, which holds the rows' names.
        paper: heads of the paper's columns.
        ours: our columns by head: a measure, or an entry if rows are measures.
        rows: the rows by name.
    """

    title: str
    head: str
    paper: list[str]
    ours: dict[str, str]
    rows: dict[str, PaperRow]


class Claim(Settings):
    """A claim that compares two entries, by their losses or by other measures.

    Attributes:
        entry: the entry that the claim is about.
        against: the entry that it is compared with.
        paper: the paper's values of both, losses unless ``perplexity`` or ``measure`` is set.
        perplexity: whether the paper's values are perplexities.
        measure: measure of ``entry``, if the claim is not about losses.
        than: measure of ``against`` that it is compared with.
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
    """How a method fits projections.

    Attributes:
        operator: the operator that is fitted.
        learning_rate: learning rate of the fit.
    """

    operator: str
    learning_rate: float


class Fits(Settings):
    """Describe the fits of a paper: each method replaces projections of one layer of a pretrained decoder.

    Attributes:
        model: the paper's model.
        data: the paper's text, on which methods are fitted.
        second: the paper's second text, on which nothing is fitted.
        tokens: tokens of a fit at a budget of one.
        evaluation: tokens of each text that a fit is evaluated on, at a budget of one.
        decoder: training settings of the stand-in model, for when no model is named.
        decoder_tokens: training tokens of the stand-in model at a budget of one.
        methods: the methods by name.
        projections: sets of projections that are replaced together, by name.
        settings: settings of the fits.
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
    """A paper: what to train or fit, what changes on a small machine, its tables and its claims.

    Attributes:
        title: title of the page.
        about: description in lists.
        recipe: name of the recipe at the paper's sizes and budget; "" if the paper has ``fits``.
        fits: what is fitted to a pretrained model, instead of a recipe.
        data: text that is used if none is named.
        budget: share of the paper's tokens that takes about ten minutes on two cores at the small sizes.
        changes: changes to the recipe at every size.
        small: further changes for a small machine.
        analyze: entries whose model is saved and analysed.
        samples: number of samples in these analyses.
        claims: claims of the paper; the first is the page's verdict.
        tables: tables of the paper.
        differences: sentences on what differs from the paper.
        reading: sentences on how to read the page.
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
    """Return a paper by its name. Raises ValueError for an unknown name; the message has the nearest."""
    known = [path.stem for path in sorted(PAPERS.glob("*.yaml"))]
    if name not in known:
        raise ValueError(f"no paper {name!r}; {did_you_mean(name, known)}")
    return Paper.load(read_yaml(PAPERS / f"{name}.yaml"), name)


def is_here(data: str) -> bool:
    """Return whether a text is on this machine. One of the Hub is downloaded whole unless documents are limited."""
    return data == "stdlib" or Path(data).expanduser().exists()


# The page


def paper_table(table: PaperTable, cell: Callable[[str, str], Cell]) -> Table:
    """Return a table of the paper and then our columns; ``cell`` makes a cell from an entry and a measure."""
    rows = []
    for name, row in table.rows.items():
        cells: list[Cell | str] = [name, *map(_printed, row.paper.split())]
        for ours in table.ours.values():
            entry, measure = (ours, row.measure) if row.measure else (row.entry, ours)
            cells.append(cell(entry, measure) if entry else "–")
        rows.append(Row(cells, row.entry))
    return Table([table.head, *table.paper, *(f"here: {name}" for name in table.ours)], rows)


def _printed(text: str) -> Cell:
    """Return a cell with the paper's text, which sorts by its number."""
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
        paper: the paper that was replicated.
        scale: sentences on what was run.
        cell: makes a cell from an entry and a measure, as for ``paper_table``.
        gap_of: returns our gap for a claim; None without results.
        unit: unit of our losses.
        facts: settings by name, those with ``--budget paper`` and then ours.
        share: our share of the tokens with ``--budget paper``.
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
    text = str(claim)
    return f"{text[0].upper()}{text[1:]}: {paper}{units[0]} in the paper, {measured}{units[1]} here{seeds}."
