"""A bottleneck with an activation in it (CoLA: Liu et al. 2025, arXiv 2502.10940, Eq. 3): no linear map."""

# Legend: I in_features, O out_features, R rank

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear, silu

from relinear import register
from relinear.contract import Count
from relinear_examples.structured import RankedConfig, StructuredLinear

__all__ = ["CoLA", "CoLALinear"]

#: mean of silu(z)^2 for z of unit variance
_SILU_SQUARED = 0.3558


class CoLALinear(StructuredLinear):
    """y = U silu(V x) + bias; parameters ``down`` V (R, I), ``up`` U (O, R)."""

    finite_fan_in = ("up",)
    finite_fan_out = ("down",)

    def tensors(self):
        rank, inputs, outputs = self.config.rank, self.in_features, self.out_features
        return {"down": ((rank, inputs), inputs**-0.5), "up": ((outputs, rank), (_SILU_SQUARED * rank) ** -0.5)}

    def product(self, x: Tensor) -> Tensor:
        return linear(silu(linear(x, self.down)), self.up)

    def flops_per_token(self) -> int:
        return 2 * (self.down.numel() + self.up.numel())


@register
class CoLA(RankedConfig):
    """A product of two thin matrices with SiLU between them. R (I + O) parameters.

    Args:
        rank: R; at most min(in_features, out_features). The paper takes a quarter of the model's width.
    """

    kind = "cola"
    module_class = CoLALinear
    fits_weight = False

    rank: Count = 64

    def full_rank(self, in_features: int, out_features: int) -> int:
        return min(in_features, out_features)
