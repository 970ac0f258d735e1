"""Blocks that share their column and row spaces (BLAST: Lee et al. 2024, arXiv 2410.21262).

Block (i, j) of W is U_i diag(s_ij) V_j: with all s equal to one W is of rank R, with s of its own kind it can be block
diagonal, or block-wise low rank. Fitted from the truncated SVD on, by turns: U, V and s each by least squares given the
other two, so that the error never grows. (The authors descend by preconditioned gradients, their Algorithm 2.)
"""

# Legend: I in_features, O out_features, K blocks a side, R rank; k and l count blocks of outputs and inputs

from __future__ import annotations

import torch
from torch import Tensor

from relinear import register
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear_examples.structured import BlockedConfig, StructuredLinear, low_rank, low_rank_under

__all__ = ["Blast", "BlastLinear"]

_TURNS = 10


def solved(gram: Tensor, target: Tensor) -> Tensor:
    """The solution of ``gram`` x = ``target`` for a Gram matrix that may be singular."""
    ridge = 1e-13 * gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    return torch.linalg.solve(gram + ridge[..., None, None] * torch.eye(gram.shape[-1]).to(gram), target)


class BlastLinear(StructuredLinear):
    """y_k = U_k sum_l s_kl * (V_l x_l) + bias.

    Parameters ``down`` V (K, R, I/K), ``mix`` s (K, K, R), ``up`` U (K, O/K, R).
    """

    finite_fan_in = ("up", "mix")
    finite_fan_out = ("down", "mix")

    def tensors(self):
        k, rank, inputs, outputs = self.config.blocks, self.config.rank, self.in_features, self.out_features
        return {
            "down": ((k, rank, inputs // k), (k / inputs) ** 0.5),
            "mix": ((k, k, rank), k**-0.5),
            "up": ((k, outputs // k, rank), rank**-0.5),
        }

    def product(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("...li,lri->...lr", x.unflatten(-1, (self.config.blocks, -1)), self.down)
        mixed = torch.einsum("...lr,klr->...kr", hidden, self.mix)
        return torch.einsum("...kr,kor->...ko", mixed, self.up).flatten(-2)

    def to_dense(self) -> Tensor:
        dense = torch.einsum("kor,klr,lri->koli", self.up, self.mix, self.down)
        return dense.reshape(self.out_features, self.in_features)

    def fit(self, weight: Tensor) -> dict[str, Tensor]:
        k, rank = self.config.blocks, self.config.rank
        down, up = low_rank(weight, rank)
        down, up, mix = (
            down.unflatten(1, (k, -1)).transpose(0, 1),
            up.unflatten(0, (k, -1)),
            weight.new_ones(k, k, rank),
        )
        rows, columns = weight.unflatten(0, (k, -1)), weight.unflatten(1, (k, -1)).transpose(0, 1)
        tiles = rows.unflatten(2, (k, -1)).transpose(1, 2)  # (K, K, O/K, I/K)
        for _ in range(_TURNS):
            right = torch.einsum("klr,lri->krli", mix, down).flatten(2)  # (K, R, I)
            up = solved(right @ right.mT, right @ rows.mT).mT
            left = torch.einsum("kor,klr->lkor", up, mix).flatten(1, 2)  # (K, O, R)
            down = solved(left.mT @ left, left.mT @ columns)
            gram = (up.mT @ up)[:, None] * (down @ down.mT)[None]  # (K, K, R, R)
            target = torch.einsum("kor,kloi,lri->klr", up, tiles, down)
            mix = solved(gram, target[..., None])[..., 0]
        return {"down": down, "mix": mix, "up": up}

    def begin(self, weight: Tensor, statistics: CalibrationStatistics) -> dict[str, Tensor]:
        """The best matrix of low rank alone, which has all s equal: the descent can only gain on it."""
        down, up = low_rank_under(weight, self.config.rank, statistics)
        k = self.config.blocks
        down, up = down.unflatten(1, (k, -1)).transpose(0, 1), up.unflatten(0, (k, -1))
        return {"down": down, "mix": torch.ones_like(self.mix), "up": up}

    def flops_per_token(self) -> int:
        return 2 * (self.down.numel() + self.mix.numel() + self.up.numel())


@register
class Blast(BlockedConfig):
    """Blocks that share their column and row spaces. R (I + O + K^2) parameters.

    Args:
        rank: R of every block; at most min(in_features, out_features).
        blocks: K, the blocks a side, which divides both sizes.
    """

    kind = "blast"
    module_class = BlastLinear
