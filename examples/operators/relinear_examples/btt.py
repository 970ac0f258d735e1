"""Block tensor trains of two cores (Qiu et al. 2024, "Compute better spent", arXiv 2406.06248).

Outputs and inputs have two indices each. For every pair of the second output index and the first input index the matrix
in the two others has rank R; with R = 1 this is a Monarch matrix. So the closest one is a truncated SVD of every such
matrix. As in the paper, each core starts, and is trained, by its own fan-in.
"""

# Legend: I = I1 I2 in_features, O = O1 O2 out_features, R rank

from __future__ import annotations

import torch
from torch import Tensor

from relinear import register
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear_examples.structured import RankedConfig, StructuredLinear, factors

__all__ = ["BTT", "BTTLinear"]


def roots(statistics: Tensor) -> tuple[Tensor, Tensor]:
    """Square roots of symmetric matrices (..., N, N), a little above singular, and their inverses."""
    values, vectors = torch.linalg.eigh(statistics)
    root = (values.clamp_min(0) + 1e-6 * values.mean(-1, keepdim=True) + 1e-30).sqrt()[..., None, :]
    return (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT


class BTTLinear(StructuredLinear):
    """y[p, q] = sum_i,r second[q, p, (i, r)] sum_j first[i, (q, r), j] x[i, j] + bias.

    Parameters ``first`` (I1, O2 R, I2), ``second`` (O2, O1, I1 R).
    """

    growth = 0.5

    def tensors(self):
        rank, (i1, i2), (o1, o2) = self.config.rank, factors(self.in_features, 2), factors(self.out_features, 2)
        return {"first": ((i1, o2 * rank, i2), i2**-0.5), "second": ((o2, o1, i1 * rank), (i1 * rank) ** -0.5)}

    def product(self, x: Tensor) -> Tensor:
        i1, outputs, i2 = self.first.shape
        o2 = self.second.shape[0]
        hidden = torch.einsum("...ij,ihj->...ih", x.unflatten(-1, (i1, i2)), self.first)
        hidden = hidden.unflatten(-1, (o2, outputs // o2)).transpose(-3, -2).flatten(-2)  # (..., O2, I1 R)
        return torch.einsum("...qh,qph->...pq", hidden, self.second).flatten(-2)

    def to_dense(self) -> Tensor:
        rank = self.config.rank
        first = self.first.unflatten(1, (-1, rank))  # (I1, O2, R, I2)
        second = self.second.unflatten(2, (-1, rank))  # (O2, O1, I1, R)
        return torch.einsum("qpir,iqrj->pqij", second, first).reshape(self.out_features, self.in_features)

    def fit(self, weight: Tensor) -> dict[str, Tensor]:
        return self.begin(weight, CalibrationStatistics.identity(self.in_features))

    def begin(self, weight: Tensor, statistics: CalibrationStatistics) -> dict[str, Tensor]:
        """The best fit under what the moments say within each sub-block: exact where they say nothing between them."""
        (i1, _, i2), (o2, o1, _), rank = self.first.shape, self.second.shape, self.config.rank
        blocks = weight.reshape(o1, o2, i1, i2).permute(1, 2, 0, 3)  # (O2, I1) matrices (O1, I2)
        gradients = statistics.gradient_moment
        outputs = torch.eye(o1 * o2).to(weight) if gradients is None else gradients.to(weight)
        outer = roots(outputs.view(o1, o2, o1, o2).diagonal(dim1=1, dim2=3).permute(2, 0, 1))  # (O2, O1, O1) each
        inner = roots(statistics.input_moment.to(weight).view(i1, i2, i1, i2).diagonal(dim1=0, dim2=2).permute(2, 0, 1))
        u, s, vh = torch.linalg.svd(outer[0][:, None] @ blocks @ inner[0], full_matrices=False)
        root = s[..., :rank].sqrt()
        first = (root[..., None] * vh[..., :rank, :] @ inner[1]).transpose(0, 1).flatten(1, 2)
        second = (outer[1][:, None] @ u[..., :rank] * root[..., None, :]).transpose(1, 2).flatten(2)
        return {"first": first, "second": second}

    def flops_per_token(self) -> int:
        return 2 * (self.first.numel() + self.second.numel())


@register
class BTT(RankedConfig):
    """A block tensor train of two cores. R (O2 I + I1 O) parameters: about 2 R D^(3/2) in a square layer.

    Args:
        rank: R, the rank of every sub-block; 1 is a Monarch matrix.
    """

    kind = "btt"
    module_class = BTTLinear

    def full_rank(self, in_features: int, out_features: int) -> int:
        return min(factors(out_features, 2)[0], factors(in_features, 2)[1])
