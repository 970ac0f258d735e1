"""``relinear report``: the table and the page of a comparison, drawn again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["command"]


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a comparison that has ended.")],
) -> None:
    """Rebuild plots and report.html from results.json, and print the table.

    **Example:** `relinear report runs/demo`
    """
    from relinear.cli.table import print_results
    from relinear.compare.report import read_results, write_report

    report = write_report(directory)
    print_results(read_results(directory))
    print(f"\nreport: {report.resolve()}")
