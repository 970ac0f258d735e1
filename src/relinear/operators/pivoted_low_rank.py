"""Low-rank linear layers without redundant parameters: R of the inputs enter the latent unchanged."""

# Legend: I in_features, O out_features, R rank

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from relinear.contract.config import register
from relinear.contract.operator import OperatorConfig, ParamRole
from relinear.functional.pivoted_low_rank import pivoted_factors
from relinear.kernels.dense import DenseLimits
from relinear.kernels.pivoted_low_rank import pivoted_low_rank
from relinear.operators.low_rank import RankConfig, RankLinear

_DENSE_LIMITS = DenseLimits({torch.float32: ((8, 256),), torch.bfloat16: ((8, 576), (math.inf, 256))})


class PivotedLowRankLinear(RankLinear):
    """y = (x_S + mix x_rest) up^T + bias; ``mix`` (R, I - R), ``up`` (O, R), optional ``bias`` (O,).

    ``order`` (I,) is a buffer of integers: a permutation of the inputs, the pivots S first.
    """

    config: PivotedLowRank
    finite_fan_in = ("up",)
    finite_fan_out = ("mix",)
    tensor_parallel: ClassVar = {"mix": 0, "up": 1}
    order: Tensor

    def create(self, **kw: Any) -> None:
        rank, inputs = self.config.rank, self.in_features
        self.register_buffer("order", torch.empty(inputs, dtype=torch.int32, device=kw.get("device")))
        self.mix = nn.Parameter(torch.empty(rank, inputs - rank, **kw))
        self.up = nn.Parameter(torch.empty(self.out_features, rank, **kw))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Spread pivots evenly; draw ``mix`` with variance 1 / I and ``up`` for outputs of unit variance; zero bias."""
        rank, inputs = self.config.rank, self.in_features
        pivots = torch.arange(rank, device=self.order.device) * inputs // rank
        rest = torch.ones(inputs, dtype=torch.bool, device=self.order.device)
        rest[pivots] = False
        if not self.order.is_meta:
            self.order.copy_(torch.cat((pivots, rest.nonzero().flatten())))
        nn.init.normal_(self.mix, std=1 / math.sqrt(inputs))
        nn.init.normal_(self.up, std=1 / math.sqrt(rank * (2 - rank / inputs)))
        self.zero_bias_()

    def forward(self, x: Tensor) -> Tensor:
        dense = _DENSE_LIMITS.product(self, x)
        return pivoted_low_rank(x, self.order, self.mix, self.up, self.bias) if dense is None else dense

    def dense_chain(self) -> tuple[Tensor, ...]:
        identity = torch.eye(self.config.rank, dtype=self.mix.dtype, device=self.mix.device)
        return torch.cat((identity, self.mix), 1)[:, self.order.argsort()], self.up

    def set_factors_(self, down: Tensor, up: Tensor) -> None:
        for parameter, factor in zip((self.order, self.mix, self.up), pivoted_factors(down, up), strict=True):
            parameter.copy_(factor)

    def param_roles(self) -> dict[str, ParamRole]:
        """Return roles in which the fan-in of ``mix`` is the number of inputs minus the R pivots."""
        roles = super().param_roles()
        return roles | {"mix": roles["mix"]._replace(fan_in_offset=self.config.rank)}

    def problem_with_values(self, values: Mapping[str, Tensor]) -> str | None:
        order = values.get("order")
        if not isinstance(order, Tensor) or order.is_meta or order.shape != self.order.shape:
            return None
        indices = torch.arange(self.in_features, device=order.device)
        if torch.equal(order.sort().values.to(indices), indices):
            return None
        return f"order must name each of the {self.in_features:,} inputs once, and does not"

    def flops_per_token(self) -> int:
        return 2 * self.config.rank * (self.in_features + self.out_features - self.config.rank)


@register
class PivotedLowRank(RankConfig):
    """Replace a linear layer by two thin matrices, the first with an identity that is neither stored nor computed.

    It represents the same maps as ``LowRank`` of this rank with R^2 fewer parameters: R (I + O - R), which is less than
    the dense matrix has at every rank that is not full.

    Args:
        rank: R, the width of the bottleneck; at most min(in_features, out_features).

    Examples:
        >>> layer = relinear.PivotedLowRank(rank=8).build(64, 32)
        >>> layer(torch.randn(2, 64)).shape
        torch.Size([2, 32])
    """

    kind = "pivoted_low_rank"
    module_class = PivotedLowRankLinear

    def candidates(self, in_features: int, out_features: int) -> list[OperatorConfig]:
        """Return ranks that are not full."""
        return self.ranks_below(min(in_features, out_features), in_features, out_features)
