"""Sigmoid gates on all outputs of a projection (reference)."""

import torch
from torch import Tensor

from relinear.functional.upcast import upcast


def gated(z: Tensor, logits: Tensor) -> Tensor:
    """Return z * sigmoid(W_g x): the gate of Qiu et al. (2025, Eq. 5), for any projection.

    Args:
        z: (..., O), the projection's output.
        logits: (..., O), W_g x of its input x.

    Returns:
        (..., O) in z's dtype; the sigmoid and the product are taken in float32.
    """
    return (z * gates(logits)).to(z.dtype)


def gates(logits: Tensor) -> Tensor:
    """Return sigmoid(logits) in float32 at least."""
    return torch.sigmoid(upcast(logits))
