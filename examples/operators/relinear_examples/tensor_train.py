"""Tensor trains of order three (Oseledets 2011; as layers, Novikov et al. 2015, arXiv 1509.06569).

W[(p1 p2 p3), (i1 i2 i3)] = sum_a,b G1[p1, i1, a] G2[a, p2, i2, b] G3[b, p3, i3]. Fitted by TT-SVD (Oseledets 2011,
algorithm 1): one truncated SVD for every bond, which is within a factor of sqrt(2) of the closest tensor train.
"""

# Legend: I = I1 I2 I3 in_features, O = O1 O2 O3 out_features, R1 and R2 ranks of the bonds

from __future__ import annotations

import torch
from torch import Tensor

from relinear import register
from relinear.contract import Count
from relinear_examples.structured import RankedConfig, StructuredLinear, factors

__all__ = ["TensorTrain", "TensorTrainLinear"]


def bonds(in_features: int, out_features: int, rank: int | None = None) -> tuple[int, int]:
    """R1 and R2: ``rank``, or what a whole matrix needs where that is less (or ``rank`` is None)."""
    c1, c2, c3 = (i * o for i, o in zip(factors(in_features, 3), factors(out_features, 3), strict=True))
    full = min(c1, c2 * c3), min(c3, c1 * c2)
    return full if rank is None else (min(rank, full[0]), min(rank, full[1]))


class TensorTrainLinear(StructuredLinear):
    """A train of three cores; parameters ``first`` (O1, I1 R1), ``middle`` (R1 O2, I2 R2), ``last`` (R2 O3, I3)."""

    growth = 1 / 3

    def tensors(self):
        (i1, i2, i3), (o1, o2, o3) = factors(self.in_features, 3), factors(self.out_features, 3)
        r1, r2 = bonds(self.in_features, self.out_features, self.config.rank)
        shapes = {"first": (o1, i1 * r1), "middle": (r1 * o2, i2 * r2), "last": (r2 * o3, i3)}
        return {name: (shape, shape[1] ** -0.5) for name, shape in shapes.items()}

    def cores(self) -> tuple[Tensor, Tensor, Tensor]:
        """G1 (O1, I1, R1), G2 (R1, O2, I2, R2), G3 (R2, O3, I3)."""
        r1, r2 = bonds(self.in_features, self.out_features, self.config.rank)
        middle = self.middle.unflatten(0, (r1, -1)).unflatten(2, (-1, r2))
        return self.first.unflatten(1, (-1, r1)), middle, self.last.unflatten(0, (r2, -1))

    def product(self, x: Tensor) -> Tensor:
        first, middle, last = self.cores()
        x = x.unflatten(-1, factors(self.in_features, 3))
        x = torch.einsum("...ijk,brk->...ijbr", x, last)
        x = torch.einsum("...ijbr,aqjb->...iaqr", x, middle)
        return torch.einsum("...iaqr,pia->...pqr", x, first).flatten(-3)

    def to_dense(self) -> Tensor:
        dense = torch.einsum("pia,aqjb,brk->pqrijk", *self.cores())
        return dense.reshape(self.out_features, self.in_features)

    def fit(self, weight: Tensor) -> dict[str, Tensor]:
        (i1, i2, i3), (o1, o2, o3) = factors(self.in_features, 3), factors(self.out_features, 3)
        r1, r2 = bonds(self.in_features, self.out_features, self.config.rank)
        tensor = weight.reshape(o1, o2, o3, i1, i2, i3).permute(0, 3, 1, 4, 2, 5)
        u, s, vh = torch.linalg.svd(tensor.reshape(o1 * i1, -1), full_matrices=False)
        first, rest = u[:, :r1], s[:r1, None] * vh[:r1]
        u, s, vh = torch.linalg.svd(rest.reshape(r1 * o2 * i2, o3 * i3), full_matrices=False)
        middle, last = u[:, :r2], s[:r2, None] * vh[:r2]
        even = last.norm() ** (1 / 3)  # the first two have orthonormal columns
        first, middle, last = first * even, middle * even, last / even**2
        return {
            "first": first.reshape(o1, i1 * r1),
            "middle": middle.reshape(r1 * o2, i2 * r2),
            "last": last.reshape(r2 * o3, i3),
        }

    def flops_per_token(self) -> int:
        (i1, i2, _), (_, o2, o3) = factors(self.in_features, 3), factors(self.out_features, 3)
        return 2 * (i1 * i2 * self.last.numel() + i1 * o3 * self.middle.numel() + o2 * o3 * self.first.numel())


@register
class TensorTrain(RankedConfig):
    """A tensor train of three cores. R O1 I1 + R^2 O2 I2 + R O3 I3 parameters.

    Args:
        rank: R of both bonds; one that needs less for a whole matrix has less.
    """

    kind = "tensor_train"
    module_class = TensorTrainLinear

    rank: Count = 8

    def full_rank(self, in_features: int, out_features: int) -> int:
        return max(bonds(in_features, out_features))
