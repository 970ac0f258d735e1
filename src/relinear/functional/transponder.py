"""Contextual modulators (reference): gates that scale a projection's output ("From Transformer to Transponder", Eq. 4
and 5)."""

# Legend: I in_features, O out_features, R rank

from collections.abc import Callable

import torch
from torch import Tensor

Alpha = Tensor | float

#: activations phi of a bottleneck by name
PHI: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "none": lambda u: u,
}


def modulator_gate(
    x: Tensor,
    down: Tensor,
    up: Tensor,
    alpha: Alpha = 1.0,
    phi: str = "sigmoid",
    down_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> Tensor:
    """Return 2 sigmoid(alpha (B phi(A x + a) + b)): values in (0, 2), and exactly 1 where B and b are 0.

    Args:
        x: (..., I), the input of the modulated projection.
        down: A (R, I).
        up: B, (O, R) for a channel gate, (1, R) for a scalar gate.
        alpha: curvature of the outer sigmoid, a positive number or a tensor of one element.
        phi: a name in ``PHI``; the paper's example is "sigmoid" (Eq. 4), and its Eq. 9 has none.
        down_bias: a (R,), or None for zero.
        up_bias: b, (O,) or (1,), or None for zero.

    Returns:
        (..., O) or (..., 1), in float32 (float64 for float64 inputs).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    hidden = PHI[phi](torch.nn.functional.linear(x, down, down_bias).to(wide))
    with torch.autocast(x.device.type, enabled=False):  # the gate stays in float32
        offset = None if up_bias is None else up_bias.to(wide)
        return 2 * torch.sigmoid(alpha * torch.nn.functional.linear(hidden, up.to(wide), offset))


def modulate(
    z: Tensor,
    x: Tensor,
    down: Tensor,
    channel: Tensor | None,
    scalar: Tensor | None,
    channel_alpha: Alpha = 1.0,
    scalar_alpha: Alpha = 1.0,
) -> Tensor:
    """Return z times its channel gate times its scalar gate, both computed from x through one shared A.

    Args:
        z: (..., O), the projection's output.
        x: (..., I), the projection's input.
        down: A (R, I), shared by both gates.
        channel: B of the channel gate (O, R), or None to leave it out.
        scalar: B of the scalar gate (1, R), or None to leave it out.
        channel_alpha, scalar_alpha: curvatures, positive, one element each.

    Returns:
        (..., O) in z's dtype; the product is taken in float32, so that gates of exactly 1 return z bit for bit.
    """
    out = z
    if channel is not None:
        out = out * modulator_gate(x, down, channel, channel_alpha)
    if scalar is not None:
        out = out * modulator_gate(x, down, scalar, scalar_alpha)
    return out.to(z.dtype)


def modulated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    channel: Tensor | None,
    scalar: Tensor | None,
    channel_alpha: Alpha = 1.0,
    scalar_alpha: Alpha = 1.0,
) -> Tensor:
    """Return a linear layer and its gates (Eq. 6): ``modulate`` of z = W x + bias.

    Args:
        x: (..., I).
        weight: W (O, I).
        bias: (O,) or None.
        down, channel, scalar, channel_alpha, scalar_alpha: as in ``modulate``.

    Returns:
        (..., O).
    """
    z = torch.nn.functional.linear(x, weight, bias)
    return modulate(z, x, down, channel, scalar, channel_alpha, scalar_alpha)


def modulate_static(z: Tensor, gate_logits: Tensor, alpha: Alpha = 1.0) -> Tensor:
    """Return z times 2 sigmoid(alpha beta): the baseline without context (Table 4), beta = beta_1 beta_2.

    Args:
        z: (..., O).
        gate_logits: beta, (O,) or (1,).
        alpha: positive, one element.
    """
    wide = torch.promote_types(z.dtype, torch.float32)
    return (z * (2 * torch.sigmoid(alpha * gate_logits.to(wide)))).to(z.dtype)
