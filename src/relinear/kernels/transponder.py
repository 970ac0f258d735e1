"""Contextual modulators, the fast form: the same gates as ``functional.transponder``, with alpha folded into B, only z
and u = A x kept for the backward pass, and the gate recomputed there."""

# Legend: N tokens (all leading dimensions), I in_features, O out_features, R rank

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from relinear.kernels.choice import prefers_triton

__all__ = ["modulate", "modulate_pointwise", "modulated_linear"]

Alpha = Tensor | float

#: up to this rank the product with B is unrolled into the pointwise kernel; beyond it a matrix product is cheaper
UNROLLED_RANK = 16


def _logits(hidden: Tensor, up: Tensor, unrolled: bool) -> Tensor:
    """hidden (N, R) times up^T (R, O); as R fused multiply-adds where a compiler can keep them in registers."""
    if not unrolled:
        return hidden @ up.T
    columns = up.T.contiguous()
    total = hidden[:, :1] * columns[0]
    for k in range(1, columns.shape[0]):
        total = total + hidden[:, k : k + 1] * columns[k]
    return total


def modulate_pointwise(z: Tensor, u: Tensor, channel: Tensor | None, scalar: Tensor | None, unrolled: bool) -> Tensor:
    """z (N, O) times the gates of u (N, R); channel (O, R) and scalar (1, R) hold alpha B.

    Works in place on one buffer of z's size: eager PyTorch pays for every pass through memory.
    """
    wide = torch.promote_types(z.dtype, torch.float32)
    hidden = torch.sigmoid(u.to(wide))
    twice = 2.0 if scalar is None else _logits(hidden, scalar, unrolled).sigmoid_().mul_(2)
    if channel is None:
        return (z * twice).to(z.dtype)
    gate = _logits(hidden, channel, unrolled).sigmoid_()
    if scalar is not None:
        gate.mul_(2)
    return gate.mul_(twice).mul_(z).to(z.dtype)


def _backward(
    grad: Tensor, z: Tensor, u: Tensor, channel: Tensor | None, scalar: Tensor | None, unrolled: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Gradients of z and of both gates' logits (None where the gate is absent), and phi(u), which they multiply.

    A gate g = 2 sigmoid(l) has dg/dl = g (1 - g / 2).
    """
    wide = torch.promote_types(z.dtype, torch.float32)
    hidden = torch.sigmoid(u.to(wide))
    product = z.to(wide) * grad
    to_z = grad.to(wide)
    scalar_gate = None if scalar is None else _logits(hidden, scalar, unrolled).sigmoid_().mul_(2)
    to_scalar = None
    if channel is None:
        gate = None
    else:
        gate = _logits(hidden, channel, unrolled).sigmoid_().mul_(2)
        product = product * gate
        to_z = to_z * gate
    if scalar_gate is not None:
        to_z = to_z * scalar_gate
        to_scalar = product.sum(-1, keepdim=True) * (scalar_gate * (1 - scalar_gate / 2))
        product = product * scalar_gate
    to_channel = None if gate is None else product * (1 - gate / 2)
    return to_z.to(z.dtype), to_channel, to_scalar, hidden


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=True)


def _call(function: Callable, *args, rank: int):
    """Run a pointwise kernel: traced in a compiled model, compiled on its own on request, else eagerly.

    Eager PyTorch makes the product with B a matrix product, as every unrolled term would pass through memory.
    """
    small = rank <= UNROLLED_RANK
    if torch.compiler.is_compiling():
        return function(*args, small)
    if os.environ.get("RELINEAR_COMPILE_KERNELS", "0") == "1":
        return _compiled(function)(*args, small)
    return function(*args, False)


class _Modulate(torch.autograd.Function):
    """``modulate_pointwise`` that saves its inputs alone: 1 + R / O times the size of z, no gate."""

    @staticmethod
    def forward(ctx, z, u, channel, scalar):
        ctx.save_for_backward(z, u, channel, scalar)
        return _call(modulate_pointwise, z, u, channel, scalar, rank=u.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        z, u, channel, scalar = ctx.saved_tensors
        to_z, to_channel, to_scalar, hidden = _call(_backward, grad, z, u, channel, scalar, rank=u.shape[-1])
        to_hidden = torch.zeros_like(hidden)
        grads: list[Tensor | None] = []
        for logits, up in ((to_channel, channel), (to_scalar, scalar)):
            if logits is None:
                grads.append(None)
                continue
            to_hidden = to_hidden + logits @ up
            grads.append(logits.T @ hidden)
        to_u = (to_hidden * hidden * (1 - hidden)).to(u.dtype)
        return to_z, to_u, *grads


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
        out = _Modulate.apply(z.reshape(-1, z.shape[-1]), u.reshape(-1, u.shape[-1]), *ups)
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
