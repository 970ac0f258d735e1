"""A low-rank linear layer without redundant parameters: R of its inputs stand for themselves."""

# Legend: I in_features, O out_features, R rank

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from relinear.core.config import register
from relinear.core.dense_cache import dense_inference
from relinear.core.moments import Moments
from relinear.core.operator import Operator, OperatorConfig
from relinear.functional.low_rank import low_rank_factors, weighted_spectrum
from relinear.functional.pivoted_low_rank import pivoted_factors
from relinear.kernels.choice import prefers_dense
from relinear.kernels.pivoted_low_rank import pivoted_low_rank
from relinear.operators.low_rank import RankConfig, moments_of_factors

__all__ = ["PivotedLowRank", "PivotedLowRankLinear"]


class PivotedLowRankLinear(Operator):
    """y = (x_S + mix x_rest) up^T + bias; ``mix`` (R, I - R), ``up`` (O, R), optional ``bias`` (O,).

    ``order`` (I,) is a buffer of integers: a permutation of the inputs, the pivots S first.
    """

    config: PivotedLowRank
    fixed_fan_in = ("up",)
    order: Tensor

    def __init__(self, config, in_features, out_features, *, bias=True, device=None, dtype=None):
        super().__init__(config, in_features, out_features)
        kw = {"device": device, "dtype": dtype}
        self.register_buffer("order", torch.empty(in_features, dtype=torch.int32, device=device))
        self.mix = nn.Parameter(torch.empty(config.rank, in_features - config.rank, **kw))
        self.up = nn.Parameter(torch.empty(out_features, config.rank, **kw))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features, **kw)) if bias else None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Pivots spread evenly; ``mix`` has variance 1 / I, ``up`` such that unit variance comes out; zero bias."""
        rank, inputs = self.config.rank, self.in_features
        pivots = torch.arange(rank, device=self.order.device) * inputs // rank
        rest = torch.ones(inputs, dtype=torch.bool, device=self.order.device)
        rest[pivots] = False
        if not self.order.is_meta:
            self.order.copy_(torch.cat((pivots, rest.nonzero().flatten())))
        nn.init.normal_(self.mix, std=1 / math.sqrt(inputs))
        nn.init.normal_(self.up, std=1 / math.sqrt(rank * (2 - rank / inputs)))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        dense = dense_inference(self, x, prefers_dense)
        return dense if dense is not None else pivoted_low_rank(x, self.order, self.mix, self.up, self.bias)

    def to_dense(self) -> Tensor:
        down, up = self.dense_chain()
        return up @ down

    def dense_chain(self) -> tuple[Tensor, ...]:
        identity = torch.eye(self.config.rank, dtype=self.mix.dtype, device=self.mix.device)
        return torch.cat((identity, self.mix), 1)[:, self.order.argsort()], self.up

    @torch.no_grad()
    def from_linear(self, linear: nn.Module) -> Self:
        """Truncated SVD of the weight: the best fit of this rank in the Frobenius norm."""
        return self._take(linear, *low_rank_factors(self.source_weight(linear), self.config.rank))

    @torch.no_grad()
    def from_moments(self, linear: nn.Module, moments: Moments, *, steps: int = 100) -> Self:
        """The exact solution, as of ``LowRank``; ``steps`` has no meaning here."""
        weight = self.source_weight(linear)
        moments.check(self.in_features, self.out_features)
        spectrum = weighted_spectrum(weight, moments.inputs, moments.outputs)
        return self._take(linear, *spectrum.factors(weight, self.config.rank))

    @torch.no_grad()
    def parameter_moments(self, moments: Moments) -> dict[str, Moments]:
        both = moments_of_factors(moments, *self.dense_chain())
        rest = self.order[self.config.rank :]
        return {"mix": Moments(moments.inputs[rest][:, rest], both["down"].outputs), "up": both["up"]}

    def _take(self, linear: nn.Module, down: Tensor, up: Tensor) -> Self:
        order, mix, up = pivoted_factors(down, up)
        self.order.copy_(order)
        self.mix.copy_(mix)
        self.up.copy_(up)
        self.copy_bias_(linear)
        return self

    def flops_per_token(self) -> int:
        return 2 * self.config.rank * (self.in_features + self.out_features - self.config.rank)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class PivotedLowRank(RankConfig):
    """A product of two thin matrices, the first of which holds an identity that is neither stored nor computed.

    The same maps as ``LowRank`` of this rank with R^2 fewer parameters: R (I + O - R), which is below the dense
    matrix's count at every rank that is not full.

    Args:
        rank: R, the width of the bottleneck; at most min(in_features, out_features).
    """

    kind: ClassVar[str] = "pivoted_low_rank"
    module_class = PivotedLowRankLinear

    def sizes(self, in_features: int, out_features: int) -> list[OperatorConfig]:
        """Ranks that are not full."""
        return self.ranks_below(min(in_features, out_features), in_features, out_features)
