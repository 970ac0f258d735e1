"""Fit text and tables to the terminal's width."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from relinear.compare.schema import Results
    from relinear.pages.blocks import Table


def fitted(text: str, stream: TextIO, indent: int = 2) -> str:
    """Return ``text`` in lines that the terminal shows whole, what goes on indented; a pipe gets it as it is."""
    if not stream.isatty():
        return text
    width = max(40, min(100, shutil.get_terminal_size().columns))
    fill = textwrap.TextWrapper(width, break_on_hyphens=False, break_long_words=False)  # a path is copied whole
    lines = []
    for line in text.splitlines():
        words = line.lstrip()
        fill.initial_indent = line[: len(line) - len(words)]
        fill.subsequent_indent = fill.initial_indent + " " * indent
        lines.append(fill.fill(words))
    return "\n".join(lines)


def print_requirements(requirements: Mapping[str, str]) -> None:
    """Print on stdout what a command takes, before it starts."""
    for name, text in requirements.items():
        print(fitted(f"{name:<11} {text}", sys.stdout, indent=12), flush=True)


def print_results(results: Results) -> None:
    """Print results.json as a table with its notes on stdout."""
    from relinear.compare.report import budget_table, results_table

    print_table(results_table(results), results["name"])
    by_budget = budget_table(results)
    if by_budget is not None:
        print_table(by_budget, "" if results.get("sizes") else f"gap to {results['reference']} by budget")
    _remark(results["budget"], results["match"]["text"], *results["notes"])


def print_scale(results: Mapping[str, Any]) -> None:
    """Print scale.json: a row per entry with its fit and its losses by width, then where it crosses the dense ones."""
    from relinear.compare.report import scale_table

    print_table(scale_table(results), results["name"])
    _remark("loss = a x^-b", *results["verdicts"])


def print_table(table: Table, title: str = "", most: int | None = None) -> None:
    """Print a table of a page on stdout: names in full, what is best in bold; the first ``most`` rows."""
    import rich.table
    from rich import box

    shown = rich.table.Table(
        title=title or None, title_justify="left", title_style="bold", header_style="bold", box=box.SIMPLE_HEAD
    )
    for index, name in enumerate(table.head):
        short = index == 0 or name.startswith("gap")
        shown.add_column(name, justify="left" if index in table.words else "right", no_wrap=short)
    for row in table.rows[:most]:
        shown.add_row(*(cell.text for cell in row.shown), style="bold" if row.best and len(table.rows) > 1 else None)
    _console().print(shown)
    if most is not None and len(table.rows) > most:
        _remark(f"{len(table.rows) - most} more rows are in the report")


def _remark(*texts: str) -> None:
    _console().print(*texts, sep="\n", style="dim")


def _console() -> Any:
    """Return a console that is wide enough in a pipe or log, where rich would fold tables at 80 columns."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", 160)), highlight=False)
