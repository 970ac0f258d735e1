"""Low-rank linear layers, products of two thin matrices: the baseline for the other operators."""

# Legend: I in_features, O out_features, R rank

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.contract.config import Count, check_fits, register
from relinear.contract.linear_layers import dense_weight, linear_features
from relinear.contract.operator import Operator, OperatorConfig
from relinear.functional.low_rank import low_rank, low_rank_factors, weighted_spectrum
from relinear.kernels.dense import DenseLimits

#: sizes up to which one dense product is faster than two thin ones, in inference only
_DENSE_LIMITS = DenseLimits({torch.float32: ((8, 256),), torch.bfloat16: ((8, 512), (math.inf, 256))})

#: step between the ranks of ``candidates``; smaller only in layers narrower than 16 times this
RANK_STEP = 8


class RankLinear(Operator):
    """Base of layers that are a product of two thin matrices, which can be fitted to a weight exactly by an SVD."""

    config: RankConfig

    def set_factors_(self, down: Tensor, up: Tensor) -> None:
        """Copy ``down`` (R, I) and ``up`` (O, R) into the layer's factors; dtypes may differ."""
        raise NotImplementedError(f"{type(self).__name__} does not implement set_factors_")

    def to_dense(self) -> Tensor:
        down, up = self.dense_chain()
        return up @ down

    def fit_to_weight_(self, weight: Tensor) -> None:
        """Set the factors to the weight's truncated SVD: the best fit of this rank in the Frobenius norm."""
        self.set_factors_(*low_rank_factors(weight, self.config.rank))

    def fit_to_statistics_(self, weight: Tensor, statistics: CalibrationStatistics, steps: int) -> None:
        """Set the factors to the exact solution G^(-1/2) [G^(1/2) W A^(1/2)]_R A^(-1/2); ``steps`` is ignored."""
        spectrum = weighted_spectrum(weight, statistics.input_moment, statistics.gradient_moment)
        self.set_factors_(*spectrum.factors(weight, self.config.rank))


class LowRankLinear(RankLinear):
    """y = (x down^T) up^T + bias; parameters ``down`` (R, I), ``up`` (O, R), optional ``bias`` (O,)."""

    config: LowRank
    finite_fan_in = ("up",)
    finite_fan_out = ("down",)
    tensor_parallel: ClassVar = {"down": 0, "up": 1}

    def create(self, **kw: Any) -> None:
        self.down = nn.Parameter(torch.empty(self.config.rank, self.in_features, **kw))
        self.up = nn.Parameter(torch.empty(self.out_features, self.config.rank, **kw))

    def reset_parameters(self) -> None:
        """Draw both factors with variance 1 / fan-in: unit-variance inputs give unit-variance outputs; zero bias."""
        nn.init.normal_(self.down, std=1 / math.sqrt(self.in_features))
        nn.init.normal_(self.up, std=1 / math.sqrt(self.config.rank))
        self.zero_bias_()

    def forward(self, x: Tensor) -> Tensor:
        dense = _DENSE_LIMITS.product(self, x)
        return low_rank(x, self.down, self.up, self.bias) if dense is None else dense

    def dense_chain(self) -> tuple[Tensor, ...]:
        return self.down, self.up

    def set_factors_(self, down: Tensor, up: Tensor) -> None:
        self.down.copy_(down)
        self.up.copy_(up)

    def flops_per_token(self) -> int:
        return 2 * self.config.rank * (self.in_features + self.out_features)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankConfig(OperatorConfig):
    """Base of the settings of ``RankLinear`` layers, with one rank."""

    rank: Count = 64

    def check_shape(self, in_features: int, out_features: int) -> None:
        check_fits("rank", self.rank, in_features, out_features)

    def scaled(self, in_features: int, out_features: int, ratio: float) -> Self:
        rank = max(1, min(round(self.rank * ratio), in_features, out_features))
        return self.replace(rank=rank)

    def ranks_below(self, rank: int, in_features: int, out_features: int) -> list[OperatorConfig]:
        """Return multiples of ``RANK_STEP`` (finer in small layers) below ``rank``."""
        step = max(1, min(RANK_STEP, min(in_features, out_features) // 16))
        return [self.replace(rank=r) for r in range(step, rank, step)]

    def candidate_errors(
        self, linear: nn.Module, statistics: CalibrationStatistics, configs: Sequence[OperatorConfig] | None = None
    ) -> list[tuple[OperatorConfig, float]]:
        """Return candidates with their errors, from one decomposition."""
        weight = dense_weight(linear).detach()
        energies = weighted_spectrum(weight, statistics.input_moment, statistics.gradient_moment).energies
        errors = energies.flip(0).cumsum(0).flip(0).tolist()
        configs = self.candidates(*linear_features(linear)) if configs is None else configs
        return [(config, errors[config.rank]) for config in configs]  # type: ignore[attr-defined]


@register
class LowRank(RankConfig):
    """Replace a linear layer by a product of two thin matrices.

    Args:
        rank: R, the width of the bottleneck; at most min(in_features, out_features).

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> report = relinear.replace_(model, {"q_proj": relinear.LowRank(rank=8)})
        >>> model.get_submodule("model.layers.0.self_attn.q_proj").config
        LowRank(rank=8)
    """

    kind = "low_rank"
    module_class = LowRankLinear

    def candidates(self, in_features: int, out_features: int) -> list[OperatorConfig]:
        """Return ranks that save parameters."""
        too_large = -(-in_features * out_features // (in_features + out_features))  # saves no parameters
        return self.ranks_below(too_large, in_features, out_features)
