"""Butterfly matrices (Dao et al. 2019, arXiv 1903.05895): log2 N sparse factors, each of 2 x 2 matrices.

Factor l mixes the pairs of coordinates whose numbers differ in bit l. Fitted factor by factor (Zheng, Riccietti and
Gribonval 2021, arXiv 2110.01230): rows with one value of bit 0 meet columns that differ in it alone in a matrix of rank
one. Its truncated SVD gives the first factor, and what is left is a butterfly matrix of half the size for either
value of the bit. What is a butterfly matrix is found exactly.
"""

# Legend: I in_features, O out_features, N the power of two from max(I, O) on, L = log2 N

from __future__ import annotations

import torch
from torch import Tensor

from relinear import OperatorConfig, register
from relinear_examples.structured import StructuredLinear

__all__ = ["Butterfly", "ButterflyLinear"]


class ButterflyLinear(StructuredLinear):
    """y = F_(L-1) ... F_0 x + bias, padded to N; parameter ``twiddles`` (L, N/2, 2, 2).

    Matrix a S + c of factor l, with S = 2^l, mixes the coordinates 2 a S + c and 2 a S + S + c.
    """

    finite_fan_in = ("twiddles",)
    finite_fan_out = ("twiddles",)

    def tensors(self):
        levels = max(1, (max(self.in_features, self.out_features) - 1).bit_length())
        share = self.in_features / 2**levels  # of the padded inputs that are there
        return {"twiddles": ((levels, 2 ** (levels - 1), 2, 2), 0.5**0.5 * share ** (-0.5 / levels))}

    def product(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x, (0, 2 * self.twiddles.shape[1] - self.in_features))
        for level, twiddles in enumerate(self.twiddles):
            pairs = x.unflatten(-1, (-1, 2, 2**level))
            x = torch.einsum("...aqc,acpq->...apc", pairs, twiddles.unflatten(0, (-1, 2**level))).flatten(-3)
        return x[..., : self.out_features]

    def gains_by_composing(self, x: Tensor) -> bool:
        """Each factor is a pass through memory with little to compute: slower than its FLOPs say."""
        return x.numel() > 4 * self.in_features**2

    def to_dense(self) -> Tensor:
        eye = torch.eye(self.in_features, dtype=self.twiddles.dtype, device=self.twiddles.device)
        return self.product(eye).T

    def fit(self, weight: Tensor) -> dict[str, Tensor]:
        levels, half = self.twiddles.shape[:2]
        padding = (0, 2 * half - self.in_features, 0, 2 * half - self.out_features)
        rest = torch.nn.functional.pad(weight, padding)[None]  # (S, N/S, N/S): one for every value of the lower bits
        factors: list[Tensor] = []
        while len(factors) < levels:
            tiles = rest.unflatten(1, (-1, 2)).unflatten(3, (-1, 2)).permute(2, 0, 3, 1, 4)  # (2, S, N/2S, N/2S, 2)
            u, s, vh = torch.linalg.svd(tiles, full_matrices=False)
            factors.append(vh[..., 0, :].permute(2, 1, 0, 3).reshape(half, 2, 2))  # a, c, p, q
            rest = (u[..., 0] * s[..., :1]).transpose(2, 3).flatten(0, 1)  # the bit is the highest of the lower ones
        factors[-1] = factors[-1] * rest.view(2, half).T[..., None]
        norms = torch.stack([factor.norm() for factor in factors])
        even = norms.log().mean().exp()
        return {"twiddles": torch.stack([f * even / norm for f, norm in zip(factors, norms, strict=True)])}

    def flops_per_token(self) -> int:
        return 2 * self.twiddles.numel()


@register
class Butterfly(OperatorConfig):
    """A butterfly matrix. 2 N log2 N parameters, whatever is set: there is nothing to set."""

    kind = "butterfly"
    module_class = ButterflyLinear
