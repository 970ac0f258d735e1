"""A block-diagonal matrix beside one of low rank: what the map of HDPL (arXiv 2602.07070) is without its latent noise.

W = diag(D_1, ..., D_K) + U V. Fitted by turns, each in closed form: a truncated SVD of what the blocks leave, then the
blocks of what the SVD leaves. The error falls with every turn, as in Zhou and Tao (2011), "GoDec".
"""

# Legend: I in_features, O out_features, K blocks, R rank

from __future__ import annotations

import torch
from torch import Tensor

from relinear import register
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear_examples.structured import BlockedConfig, StructuredLinear, low_rank_under, with_low_rank

__all__ = ["BlockLowRank", "BlockLowRankLinear"]


class BlockLowRankLinear(StructuredLinear):
    """y = diag(D_1, ..., D_K) x + U V x + bias.

    Parameters ``blocks`` D (K, O/K, I/K), ``down`` V (R, I), ``up`` U (O, R).
    """

    finite_fan_in = ("up",)
    finite_fan_out = ("down",)

    def tensors(self):
        k, rank, inputs, outputs = self.config.blocks, self.config.rank, self.in_features, self.out_features
        half = 0.5**0.5  # of the variance comes from either
        return {
            "blocks": ((k, outputs // k, inputs // k), half * (k / inputs) ** 0.5),
            "down": ((rank, inputs), inputs**-0.5),
            "up": ((outputs, rank), half * rank**-0.5),
        }

    def product(self, x: Tensor) -> Tensor:
        grouped = x.unflatten(-1, (self.config.blocks, -1))
        local = torch.einsum("...ki,koi->...ko", grouped, self.blocks).flatten(-2)
        return local + torch.nn.functional.linear(torch.nn.functional.linear(x, self.down), self.up)

    def to_dense(self) -> Tensor:
        return torch.block_diag(*self.blocks) + self.up @ self.down

    def fit(self, weight: Tensor) -> dict[str, Tensor]:
        def diagonal(matrix: Tensor) -> Tensor:  # (K, O/K, I/K)
            tiles = matrix.unflatten(0, (self.config.blocks, -1)).unflatten(2, (self.config.blocks, -1))
            return tiles.diagonal(dim1=0, dim2=2).permute(2, 0, 1)

        rest, down, up = with_low_rank(weight, self.config.rank, lambda matrix: torch.block_diag(*diagonal(matrix)))
        return {"blocks": diagonal(rest), "down": down, "up": up}

    def begin(self, weight: Tensor, statistics: CalibrationStatistics) -> dict[str, Tensor]:
        """The best matrix of low rank alone: the descent can only gain on it."""
        down, up = low_rank_under(weight, self.config.rank, statistics)
        return {"down": down, "up": up, "blocks": torch.zeros_like(self.blocks)}

    def flops_per_token(self) -> int:
        return 2 * (self.blocks.numel() + self.down.numel() + self.up.numel())


@register
class BlockLowRank(BlockedConfig):
    """A block-diagonal matrix beside one of low rank. O I / K + R (O + I) parameters.

    Args:
        rank: R of the second; at most min(in_features, out_features).
        blocks: K of the first, which divides both sizes.
    """

    kind = "block_low_rank"
    module_class = BlockLowRankLinear
