"""What the operators of this package share: tensors of given shapes, a bias, and a rank that is their size."""

# Legend: I in_features, O out_features

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from relinear import LowRank, Operator, OperatorConfig
from relinear.contract import Count
from relinear.contract.calibration_statistics import CalibrationStatistics, fit_by_lbfgs_
from relinear.contract.linear_layers import linear_of

__all__ = [
    "BlockedConfig",
    "RankedConfig",
    "StructuredLinear",
    "factors",
    "low_rank",
    "low_rank_under",
    "with_low_rank",
]


def factors(size: int, count: int) -> tuple[int, ...]:
    """Divide ``size`` into ``count`` whole factors, as equal as its divisors allow."""
    if count == 1:
        return (size,)
    first = max(d for d in range(1, round(size ** (1 / count)) + 1) if size % d == 0)
    return (first, *factors(size // first, count - 1))


def with_low_rank(weight: Tensor, rank: int, nearest: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Fit ``weight`` (O, I) by a matrix of a linear space plus one of low rank, by turns, each of which only gains.

    Args:
        weight: in float64.
        rank: R.
        nearest: gives the matrix (O, I) of that space that is nearest to one.

    Returns:
        What the low rank leaves (O, I), to be projected by ``nearest``; down (R, I) and up (O, R).
    """
    down, up = weight.new_zeros(rank, weight.shape[1]), weight.new_zeros(len(weight), rank)
    for _ in range(10):
        down, up = low_rank(weight - nearest(weight - up @ down), rank)
    return weight - up @ down, down, up


def low_rank_under(weight: Tensor, rank: int, statistics: CalibrationStatistics) -> tuple[Tensor, Tensor]:
    """down (R, I) and up (O, R) of the best matrix of rank R under statistics, which has a closed form."""
    best = LowRank(rank=rank).build(weight.shape[1], weight.shape[0], bias=False, dtype=torch.float64)
    best.fit_to_calibration_(linear_of(weight), statistics)
    return best.down.detach(), best.up.detach()


def low_rank(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """down (R, I) and up (O, R) of the nearest matrix of rank R, by the eigenvectors of the smaller side."""
    if matrix.shape[0] < matrix.shape[1]:
        up, down = low_rank(matrix.T, rank)
        return down.T, up.T
    vectors = torch.linalg.eigh(matrix.T @ matrix).eigenvectors[:, -rank:]
    up = matrix @ vectors
    even = up.norm(dim=0).sqrt().clamp_min(1e-30)  # the scale is shared by both
    return even[:, None] * vectors.T, up / even


class StructuredLinear(Operator):
    """y = W x + bias, with W made of the tensors that a subclass names."""

    #: the power of the model's width with which the sides of the tensors grow
    growth = 1.0

    def tensors(self) -> dict[str, tuple[tuple[int, ...], float]]:
        """Name of each parameter -> its shape (..., fan-out, fan-in), and its standard deviation at the start."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """W x for x (..., I)."""
        raise NotImplementedError

    def fit(self, weight: Tensor) -> dict[str, Tensor]:
        """The tensors, by name, that come nearest to the matrix ``weight`` (O, I), which is in float64."""
        raise NotImplementedError

    def tables(self) -> dict[str, int]:
        """Name of each table of indices, which ``reset_parameters`` draws -> how many it holds."""
        return {}

    def create(self, **kw: Any) -> None:
        for name, length in self.tables().items():
            self.register_buffer(name, torch.empty(length, **kw | {"dtype": torch.int64}))
        for name, (shape, _) in self.tensors().items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **kw)))

    def reset_parameters(self) -> None:
        """Inputs of unit variance give outputs of unit variance; no bias."""
        for name, (_, std) in self.tensors().items():
            nn.init.normal_(self.get_parameter(name), std=std)
        self.zero_bias_()

    def gains_by_composing(self, x: Tensor) -> bool:
        """Whether W made once, like the product for I tokens, and a dense product take fewer FLOPs than the product."""
        own, dense = self.flops_per_token(), 2 * self.in_features * self.out_features
        return x.numel() * (own - dense) > self.in_features**2 * own and self.config.fits_weight

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.to_dense().to(x.dtype)) if self.gains_by_composing(x) else self.product(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)  # autocast gives products half precision

    @torch.no_grad()
    def fit_to_weight_(self, weight: Tensor) -> None:
        if not self.config.fits_weight:
            super().fit_to_weight_(weight)  # raises
        for name, value in self.fit(weight.double()).items():
            self.get_parameter(name).copy_(value)

    def begin(self, weight: Tensor, statistics: CalibrationStatistics) -> dict[str, Tensor]:
        """The tensors from which the descent under statistics starts; by default those of ``fit``."""
        return self.fit(weight)

    @torch.no_grad()
    def fit_to_statistics_(self, weight: Tensor, statistics: CalibrationStatistics, steps: int) -> None:
        for name, value in self.begin(weight.double(), statistics).items():
            self.get_parameter(name).copy_(value)
        fit_by_lbfgs_(self, weight.double(), statistics, steps)

    def param_roles(self):
        roles = super().param_roles()
        return {name: role._replace(growth=self.growth) for name, role in roles.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankedConfig(OperatorConfig):
    """Settings with a rank, in which the number of parameters grows."""

    rank: Count = 4

    def full_rank(self, in_features: int, out_features: int) -> int:
        """The rank with which every matrix of this size can be written."""
        raise NotImplementedError

    def check_shape(self, in_features: int, out_features: int) -> None:
        most = self.full_rank(in_features, out_features)
        if self.rank > most:
            raise ValueError(f"rank={self.rank}: a layer {in_features} -> {out_features} takes at most {most}")

    def scaled(self, in_features: int, out_features: int, ratio: float) -> Self:
        """The rank at which the parameters are nearest to ``ratio`` times as many."""
        count = self._counts(in_features, out_features)
        wanted = ratio * count(self.rank)
        ranks = range(1, self.full_rank(in_features, out_features) + 1)
        above = bisect.bisect_left(ranks, wanted, key=count)
        return self.replace(rank=min(ranks[max(0, above - 1) : above + 1], key=lambda rank: abs(count(rank) - wanted)))

    def candidates(self, in_features: int, out_features: int) -> list[OperatorConfig]:
        """At most eight ranks that save parameters."""
        try:
            count = self._counts(in_features, out_features)
            ranks = range(1, self.full_rank(in_features, out_features) + 1)
            saving = bisect.bisect_left(ranks, in_features * out_features, key=count)
        except ValueError:  # does not fit such a layer at any rank
            return []
        return [self.replace(rank=rank) for rank in sorted({saving * part // 8 for part in range(1, 9)} - {0})]

    def _counts(self, in_features: int, out_features: int) -> Callable[[int], int]:
        """Rank -> parameters of a layer of this size."""

        def count(rank: int) -> int:
            layer = self.replace(rank=rank).build(in_features, out_features, bias=False, device="meta")
            return sum(parameter.numel() for parameter in layer.parameters())

        return count


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockedConfig(RankedConfig):
    """Settings with a rank and blocks, which divide both sides of the matrix."""

    rank: Count = 8
    blocks: Count = 4

    def full_rank(self, in_features: int, out_features: int) -> int:
        return min(in_features, out_features)

    def check_shape(self, in_features: int, out_features: int) -> None:
        super().check_shape(in_features, out_features)
        if in_features % self.blocks or out_features % self.blocks:
            raise ValueError(
                f"blocks={self.blocks} does not divide both sizes of a layer {in_features} -> {out_features}"
            )
