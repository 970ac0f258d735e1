"""Monarch layers (Dao et al. 2022): two block-diagonal products, permuted so that every input reaches every output."""

# Legend: I in_features, O out_features, K blocks, P = ceil(I / K), S = ceil(O / K), R rank of a sub-block

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from relinear.contract.config import Count, check_fits, register
from relinear.contract.operator import Operator, OperatorConfig
from relinear.functional.monarch import monarch_dense, monarch_factors
from relinear.kernels.dense import DenseLimits
from relinear.kernels.monarch import monarch

_DENSE_LIMITS = DenseLimits({torch.float32: ((8, 1024), (math.inf, 256)), torch.bfloat16: ((math.inf, 1024),)})


class MonarchLinear(Operator):
    """y = permute(left permute(right x)) + bias.

    Parameters: ``right`` (K, K R, P), ``left`` (K, S, K R), optional ``bias`` (O,).
    """

    config: Monarch
    tensor_parallel: ClassVar = {"right": 0, "left": 0}

    def create(self, **kw: Any) -> None:
        k, inputs, outputs = self.config.blocks, self.in_features, self.out_features
        inner = k * self.config.rank_for(inputs, outputs)
        self.right = nn.Parameter(torch.empty(k, inner, -(-inputs // k), **kw))
        self.left = nn.Parameter(torch.empty(k, -(-outputs // k), inner, **kw))

    @property
    def finite_fan_in(self) -> tuple[str, ...]:  # type: ignore[override]
        """Name ``left`` if the settings fix R: it sums over K R features, which otherwise grow with the layer."""
        return () if self.config.rank is None else ("left",)

    @property
    def finite_fan_out(self) -> tuple[str, ...]:  # type: ignore[override]
        """Name ``right`` if the settings fix R: it has K R outputs per block."""
        return () if self.config.rank is None else ("right",)

    def reset_parameters(self) -> None:
        """Draw both factors with variance 1 / fan-in: unit-variance inputs give unit-variance outputs; zero bias."""
        for factor in (self.right, self.left):
            nn.init.normal_(factor, std=1 / math.sqrt(factor.shape[2]))
        self.zero_bias_()

    def forward(self, x: Tensor) -> Tensor:
        dense = _DENSE_LIMITS.product(self, x)
        return monarch(x, self.right, self.left, self.out_features, self.bias) if dense is None else dense

    def to_dense(self) -> Tensor:
        return monarch_dense(self.right, self.left, self.in_features, self.out_features)

    def fit_to_weight_(self, weight: Tensor) -> None:
        """Set the factors to the closest Monarch matrix in the Frobenius norm: a truncated SVD of every sub-block."""
        rank = self.right.shape[1] // self.config.blocks
        right, left = monarch_factors(weight, self.config.blocks, rank)
        self.right.copy_(right)
        self.left.copy_(left)

    def flops_per_token(self) -> int:
        return 2 * (self.right.numel() + self.left.numel())


@register
class Monarch(OperatorConfig):
    """Replace a linear layer by two block-diagonal factors with fixed permutations; R K (I + O) parameters.

    Sizes that ``blocks`` does not divide are padded with zeros inside, as the authors do.

    Args:
        blocks: K, the blocks of each factor, at most min(in_features, out_features).
        rank: R, the rank of the sub-block that a pair of blocks, one of each factor, makes. None takes the authors'
            inner width min(I, O), that is R = min(I, O) / K^2, at least 1. The paper's matrices of size K^2 have R = 1.

    Examples:
        >>> layer = relinear.Monarch(blocks=4).build(64, 32)
        >>> layer(torch.randn(2, 64)).shape
        torch.Size([2, 32])
    """

    kind = "monarch"
    module_class = MonarchLinear

    blocks: Count = 8
    rank: Count | None = None

    def rank_for(self, in_features: int, out_features: int) -> int:
        """Return R for a layer of this size."""
        return self.rank or max(1, min(in_features, out_features) // self.blocks**2)

    def check_shape(self, in_features: int, out_features: int) -> None:
        check_fits("blocks", self.blocks, in_features, out_features)
        largest = -(-min(in_features, out_features) // self.blocks)
        if self.rank_for(in_features, out_features) > largest:
            raise ValueError(
                f"rank={self.rank} exceeds a sub-block's size with blocks={self.blocks}, {in_features=}, "
                f"{out_features=}; choose at most {largest}"
            )

    def scaled(self, in_features: int, out_features: int, ratio: float) -> Monarch:
        # The size is K R (I + O). Steps of R alone are coarse, so K changes a little if that is closer to the target.
        target_size = self.blocks * self.rank_for(in_features, out_features) * ratio
        smaller = min(in_features, out_features)

        def fitted(blocks: int) -> tuple[int, int]:
            return blocks, max(1, min(round(target_size / blocks), -(-smaller // blocks)))

        candidates = [fitted(k) for k in range(max(1, self.blocks // 2), min(2 * self.blocks, smaller) + 1)]
        blocks, rank = min(candidates, key=lambda kr: (abs(kr[0] * kr[1] - target_size), abs(kr[0] - self.blocks)))
        return self.replace(blocks=blocks, rank=rank)
