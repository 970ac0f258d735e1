"""Contextual modulators, the fast form: the gates of ``functional.transponder`` with alpha folded into B. Only the
output and u = A x are kept for the backward pass, and the gates are computed there again: since the output y is z
times its gates, the gradients need grad * y and grad * gates, and never z itself."""

# Legend: N tokens (all leading dimensions), I in_features, O out_features, R rank

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from relinear.kernels.autocast import lowered
from relinear.kernels.choice import prefers_triton
from relinear.kernels.chunks import row_chunks
from relinear.kernels.pointwise import compiled, fuses_pointwise
from relinear.kernels.weight_gradient import weight_gradient

__all__ = ["modulate", "modulated_linear"]

Alpha = Tensor | float

#: up to this rank the product with B is unrolled into the pointwise kernel; beyond it a matrix product is cheaper
UNROLLED_RANK = 16
#: size of the outputs whose gradients are computed at a time
PORTION_BYTES = 11 << 19


def _logits(hidden: Tensor, up: Tensor) -> Tensor:
    """hidden (N, R) times up (R, O), as R fused multiply-adds which a compiler keeps in registers."""
    total = hidden[:, :1] * up[0]
    for k in range(1, up.shape[0]):
        total = total + hidden[:, k : k + 1] * up[k]
    return total


def _gated(z: Tensor, half: Tensor, twice: Tensor) -> Tensor:
    """z (N, O) times both gates, of which half the channel gate (N, O) and twice the scalar gate (N, 1) are given."""
    return (z * (half * twice)).to(z.dtype)


def _gated_backward(y: Tensor, grad: Tensor, half: Tensor, twice: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of z and of the channel gate's logits (N, O), both in y's dtype, and the sum (N, 1) of grad y.

    A gate g = 2 sigmoid(l) has dg/dl = g (1 - g / 2).
    """
    product = grad.to(half.dtype) * y
    to_z, to_logits = grad * (half * twice), product * (1 - half)
    return to_z.to(y.dtype), to_logits.to(y.dtype), product.sum(-1, keepdim=True)


def _unrolled(z: Tensor, hidden: Tensor, up: Tensor, twice: Tensor) -> Tensor:
    return _gated(z, torch.sigmoid(_logits(hidden, up)), twice)


def _unrolled_(z: Tensor, hidden: Tensor, up: Tensor, twice: Tensor) -> Tensor:
    return z.copy_(_unrolled(z, hidden, up, twice))


def _unrolled_backward(y: Tensor, grad: Tensor, hidden: Tensor, up: Tensor, twice: Tensor) -> tuple[Tensor, ...]:
    return _gated_backward(y, grad, torch.sigmoid(_logits(hidden, up)), twice)


def _forward(z: Tensor, hidden: Tensor, channel: Tensor | None, twice: Tensor, in_place: bool) -> Tensor:
    """The gated output; twice (N, 1) is 2 times the scalar gate. ``in_place``: z is not needed any more."""
    if channel is None:
        return (z * (0.5 * twice)).to(z.dtype)
    if torch.compiler.is_compiling():
        return _gated(z, torch.sigmoid(hidden @ channel.T), twice)
    if channel.shape[1] <= UNROLLED_RANK and fuses_pointwise(z):
        in_place &= z.itemsize > 2  # writing to the input is faster in single precision alone
        return compiled(_unrolled_ if in_place else _unrolled)(z, hidden, channel.T.contiguous(), twice)
    out = z if in_place else torch.empty_like(z)
    for rows in row_chunks(z):
        gate = (hidden[rows] @ channel.T).sigmoid_().mul_(twice[rows])
        torch.mul(gate, z[rows], out=out[rows])
    return out


def _backward(
    grad: Tensor, y: Tensor, hidden: Tensor, channel: Tensor | None, twice: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Gradients of z (N, O), of phi through the channel gate (N, R), of B (O, R); the sum (N, 1) of grad y."""
    if channel is None:
        return (grad * (0.5 * twice)).to(y.dtype), None, None, (grad.to(twice.dtype) * y).sum(-1, keepdim=True)
    if channel.shape[1] <= UNROLLED_RANK and fuses_pointwise(y):
        to_z, to_logits, total = compiled(_unrolled_backward)(y, grad, hidden, channel.T.contiguous(), twice)
    else:
        to_z, to_logits, total = _gated_backward(y, grad, torch.sigmoid(hidden @ channel.T), twice)
    # one product a gradient, in the dtype of y: its sums are exact enough, and the matrix is read once
    to_hidden = (to_logits @ channel.to(to_logits.dtype)).to(hidden.dtype)
    return to_z, to_hidden, weight_gradient(to_logits, hidden.to(to_logits.dtype)).to(channel.dtype), total


def _twice(hidden: Tensor, scalar: Tensor | None) -> Tensor:
    """Twice the scalar gate (N, 1), or 2 without one: the other factor 2 that the channel gate has."""
    if scalar is None:
        return hidden.new_full((hidden.shape[0], 1), 2.0)
    return (hidden @ scalar.T).sigmoid_().mul_(4)


def _gradients(
    receive: Callable[[slice, Tensor], None],
    grad: Tensor,
    y: Tensor,
    u: Tensor,
    channel: Tensor | None,
    scalar: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of u (N, R) and of both products with B; that of z goes to ``receive``, some rows at a time."""
    hidden = torch.sigmoid(u.to(torch.promote_types(u.dtype, torch.float32)))
    twice = _twice(hidden, scalar)
    whole = torch.compiler.is_compiling()
    to_hidden, total = torch.zeros_like(hidden), torch.zeros_like(twice)
    to_channel = None if channel is None else torch.zeros_like(channel)
    to_scalar = None

    def add(rows: slice) -> None:  # a function, so that nothing of one portion is alive during the next
        to_z, part_hidden, part_channel, total[rows] = _backward(
            grad[rows], y[rows], hidden[rows], channel, twice[rows]
        )
        if part_hidden is not None and part_channel is not None and to_channel is not None:
            to_hidden[rows] = part_hidden
            to_channel.add_(part_channel)
        receive(rows, to_z)

    for rows in [slice(None)] if whole else row_chunks(y, PORTION_BYTES):
        add(rows)
    if scalar is not None:
        logits = total * (1 - twice / 4)
        to_hidden.addmm_(logits, scalar)
        to_scalar = logits.T @ hidden
    return (to_hidden * hidden * (1 - hidden)).to(u.dtype), to_channel, to_scalar


class _Modulate(torch.autograd.Function):
    """z (N, O) times the gates of u (N, R); channel (O, R) and scalar (1, R) hold alpha B."""

    @staticmethod
    def forward(ctx, z, u, channel, scalar):
        y = _modulated(z, u, channel, scalar, in_place=False)
        ctx.save_for_backward(y, u, channel, scalar)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        to_z: list[Tensor] = []
        rest = _gradients(lambda rows, part: to_z.append(part), grad, *ctx.saved_tensors)
        return torch.cat(to_z), *rest


class _ModulatedLinear(torch.autograd.Function):
    """The same with z = weight x + bias and u = down x inside: z is overwritten, and its gradient never held whole."""

    @staticmethod
    def forward(ctx, x, weight, bias, down, channel, scalar):
        u = torch.nn.functional.linear(x, down)
        y = _modulated(torch.nn.functional.linear(x, weight, bias), u, channel, scalar, in_place=True)
        ctx.save_for_backward(x, weight, down, y, u, channel, scalar)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, down, *rest = ctx.saved_tensors
        need = ctx.needs_input_grad
        to_x: list[Tensor] = []
        to_weight: list[Tensor] = []
        to_bias: list[Tensor] = []

        def receive(rows: slice, to_z: Tensor) -> None:
            if need[0] and to_z.shape[0] == x.shape[0]:
                to_x.append(to_z @ weight)
            elif need[0]:
                if not to_x:
                    to_x.append(torch.empty_like(x))
                torch.mm(to_z, weight, out=to_x[0][rows])
            if need[1]:
                to_weight[:] = [weight_gradient(to_z, x[rows], *to_weight)]
            if need[2]:
                to_bias.append(to_z.sum(0))

        to_u, to_channel, to_scalar = _gradients(receive, grad, *rest)
        return (
            to_x[0].addmm_(to_u, down) if need[0] else None,
            to_weight[0] if need[1] else None,
            sum(to_bias) if need[2] else None,
            weight_gradient(to_u, x) if need[3] else None,
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
    folded = [(None if up is None else up.to(wide), alpha) for up, alpha in given]
    return [up if up is None or (isinstance(alpha, float) and alpha == 1) else alpha * up for up, alpha in folded]


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
    rows, weight, bias, down = lowered(x.reshape(-1, x.shape[-1]), weight, bias, down)
    with torch.autocast(x.device.type, enabled=False):
        ups = _ups(rows.dtype, (channel, channel_alpha), (scalar, scalar_alpha))
        if torch.is_grad_enabled():
            return _ModulatedLinear.apply(rows, weight, bias, down, *ups).view(*x.shape[:-1], weight.shape[0])
        z, u = torch.nn.functional.linear(rows, weight, bias), torch.nn.functional.linear(rows, down)
        return _modulated(z, u, ups[0], ups[1], in_place=True).view(*x.shape[:-1], weight.shape[0])
