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


def wrapped(text: str, stream: TextIO, indent: int = 2) -> str:
    """Wrap ``text`` at the terminal's width, with continued lines indented; return it unchanged for a pipe."""
    if not stream.isatty():
        return text
    width = max(40, min(100, shutil.get_terminal_size().columns))
    fill = textwrap.TextWrapper(width, break_on_hyphens=False, break_long_words=False)  # paths stay in one piece
    lines = []
    for line in text.splitlines():
        words = line.lstrip()
        fill.initial_indent = line[: len(line) - len(words)]
        fill.subsequent_indent = fill.initial_indent + " " * indent
        lines.append(fill.fill(words))
    return "\n".join(lines)


def print_requirements(requirements: Mapping[str, str]) -> None:
    """Print on stdout the runs, time, memory and disk that a command needs, before it starts."""
    for name, text in requirements.items():
        print(wrapped(f"{name:<11} {text}", sys.stdout, indent=12), flush=True)


def print_results(results: Results) -> None:
    """Print results.json as tables with its notes on stdout."""
    from relinear.compare.report import results_table, series_table, series_title

    print_table(results_table(results), results["name"])
    if (by_value := series_table(results)) is not None:
        print_table(by_value, series_title(results))
    _remark(results["budget"], results["match"]["text"], *results["notes"])


def print_scale(results: Mapping[str, Any]) -> None:
    """Print scale.json as a table on stdout, with what it says of every crossing."""
    from relinear.compare.report import scale_table

    print_table(scale_table(results), results["name"])
    _remark("loss = a x^-b", *results["verdicts"])


def print_table(table: Table, title: str = "", max_rows: int | None = None) -> None:
    """Print a page's table on stdout, with names in full and the best in bold; only the first ``max_rows`` rows."""
    import rich.table
    from rich import box

    printed = rich.table.Table(
        title=title or None, title_justify="left", title_style="bold", header_style="bold", box=box.SIMPLE_HEAD
    )
    for index, name in enumerate(table.head):
        short = index == 0 or name.startswith("gap")
        printed.add_column(name, justify="left" if index in table.words else "right", no_wrap=short)
    for row in table.rows[:max_rows]:
        printed.add_row(*(cell.text for cell in row.shown), style="bold" if row.best and len(table.rows) > 1 else None)
    _console().print(printed)
    if max_rows is not None and len(table.rows) > max_rows:
        _remark(f"{len(table.rows) - max_rows} more rows are in the report")


def _remark(*texts: str) -> None:
    _console().print(*texts, sep="\n", style="dim")


def _console() -> Any:
    """Return a console that is wide in a pipe or log, where rich would wrap tables at 80 columns."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", 160)), highlight=False)
