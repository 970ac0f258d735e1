"""A full-width sigmoid gate on a projection's output: the reference form."""

# Legend: I in_features, O out_features

import torch
from torch import Tensor


def output_gate(z: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """z * sigmoid(W_g x), the gate of Qiu et al. (2025, Eq. 5) on any projection.

    Args:
        z: (..., O), the projection's output.
        x: (..., I), its input.
        gate: W_g (O, I).

    Returns:
        (..., O) in z's dtype; the sigmoid and the product are taken in float32.
    """
    return (z * gate_of(x, gate)).to(z.dtype)


def gate_of(x: Tensor, gate: Tensor) -> Tensor:
    """sigmoid(W_g x) for x (..., I) and W_g (O, I), (..., O) in float32 at least."""
    logits = torch.nn.functional.linear(x, gate)
    return torch.sigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
