"""Sums of Kronecker products: W = A_1 (x) B_1 + ... + A_R (x) B_R.

Fitted in closed form by Van Loan and Pitsianis (1993), "Approximation with Kronecker products": W is rearranged so that
each Kronecker product is a matrix of rank one, and the best R of them are its truncated SVD. Layers of this form:
Edalati et al. (2021), arXiv 2109.06243; with R > 1, Hameed et al. (2022).
"""

# Legend: I = I1 I2 in_features, O = O1 O2 out_features, R rank

from __future__ import annotations

import torch
from torch import Tensor

from relinear import register
from relinear_examples.structured import RankedConfig, StructuredLinear, factors

__all__ = ["Kronecker", "KroneckerLinear"]


class KroneckerLinear(StructuredLinear):
    """y = sum_r (A_r (x) B_r) x + bias; parameters ``left`` A (R, O1, I1), ``right`` B (R, O2, I2)."""

    growth = 0.5

    def tensors(self):
        rank, (i1, i2), (o1, o2) = self.config.rank, factors(self.in_features, 2), factors(self.out_features, 2)
        return {"left": ((rank, o1, i1), (rank * i1) ** -0.5), "right": ((rank, o2, i2), i2**-0.5)}

    def product(self, x: Tensor) -> Tensor:
        """B on the second index of the inputs, then A on the first."""
        x = x.unflatten(-1, (self.left.shape[2], self.right.shape[2]))
        hidden = torch.einsum("...ij,rqj->...irq", x, self.right)
        return torch.einsum("...irq,rpi->...pq", hidden, self.left).flatten(-2)

    def to_dense(self) -> Tensor:
        dense = torch.einsum("rpi,rqj->pqij", self.left, self.right)
        return dense.reshape(self.out_features, self.in_features)

    def fit(self, weight: Tensor) -> dict[str, Tensor]:
        (_, o1, i1), (_, o2, i2) = self.left.shape, self.right.shape
        rearranged = weight.reshape(o1, o2, i1, i2).transpose(1, 2).reshape(o1 * i1, o2 * i2)
        u, s, vh = torch.linalg.svd(rearranged, full_matrices=False)
        rank = self.config.rank
        root = s[:rank, None].sqrt()
        left, right = (root * u.T[:rank]).unflatten(1, (o1, i1)), (root * vh[:rank]).unflatten(1, (o2, i2))
        return {"left": left, "right": right}

    def flops_per_token(self) -> int:
        (rank, o1, i1), (_, o2, i2) = self.left.shape, self.right.shape
        return 2 * rank * i1 * o2 * (i2 + o1)


@register
class Kronecker(RankedConfig):
    """A sum of Kronecker products of two small matrices each. R (O1 I1 + O2 I2) parameters.

    Args:
        rank: R, the number of products.
    """

    kind = "kronecker"
    module_class = KroneckerLinear

    def full_rank(self, in_features: int, out_features: int) -> int:
        (i1, i2), (o1, o2) = factors(in_features, 2), factors(out_features, 2)
        return min(o1 * i1, o2 * i2)
