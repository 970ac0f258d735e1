"""Contextual modulators, the fast form: the same gates as ``functional.transponder``, with alpha folded into B, only z
and u = A x kept for the backward pass, and the gates recomputed there."""

# Legend: N tokens (all leading dimensions), I in_features, O out_features, R rank

from __future__ import annotations

from typing import Any

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


def _unrolled_(z: Tensor, hidden: Tensor, up: Tensor, twice: Tensor) -> Tensor:
    return z.copy_(_unrolled(z, hidden, up, twice))


def _forward(z: Tensor, hidden: Tensor, channel: Tensor | None, twice: Tensor, in_place: bool) -> Tensor:
    """The gated output; twice (N, 1) is 2 times the scalar gate. ``in_place``: z is not needed any more."""
    if channel is None:
        return (z * (0.5 * twice)).to(z.dtype)
    if torch.compiler.is_compiling():
        return _gated(z, torch.sigmoid(hidden @ channel.T), twice)
    if channel.shape[1] <= UNROLLED_RANK and fuses_pointwise(z):
        return compiled(_unrolled_ if in_place else _unrolled)(z, hidden, channel.T.contiguous(), twice)
    out = z if in_place else torch.empty_like(z)
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


def _gradients(grad: Tensor, z: Tensor, u: Tensor, channel: Tensor | None, scalar: Tensor | None) -> tuple:
    """Gradients of z (N, O), of u (N, R) and of both products with B."""
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


class _Modulate(torch.autograd.Function):
    """z (N, O) times the gates of u (N, R); channel (O, R) and scalar (1, R) hold alpha B. Saves its inputs alone."""

    @staticmethod
    def forward(ctx, z, u, channel, scalar):
        ctx.save_for_backward(z, u, channel, scalar)
        return _modulated(z, u, channel, scalar, in_place=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _gradients(grad, *ctx.saved_tensors)


class _ModulatedLinear(torch.autograd.Function):
    """The same with z = weight x + bias and u = down x inside, so that both gradients of x are summed in a product."""

    @staticmethod
    def forward(ctx, x, weight, bias, down, channel, scalar):
        z, u = torch.nn.functional.linear(x, weight, bias), x @ down.T
        ctx.save_for_backward(x, weight, down, z, u, channel, scalar)
        return _modulated(z, u, channel, scalar, in_place=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, down, *rest = ctx.saved_tensors
        need = ctx.needs_input_grad
        to_z, to_u, to_channel, to_scalar = _gradients(grad, *rest)
        return (
            (to_z @ weight).addmm_(to_u, down) if need[0] else None,
            to_z.T @ x if need[1] else None,
            to_z.sum(0) if need[2] else None,
            to_u.T @ x if need[3] else None,
            to_channel,
            to_scalar,
        )


def _modulated(z: Tensor, u: Tensor, channel: Tensor | None, scalar: Tensor | None, in_place: bool) -> Tensor:
    hidden = torch.sigmoid(u.to(torch.promote_types(u.dtype, torch.float32)))
    return _forward(z, hidden, channel, _twice(hidden, scalar), in_place)


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
    u = torch.nn.functional.linear(x, down)
    # Autocast would take the gates to half precision; it has done its work on z and u.
    with torch.autocast(z.device.type, enabled=False):
        ups = _ups(z.dtype, (channel, channel_alpha), (scalar, scalar_alpha))
        z_rows, u_rows = z.reshape(-1, z.shape[-1]), u.reshape(-1, u.shape[-1])
        return _Modulate.apply(z_rows, u_rows, *ups).view(z.shape)


def _ups(dtype: torch.dtype, *given: tuple[Tensor | None, Alpha]) -> list[Tensor | None]:
    wide = torch.promote_types(dtype, torch.float32)
    return [None if up is None else alpha * up.to(wide) for up, alpha in given]


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
    kind = x.device.type
    tensors: tuple[Any, ...] = (x.reshape(-1, x.shape[-1]), weight, bias, down)
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        tensors = tuple(None if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)
    with torch.autocast(kind, enabled=False):
        rows, weight, bias, down = tensors
        ups = _ups(rows.dtype, (channel, channel_alpha), (scalar, scalar_alpha))
        if torch.is_grad_enabled():
            return _ModulatedLinear.apply(rows, weight, bias, down, *ups).view(*x.shape[:-1], weight.shape[0])
        z = torch.nn.functional.linear(rows, weight, bias)
        return _modulated(z, rows @ down.T, ups[0], ups[1], in_place=True).view(*x.shape[:-1], weight.shape[0])
