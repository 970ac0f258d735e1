"""Contextual modulators, the fast form: the same gates as ``functional.transponder``, with alpha folded into B, only z
and u = A x kept for the backward pass, and the gates recomputed there."""

# Legend: N tokens (all leading dimensions), I in_features, O out_features, R rank

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from relinear.kernels.choice import prefers_triton
from relinear.kernels.chunks import row_chunks
from relinear.kernels.pointwise import compiled, fuses_pointwise

__all__ = ["modulate", "modulated_linear"]

Alpha = Tensor | float

#: up to this rank the product with B is unrolled into the pointwise kernel; beyond it a matrix product is cheaper
UNROLLED_RANK = 16


def _logits(hidden: Tensor, up: Tensor) -> Tensor:
    """hidden (N, R) times up (R, O), as R fused multiply-adds which a compiler keeps in registers."""
    total = hidden[:, :1] * up[0]
    for k in range(1, up.shape[0]):
        total = total + hidden[:, k : k + 1] * up[k]
    return total


def _gated(z: Tensor, half: Tensor, twice: Tensor) -> Tensor:
    """z (N, O) times both gates, of which half the channel gate (N, O) and twice the scalar gate (N, 1) are given."""
    return (z * (half * twice)).to(z.dtype)


def _gated_backward(z: Tensor, grad: Tensor, half: Tensor, twice: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of z and of the channel gate's logits (N, O), both in z's dtype, and the sum (N, 1) of grad z gates.

    A gate g = 2 sigmoid(l) has dg/dl = g (1 - g / 2).
    """
    to_z = grad * (half * twice)
    product = to_z * z
    return to_z.to(z.dtype), (product * (1 - half)).to(z.dtype), product.sum(-1, keepdim=True)


def _unrolled(z: Tensor, hidden: Tensor, up: Tensor, twice: Tensor) -> Tensor:
    return _gated(z, torch.sigmoid(_logits(hidden, up)), twice)


def _unrolled_backward(z: Tensor, grad: Tensor, hidden: Tensor, up: Tensor, twice: Tensor) -> tuple[Tensor, ...]:
    return _gated_backward(z, grad, torch.sigmoid(_logits(hidden, up)), twice)


def _forward(z: Tensor, hidden: Tensor, channel: Tensor | None, twice: Tensor) -> Tensor:
    """The gated output; twice (N, 1) is 2 times the scalar gate."""
    if channel is None:
        return (z * (0.5 * twice)).to(z.dtype)
    if torch.compiler.is_compiling():
        return _gated(z, torch.sigmoid(hidden @ channel.T), twice)
    if channel.shape[1] <= UNROLLED_RANK and fuses_pointwise(z):
        return compiled(_unrolled)(z, hidden, channel.T.contiguous(), twice)
    out = torch.empty_like(z)
    for rows in row_chunks(z):
        gate = (hidden[rows] @ channel.T).sigmoid_().mul_(twice[rows])
        torch.mul(gate, z[rows], out=out[rows])
    return out


def _backward(
    grad: Tensor, z: Tensor, hidden: Tensor, channel: Tensor | None, twice: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Gradients of z (N, O), of phi through the channel gate (N, R), of B (O, R); the sum (N, 1) of z grad gates."""
    if channel is None:
        to_z = grad * (0.5 * twice)
        return to_z.to(z.dtype), None, None, (to_z * z).sum(-1, keepdim=True)
    fused = channel.shape[1] <= UNROLLED_RANK and fuses_pointwise(z)
    if fused or torch.compiler.is_compiling():
        if fused:
            to_z, to_logits, total = compiled(_unrolled_backward)(z, grad, hidden, channel.T.contiguous(), twice)
        else:
            to_z, to_logits, total = _gated_backward(z, grad, torch.sigmoid(hidden @ channel.T), twice)
        # one product a gradient, in the dtype of z: its sums are exact enough, and the matrix is read once
        to_hidden = (to_logits @ channel.to(to_logits.dtype)).to(hidden.dtype)
        return to_z, to_hidden, (to_logits.T @ hidden.to(to_logits.dtype)).to(channel.dtype), total
    to_z, to_hidden, to_channel = torch.empty_like(z), torch.empty_like(hidden), torch.zeros_like(channel)
    total = torch.empty_like(twice)
    for rows in row_chunks(z):
        half = (hidden[rows] @ channel.T).sigmoid_()
        product = (half * twice[rows]).mul_(grad[rows])
        to_z[rows] = product
        product.mul_(z[rows])
        torch.sum(product, -1, keepdim=True, out=total[rows])
        product.addcmul_(product, half, value=-1)
        torch.mm(product, channel, out=to_hidden[rows])
        to_channel.addmm_(product.T, hidden[rows])
    return to_z, to_hidden, to_channel, total


def _twice(hidden: Tensor, scalar: Tensor | None) -> Tensor:
    """Twice the scalar gate (N, 1), or 2 without one: the other factor 2 that the channel gate has."""
    if scalar is None:
        return hidden.new_full((hidden.shape[0], 1), 2.0)
    return (hidden @ scalar.T).sigmoid_().mul_(4)


class _Modulate(torch.autograd.Function):
    """z (N, O) times the gates of u (N, R); channel (O, R) and scalar (1, R) hold alpha B. Saves its inputs alone."""

    @staticmethod
    def forward(ctx, z, u, channel, scalar):
        ctx.save_for_backward(z, u, channel, scalar)
        return _modulated(z, u, channel, scalar)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        z, u, channel, scalar = ctx.saved_tensors
        hidden = torch.sigmoid(u.to(torch.promote_types(u.dtype, torch.float32)))
        twice = _twice(hidden, scalar)
        to_z, to_hidden, to_channel, total = _backward(grad, z, hidden, channel, twice)
        to_scalar = None
        if scalar is not None:
            logits = total * (1 - twice / 4)
            to_hidden = logits * scalar if to_hidden is None else to_hidden.addmm_(logits, scalar)
            to_scalar = logits.T @ hidden
        assert to_hidden is not None
        return to_z, (to_hidden * hidden * (1 - hidden)).to(u.dtype), to_channel, to_scalar


def _modulated(z: Tensor, u: Tensor, channel: Tensor | None, scalar: Tensor | None) -> Tensor:
    hidden = torch.sigmoid(u.to(torch.promote_types(u.dtype, torch.float32)))
    return _forward(z, hidden, channel, _twice(hidden, scalar))


def modulate(
    z: Tensor,
    x: Tensor,
    down: Tensor,
    channel: Tensor | None,
    scalar: Tensor | None,
    channel_alpha: Alpha = 1.0,
    scalar_alpha: Alpha = 1.0,
) -> Tensor:
    """z times its channel and scalar gates: ``functional.transponder.modulate``, faster (see there for the arguments).

    The logits are alpha (B phi) there and (alpha B) phi here; otherwise both compute the same, with gates in float32.
    """
    wide = torch.promote_types(z.dtype, torch.float32)
    u = torch.nn.functional.linear(x, down)
    # Autocast would take the gates to half precision; it has done its work on z and u.
    with torch.autocast(z.device.type, enabled=False):
        ups = [
            None if up is None else alpha * up.to(wide)
            for up, alpha in ((channel, channel_alpha), (scalar, scalar_alpha))
        ]
        run = _Modulate.apply if torch.is_grad_enabled() else _modulated
        out = run(z.reshape(-1, z.shape[-1]), u.reshape(-1, u.shape[-1]), *ups)
    return out.reshape(z.shape)


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
    """``functional.transponder.modulated_linear``: on a GPU one kernel, the gates in the product's epilogue."""
    if prefers_triton(x, weight, bias, down, channel, scalar):
        from relinear.kernels.triton import transponder

        return transponder.modulated_linear(x, weight, bias, down, channel, scalar, channel_alpha, scalar_alpha)
    z = torch.nn.functional.linear(x, weight, bias)
    return modulate(z, x, down, channel, scalar, channel_alpha, scalar_alpha)
