"""``relinear report``: the table and the page of a comparison, drawn again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["command"]


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a comparison that has ended.")],
) -> None:
    """Rebuild plots and report.html from results.json (or the plot of scale.json), and print the table.

    **Example:** `relinear report runs/demo`
    """
    from relinear.cli.table import print_results, print_scale
    from relinear.compare.report import read_results, write_report, write_scale_plot
    from relinear.compare.scaling import SCALE, read_scale

    if (directory / SCALE).is_file():
        plot = write_scale_plot(directory)
        print_scale(read_scale(directory))
        print(f"\nplot: {plot.resolve()}")
        return
    report = write_report(directory)
    print_results(read_results(directory))
    print(f"\nreport: {report.resolve()}")
