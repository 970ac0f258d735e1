"""The tables at the end of a comparison."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["print_results", "print_scale"]


def print_results(results: Mapping[str, Any]) -> None:
    """Print results.json as a table with its notes on stdout."""
    from rich.table import Table

    from relinear.compare.report import budget_rows, gap_text, gib, number, plus_minus

    entries = results["entries"]
    several = len(entries[0]["runs"]) > 1
    table = Table(title=results["name"], title_justify="left", title_style="bold", header_style="bold", box=_box())
    table.add_column("entry", no_wrap=True)
    table.add_column("validation loss", justify="right")
    reference, counted = results.get("reference"), results.get("ngram")  # older comparisons have neither
    if reference:
        table.add_column(f"gap to {reference}", justify="right", no_wrap=True)
    table.add_column("perplexity", justify="right")
    table.add_column("at step 0", justify="right")
    table.add_column("parameters", justify="right")
    table.add_column("FLOPs / token", justify="right")
    table.add_column("training", justify="right")
    table.add_column("inference", justify="right")
    table.add_column("peak memory", justify="right")
    table.add_column("learning rate", justify="right")
    best = min(entry["validation_loss"]["mean"] for entry in entries)
    for entry in entries:
        speed = entry["speed"]
        ratios = [f"{speed[f'{what}_ratio']:.2f}x" if speed else "–" for what in ("train", "inference")]
        edge = " *" if entry["tuning"] and entry["tuning"]["edge"] else ""
        table.add_row(
            entry["name"],
            plus_minus(entry["validation_loss"]),
            *([gap_text(entry["gap"])] if reference else []),
            plus_minus(entry["perplexity"], 2),
            f"{entry['initial_perplexity']['mean']:.1f}",
            number(entry["parameters"]),
            number(entry["flops_per_token"]),
            *ratios,
            gib(entry["peak_memory_bytes"]),
            number(entry["learning_rate"]) + edge,
            style="bold" if entry["validation_loss"]["mean"] == best and several else None,
        )
    if counted:
        loss, gap = f"{counted['validation_loss']:.3f}", ["–"] if reference else []
        table.add_row(f"{counted['order']}-grams", loss, *gap, f"{counted['perplexity']:.2f}", style="dim")
    console = _console(160 if reference else 132)
    console.print(table)
    _print_rows(console, f"gap to {reference} by budget", budget_rows(results))
    for text in (results["budget"], results["match"]["text"], *results["notes"]):
        console.print(text, style="dim")


def print_scale(results: Mapping[str, Any]) -> None:
    """Print scale.json: a row an entry with its fit and its losses by width, then where it crosses the dense ones."""
    entries = results["entries"]
    widths = [str(point["width"]) for point in entries[0]["points"]]
    rows = [["loss at width", *widths, "b (FLOPs)", "b (time)"]]
    for entry in entries:
        losses = [f"{point['validation_loss']['mean']:.3f}" for point in entry["points"]]
        rows.append([entry["name"], *losses, *(_exponent(entry[axis]) for axis in ("flops", "seconds"))])
    console = _console(132)
    _print_rows(console, results["name"], rows)
    for text in ("loss = a x^-b", *results["verdicts"]):
        console.print(text, style="dim")


def _exponent(axis: Mapping[str, Any] | None) -> str:
    if axis is None:
        return "–"
    low, high = axis["fit"]["b_interval"]
    return f"{axis['fit']['b']:.3f} [{low:.3f}, {high:.3f}]"


def _print_rows(console: Any, title: str, rows: list[list[str]]) -> None:
    """A table of texts under a head row; nothing where there are none."""
    from rich.table import Table

    if not rows:
        return
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=_box())
    for index, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)


def _console(columns: int) -> Any:
    """A pipe or a log has no width: rich would take 80 columns and fold the table."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", columns))
    return Console(width=width, highlight=False)


def _box() -> Any:
    from rich import box

    return box.SIMPLE_HEAD
