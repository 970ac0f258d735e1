"""The page of a distillation: report.json's values -> a table and a figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relinear.pages.blocks import Block, Cell, Chart, Listing, Row, Section, Table, Text, as_yaml, what_ran
from relinear.pages.figures import PALETTE, Axis, Panel, Series

__all__ = ["distill_section"]


def distill_section(report: Mapping[str, Any]) -> Section:
    """Return what a page says of ``report``, the values of report.json."""
    error = "KL (nats)" if report["loss"] == "kl" else "error"
    layers = report["layers"]
    blocks: list[Block] = []
    before, after = report.get("perplexity_before"), report.get("perplexity")  # older reports have neither
    if before is not None and after is not None:
        blocks.append(Text(f"Perplexity on tokens that were not fitted on: {before:,.2f} before, {after:,.2f} after."))
    what = "the divergence of the final logits" if report["loss"] == "kl" else "squared error over squared output"
    blocks += [
        Text("Layers", heading=True),
        _table(layers, error),
        Text(f"{error}: {what}, on validation tokens; the smaller, the nearer to the layer it replaced.", soft=True),
        _chart(layers, error),
        *what_ran(report),
    ]
    if report.get("settings"):
        blocks.append(Listing("settings", as_yaml(report["settings"])))
    return Section("Distillation", "distill", blocks)


def _table(layers: list[Mapping[str, Any]], error: str) -> Table:
    rows = []
    for fit in layers:
        operator = "retrained" if fit.get("retrained") else fit["operator"]
        kept = Cell(f"{fit['parameters']:,}", fit["parameters"], f"{fit['parameters'] / fit['parameters_before']:.3g}×")
        errors = [Cell(f"{fit[key]:.4f}", fit[key]) for key in ("start_error", "error")]
        cosine = Cell("–" if fit["cosine"] is None else f"{fit['cosine']:.4f}", fit["cosine"])
        rows.append(Row([fit["name"], operator, kept, f"{fit['parameters_before']:,}", *errors, cosine]))
    return Table(["layer", "operator", "parameters", "before", f"start {error}", error, "cosine"], rows, (0, 1))


def _chart(layers: list[Mapping[str, Any]], error: str) -> Chart:
    shown = []
    for number, (key, name) in enumerate((("start_error", "before fitting"), ("error", "after fitting"))):
        values, places = [fit[key] for fit in layers], list(range(len(layers)))
        texts = [f"{fit['name']}, {name}: {fit[key]:.4g}" for fit in layers]
        look: dict[str, Any] = {"number": number, "mode": "points", "texts": texts}
        shown.append(Series(name=name, colour=PALETTE[1 - number], x=places, y=values, **look))
    panel = Panel(shown, Axis(title="layer, in the order of fitting"), Axis(title=error, from_zero=True))
    return Chart("Every layer's error before and after fitting; point at a dot for its name.", panel)
