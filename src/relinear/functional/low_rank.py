"""Low-rank linear maps: the reference form."""

# Legend: I in_features, O out_features, R rank

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["low_rank", "low_rank_factors"]


def low_rank(x: Tensor, down: Tensor, up: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = (x down^T) up^T + bias.

    Args:
        x: (..., I).
        down: (R, I), into the subspace.
        up: (O, R), out of it.
        bias: (O,) or None.
    """
    y = torch.nn.functional.linear(torch.nn.functional.linear(x, down), up)
    return y if bias is None else y + bias


def low_rank_factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best rank-R factors of ``weight`` in the Frobenius norm (Eckart-Young), the scale shared by both.

    Args:
        weight: (O, I).
        rank: R, at most min(O, I).

    Returns:
        down (R, I) and up (O, R) in float64 (float32 where the device has no float64); up @ down is the fit.
    """
    u, s, vh = torch.linalg.svd(weight.detach().double(), full_matrices=False)
    root = s[:rank].sqrt()
    return root[:, None] * vh[:rank], u[:, :rank] * root
