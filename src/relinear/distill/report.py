"""What a distillation did, layer by layer."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["DistillProgress", "DistillReport", "LayerFit"]


@dataclasses.dataclass(frozen=True)
class DistillProgress:
    """Where a distillation is: ``phase`` is "evaluate", "record", "fit" or "retrain", ``done`` of ``total`` blocks or
    steps."""

    phase: str
    name: str
    done: int
    total: int
    loss: float | None = None


@dataclasses.dataclass(frozen=True)
class LayerFit:
    """One fitted layer.

    name: of the layer in the model.
    operator: its setting, as text.
    parameters, parameters_before: of the operator and of what it replaced.
    start_error, error: squared error of the output over its square, on the validation tokens, before and after
        fitting; with the loss "kl" the divergence of the final logits in nats a token.
    cosine: mean cosine of a token's output with the wanted one (None with the loss "kl").
    retrained: whether this is a layer that was trained again rather than replaced.
    joint_start_error, joint_error: where the targets of a decoder layer were trained together, the same error of the
        output of the module that holds them, before and after that.
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
        """Whether an output of zeros, whose error is 1, would be as near to the layer's (never told by a KL)."""
        return self.cosine is not None and not self.error < 1


@dataclasses.dataclass(frozen=True)
class DistillReport:
    """Every fitted layer in the order of fitting; printing it gives a table.

    perplexity_before, perplexity: of the whole model before and after, on the tokens that were not fitted on; None for
        a model that returns no logits.
    """

    layers: tuple[LayerFit, ...]
    loss: str
    perplexity_before: float | None = None
    perplexity: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        error = "KL (nats)" if self.loss == "kl" else "error"
        together = any(fit.joint_error is not None for fit in self.layers)
        joint = ("start joint error", "joint error") if together else ()
        rows = [("layer", "operator", "parameters", "before", f"start {error}", error, "cosine", *joint, "")]
        for fit in self.layers:
            cosine = "" if fit.cosine is None else f"{fit.cosine:.4f}"
            operator = "retrained" if fit.retrained else fit.operator
            figures = (
                f"{fit.parameters:,}",
                f"{fit.parameters_before:,}",
                f"{fit.start_error:.4f}",
                f"{fit.error:.4f}",
            )
            remark = "worse than an output of zeros" if fit.worse_than_zeros else ""
            pair = (fit.joint_start_error, fit.joint_error) if together else ()
            ends = ["" if value is None else f"{value:.4f}" for value in pair]
            rows.append((fit.name, operator, *figures, cosine, *ends, remark))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = []
        for row in rows:
            left = [cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False)]
            right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
            lines.append("  ".join((*left, *right)).rstrip())
        if self.perplexity_before is not None and self.perplexity is not None:
            stated = f"{self.perplexity_before:,.2f} before, {self.perplexity:,.2f} after"
            lines.append(f"perplexity on tokens that were not fitted on: {stated}")
        return "\n".join(lines)
