"""The report of a distillation, layer by layer, and its page."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from relinear.pages.blocks import Block, Cell, Chart, Listing, Row, Section, Table, Text
from relinear.pages.figures import PALETTE, Axis, Panel, Series
from relinear.pages.records import about, as_yaml, what_ran
from relinear.system.text import columns


@dataclasses.dataclass(frozen=True)
class LayerFit:
    """Report one fitted layer.

    Attributes:
        name: the layer's name in the model.
        operator: the operator's settings, as text.
        parameters: number of the operator's parameters.
        parameters_before: number of parameters of the layer that it replaced.
        start_error: sum of squared errors of the outputs over the targets' sum of squares, on the validation tokens,
            before fitting; with the loss "kl" the divergence of the final logits in nats per token.
        error: the same after fitting.
        cosine: mean cosine of a token's output with the target output (None with the loss "kl").
        retrained: whether this layer was retrained rather than replaced.
        joint_start_error: if the operators of a decoder layer were trained together, the error before that of the
            outputs of the module that contains them.
        joint_error: the same afterwards.
    """

    name: str
    operator: str
    parameters: int
    parameters_before: int
    start_error: float
    error: float
    cosine: float | None
    retrained: bool = False
    joint_start_error: float | None = None
    joint_error: float | None = None

    @property
    def worse_than_zeros(self) -> bool:
        """Return whether an output of zeros, whose error is 1, would be as good (never for a KL)."""
        return self.cosine is not None and not self.error < 1


@dataclasses.dataclass(frozen=True)
class DistillReport:
    """Report every fitted layer in the order of fitting; printing it gives a table.

    Attributes:
        layers: the fitted layers.
        loss: "mse", "cosine" or "kl".
        perplexity_before: perplexity of the original model on tokens that were not fitted on; None without logits.
        perplexity: the same after all fits.
    """

    layers: tuple[LayerFit, ...]
    loss: str
    perplexity_before: float | None = None
    perplexity: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        table = _table([vars(fit) for fit in self.layers], self.loss)
        rows = [[cell.text for cell in row.shown] for row in table.rows]
        for fit, row in zip(self.layers, rows, strict=True):
            row.append("worse than an output of zeros" if fit.worse_than_zeros else "")
        text = columns([[*table.head, ""], *rows], left_aligned=2)
        if self.perplexity_before is not None and self.perplexity is not None:
            change = f"{self.perplexity_before:,.2f} before, {self.perplexity:,.2f} after"
            text += f"\nperplexity on tokens that were not fitted on: {change}"
        return text


# The page


def distill_section(report: Mapping[str, Any]) -> Section:
    """Return a page's blocks for ``report``, the values of report.json."""
    error = "KL (nats per token)" if report["loss"] == "kl" else "error"
    layers = report["layers"]
    blocks: list[Block] = []
    before, after = report.get("perplexity_before"), report.get("perplexity")  # older reports have neither
    if before is not None and after is not None:
        count = f"{len(layers)} layer{'s' * (len(layers) > 1)}"
        sentence = f"With {count} replaced, perplexity went from {before:,.2f} to {after:,.2f}"
        blocks.append(Text(f"{sentence} on tokens that were not fitted on.", lead=True))
    kind = "the divergence of the final logits" if report["loss"] == "kl" else "squared error over squared output"
    blocks += [
        _chart(layers, error),
        Text("Layers", heading=True),
        _table(layers, report["loss"]),
        Text(
            f"{error}: {kind}, on validation tokens; the smaller, the nearer to the layer it replaced.",
            soft=True,
        ),
        *what_ran(report),
    ]
    if report.get("settings"):
        blocks.append(Listing("settings", as_yaml(report["settings"])))
    return Section("Distillation", "distill", blocks, note=about(report, report.get("model")))


def _table(layers: list[Mapping[str, Any]], loss: str) -> Table:
    """Return a row per layer, for the page and for printing, with joint errors if layers were trained together."""
    error = "KL (nats per token)" if loss == "kl" else "error"
    rows = []
    errors = {"start_error": f"{error} before", "error": error, "cosine": "cosine"}
    if any(fit.get("joint_error") is not None for fit in layers):
        errors |= {"joint_start_error": "joint error before", "joint_error": "joint error"}
    for fit in layers:
        operator = "retrained" if fit.get("retrained") else fit["operator"]
        size = Cell(f"{fit['parameters']:,}", fit["parameters"], f"{fit['parameters'] / fit['parameters_before']:.3g}×")
        cells = (Cell.of(fit.get(key), ".4f") for key in errors)
        rows.append(Row([fit["name"], operator, size, f"{fit['parameters_before']:,}", *cells]))
    return Table(["layer", "operator", "parameters", "before", *errors.values()], rows, (0, 1))


def _chart(layers: list[Mapping[str, Any]], error: str) -> Chart:
    series = []
    for number, (key, name) in enumerate((("start_error", "before fitting"), ("error", "after fitting"))):
        values, indices = [fit[key] for fit in layers], list(range(len(layers)))
        texts = [f"{fit['name']}, {name}: {fit[key]:.4g}" for fit in layers]
        style: dict[str, Any] = {"number": number, "mode": "points", "texts": texts}
        series.append(Series(name=name, color=PALETTE[1 - number], x=indices, y=values, **style))
    panel = Panel(series, Axis(title="layer, in the order of fitting"), Axis(title=error, from_zero=True))
    return Chart("Every layer's error before and after fitting; point at a dot for its name.", panel)
