"""Export a comparison for a paper: its table and curves as CSV, its table in LaTeX (booktabs)."""

import csv
import io
import re
from collections.abc import Iterable, Mapping
from typing import Any

from relinear.compare.report import results_table, series_of, series_table
from relinear.compare.schema import EntryResult, Results
from relinear.pages.blocks import Table

#: first words of the heads of the columns that a printed table has
_PRINTED = ("entry", "validation loss", "gap", "bits", "bytes", "parameters", "FLOPs", "training speed")
_ESCAPES = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "±": r"$\pm$",
    "×": r"$\times$",
}


def as_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows of the same columns as CSV, with their names on top."""
    rows = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def table_rows(results: Results) -> Iterable[dict[str, Any]]:
    """Yield numbers by column for every entry at every budget; losses in nats, gaps with their intervals of 95 %."""
    results_by_name = {entry["name"]: entry for entry in results["entries"]}
    _, _, series = series_of(results)
    for row in series or [results]:
        for at_value in row["entries"]:
            entry: EntryResult = results_by_name[at_value["name"]]
            gap: Any = at_value.get("gap") or {}
            speed: Any = entry["speed"] or {}
            loss = at_value["validation_loss"]
            yield {
                "entry": entry["name"],
                "operators": entry["operators"],
                "tokens": row.get("tokens", entry["runs"][0]["curve"][-1]["tokens"]),
                "bytes": row.get("bytes"),
                "seeds": len(loss["values"]),
                "validation_loss": loss["mean"],
                "validation_loss_std": loss["std"],
                "gap": gap.get("mean"),
                "gap_low": gap.get("low"),
                "gap_high": gap.get("high"),
                "parameters": entry["parameters"],
                "active_parameters": entry["parameters"] - entry.get("inactive_parameters", 0),
                "flops_per_token": entry["flops_per_token"],
                "total_flops_per_token": entry["flops_per_token"] + entry.get("inactive_flops", 0),
                "learning_rate": at_value["learning_rate"],
                "train_speed_ratio": speed.get("train_ratio"),
                "inference_speed_ratio": speed.get("inference_ratio"),
            }


def curve_rows(results: Results) -> Iterable[dict[str, Any]]:
    """Yield the points of every final run, at the largest budget; ``loss`` is the training loss."""
    for entry in results["entries"]:
        for run in entry["runs"]:
            head = {"entry": entry["name"], "seed": run.get("seed")}
            for point in run["curve"]:
                losses = {name: point.get(name) for name in ("loss", "validation_loss")}
                yield head | {"step": point["step"], "tokens": point["tokens"]} | losses


def latex_tables(results: Results) -> str:
    """Return the table, and with several budgets a table of gaps by budget, as LaTeX for the package booktabs."""
    table = results_table(results)
    columns = [index for index, head in enumerate(table.head) if head.startswith(_PRINTED)]
    by_value = series_table(results)
    parts = [
        r"% needs \usepackage{booktabs}",
        "% losses: mean and sample standard deviation over seeds; gaps: mean [95 % interval]; best in bold, if any",
        "% training speed: tokens per second as a ratio to dense at full size",
        _tabular(table, columns),
        *([] if by_value is None else [_tabular(by_value, range(len(by_value.head)))]),
    ]
    return "\n".join(parts) + "\n"


def _tabular(table: Table, columns: Iterable[int]) -> str:
    columns = list(columns)
    lines = [" & ".join(_escaped(table.head[index]) for index in columns), r"\midrule"]
    for row in table.rows:
        cells = [_escaped(row.shown[index].text) for index in columns]
        lines.append(" & ".join([rf"\textbf{{{cells[0]}}}" if row.best else cells[0], *cells[1:]]))
    body = "\n".join(line if line.startswith("\\midrule") else rf"{line} \\" for line in lines)
    aligned = "".join("l" if index in table.words else "r" for index in columns)
    return f"\\begin{{tabular}}{{{aligned}}}\n\\toprule\n{body}\n\\bottomrule\n\\end{{tabular}}"


def _escaped(text: str) -> str:
    """Return ``text`` with LaTeX's own characters escaped, and signs of numbers in mathematics."""
    escaped = "".join(_ESCAPES.get(character, character) for character in text)
    return re.sub(r"(?<![\w.}-])[+-]\d[\d.]*", r"$\g<0>$", escaped)
