"""Twin of ``functional.transponder``, contextual modulators: its gates with alpha folded into B. Only the
output (or z, where it is given) and u = A x are kept for the backward pass, and the gates are computed there again:
since the output y is z times its gates, the gradients need grad * y and grad * gates, and never z itself."""

# Legend: N tokens (all leading dimensions), I in_features, O out_features, R rank

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from relinear.functional import transponder as reference
from relinear.kernels import forms, native, triton
from relinear.kernels.autograd import as_given, differentiable_as, lowered, save, was_changed, watched
from relinear.kernels.cpu.portions import row_portions
from relinear.kernels.forms import Call, Form, dispatch, is_plain, shape_of, tell

__all__ = ["few_rows", "modulate", "modulated_linear"]

Alpha = Tensor | float

#: portions of rows whose gradients are computed at a time: fewer cost memory, more make small products
BACKWARD_PORTIONS = 6
#: size of a portion at least
SMALLEST_BACKWARD_PORTION = 1 << 22


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


def _modulated(
    z: Tensor, x: Tensor, down: Tensor, channel: Tensor | None, scalar: Tensor | None, in_cpp: bool, in_place: bool
) -> tuple[Tensor, Tensor]:
    """The gated output (N, O) and u = A x (N, R). ``in_place``: z is not needed any more."""
    z = z.contiguous()
    if channel is not None and in_cpp:
        out, u = z if in_place else torch.empty_like(z), z.new_empty(z.shape[0], down.shape[0])
        up = channel.T.contiguous()
        native.kernels().modulate(out, u, z, x.contiguous(), down.contiguous(), up, scalar)
        return out, u
    u = torch.nn.functional.linear(x, down)
    hidden = torch.sigmoid(u.to(torch.promote_types(u.dtype, torch.float32)))
    twice = _twice(hidden, scalar)
    if channel is None:
        return (z * (0.5 * twice)).to(z.dtype), u
    if torch.compiler.is_compiling():
        return _gated(z, torch.sigmoid(hidden @ channel.T), twice), u
    out = z if in_place else torch.empty_like(z)
    for rows in row_portions(z):
        gate = (hidden[rows] @ channel.T).sigmoid_().mul_(twice[rows])
        torch.mul(gate, z[rows], out=out[rows])
    return out, u


def _backward(
    grad: Tensor, y: Tensor, hidden: Tensor, channel: Tensor | None, twice: Tensor, in_cpp: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Gradients of z (N, O), of phi through the channel gate (N, R), of B (O, R); the sum (N, 1) of grad y."""
    if channel is None:
        return (grad * (0.5 * twice)).to(y.dtype), None, None, (grad.to(twice.dtype) * y).sum(-1, keepdim=True)
    if in_cpp:
        to_z, to_hidden, total = torch.empty_like(y), torch.empty_like(hidden), torch.empty_like(twice)
        to_up = torch.zeros_like(channel.T, memory_format=torch.contiguous_format)
        up = channel.T.contiguous()
        native.kernels().modulate_backward(to_z, to_hidden, to_up, total, y, grad.contiguous(), hidden, up, twice)
        return to_z, to_hidden, to_up.T, total
    to_z, to_logits, total = _gated_backward(y, grad, torch.sigmoid(hidden @ channel.T), twice)
    # one product a gradient, in the dtype of y: its sums are exact enough, and the matrix is read once
    to_hidden = (to_logits @ channel.to(to_logits.dtype)).to(hidden.dtype)
    return to_z, to_hidden, (to_logits.T @ hidden.to(to_logits.dtype)).to(channel.dtype), total


def _twice(hidden: Tensor, scalar: Tensor | None) -> Tensor:
    """Twice the scalar gate (N, 1), or 2 without one: the other factor 2 that the channel gate has."""
    if scalar is None:
        return hidden.new_full((hidden.shape[0], 1), 2.0)
    return (hidden @ scalar.T).sigmoid_().mul_(4)


def _gradients(
    receive: Callable[[slice, Tensor], None],
    output: Callable[[slice], Tensor],
    grad: Tensor,
    u: Tensor,
    channel: Tensor | None,
    scalar: Tensor | None,
    in_cpp: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of u (N, R) and of both products with B; that of z goes to ``receive``, some rows at a time.

    They are computed from those rows of the ``output`` y (N, O).
    """
    hidden = torch.sigmoid(u.to(torch.promote_types(u.dtype, torch.float32)))
    twice = _twice(hidden, scalar)
    whole = torch.compiler.is_compiling()
    to_hidden, total = torch.zeros_like(hidden), torch.zeros_like(twice)
    to_channel = None if channel is None else torch.zeros_like(channel)
    to_scalar = None

    def add(rows: slice) -> None:  # a function, so that nothing of one portion is alive during the next
        to_z, part_hidden, part_channel, total[rows] = _backward(
            grad[rows], output(rows), hidden[rows], channel, twice[rows], in_cpp
        )
        if part_hidden is not None and part_channel is not None and to_channel is not None:
            to_hidden[rows] = part_hidden
            to_channel.add_(part_channel)
        receive(rows, to_z)

    for rows in (
        [slice(None)]
        if whole
        else row_portions(grad, max(SMALLEST_BACKWARD_PORTION, -(-grad.nbytes // BACKWARD_PORTIONS)))
    ):
        add(rows)
    if scalar is not None:
        logits = total * (1 - twice / 4)
        to_hidden.addmm_(logits, scalar)
        to_scalar = logits.T @ hidden
    return (to_hidden * hidden * (1 - hidden)).to(u.dtype), to_channel, to_scalar


class _Modulate(torch.autograd.Function):
    """z (N, O) times the gates of x (N, I) through down (R, I); channel (O, R) and scalar (1, R) hold alpha B.

    It keeps z and computes its output again, which cannot be turned back into z.
    """

    @staticmethod
    def forward(ctx, z, x, down, channel, scalar, in_cpp):
        y, u = _modulated(z, x, down, channel, scalar, in_cpp, in_place=False)
        save(ctx, (z, x, down, channel, scalar, in_cpp), u)
        return y

    @staticmethod
    @differentiable_as(lambda *given: reference.modulate(*given[:-1]))
    def backward(ctx, grad):
        in_cpp, (z, x, down, channel, scalar, _, u) = ctx.plain[5], ctx.saved_tensors
        need = ctx.needs_input_grad
        to_z: list[Tensor] = []

        def output(rows: slice) -> Tensor:
            return _modulated(z[rows], x[rows], down, channel, scalar, in_cpp, in_place=False)[0]

        to_u, *to_ups = _gradients(lambda rows, part: to_z.append(part), output, grad, u, channel, scalar, in_cpp)
        to_x = to_u @ down if need[1] else None
        return torch.cat(to_z), to_x, to_u.T @ x if need[2] else None, *to_ups, None


class _ModulatedLinear(torch.autograd.Function):
    """The same with z = weight x + bias and u = down x inside: z is overwritten, and its gradient never held whole."""

    @staticmethod
    def forward(ctx, x, weight, bias, down, channel, scalar, in_cpp):
        z = torch.nn.functional.linear(x, weight, bias)
        y, u = _modulated(z, x, down, channel, scalar, in_cpp, in_place=True)
        save(ctx, (x, weight, bias, down, channel, scalar, in_cpp), watched(ctx, y), u)
        return y

    @staticmethod
    @differentiable_as(lambda *given: reference.modulated_linear(*given[:-1]))
    def backward(ctx, grad):
        in_cpp, (x, weight, bias, down, channel, scalar, _, y, u) = ctx.plain[6], ctx.saved_tensors
        need = ctx.needs_input_grad
        if was_changed(ctx):
            z = torch.nn.functional.linear(x, weight, bias)
            y, _ = _modulated(z, x, down, channel, scalar, in_cpp, in_place=True)
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
                total = to_weight[0].addmm_(to_z.T, x[rows]) if to_weight else to_z.T @ x[rows]
                to_weight[:] = [total]
            if need[2]:
                to_bias.append(to_z.sum(0))

        to_u, to_channel, to_scalar = _gradients(receive, lambda rows: y[rows], grad, u, channel, scalar, in_cpp)
        return (
            to_x[0].addmm_(to_u, down) if need[0] else None,
            to_weight[0] if need[1] else None,
            sum(to_bias) if need[2] else None,
            to_u.T @ x if need[3] else None,
            to_channel,
            to_scalar,
            None,
        )


def _refuses_small(call: Call, size: int) -> str:
    """Refuse transforms, and training with so few outputs that the reference is faster."""
    if not call.compiled and size < forms.FEWEST_ENTRIES and call.grad:
        return "too few numbers"
    return call.opaque if call.transformed else ""


def _refuses_gates(call: Call, channel: Tensor | None, size: int, *others: Tensor) -> str:
    """Refuse C++ for gates of so many numbers; ``others`` are to be in the dtype of x."""
    if channel is None:
        return "no channel gate"
    if channel.shape[1] > native.LARGEST_NATIVE_RANK:
        return "too large a rank"
    if reason := native.refuses(call, size=size):
        return reason
    return "several dtypes" if not call.autocast and any(other.dtype != call.dtype for other in others) else ""


def _refuses_modulate(call: Call) -> str:
    z, x, down, channel, *_ = call.given
    reason = _refuses_gates(call, channel, call.size, x, down)
    return reason or ("several dtypes" if z.dtype != call.dtype else "")


def _modulate(in_cpp: bool, z, x, down, channel, scalar, channel_alpha, scalar_alpha) -> Tensor:
    x_rows, down = lowered(x.reshape(-1, x.shape[-1]), down)
    # Autocast would take the gates to half precision.
    with as_given(z):
        ups = _folded(channel, channel_alpha, z.dtype), _folded(scalar, scalar_alpha, z.dtype)
        return _Modulate.apply(z.reshape(-1, z.shape[-1]), x_rows, down, *ups, in_cpp).view(z.shape)


@dispatch(
    Form("gates in C++", _refuses_modulate, functools.partial(_modulate, True)),
    Form("torch's operations", lambda call: _refuses_small(call, call.size), functools.partial(_modulate, False)),
    otherwise="reference",
)
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
    return reference.modulate(z, x, down, channel, scalar, channel_alpha, scalar_alpha)


def _folded(up: Tensor | None, alpha: Alpha, dtype: torch.dtype) -> Tensor | None:
    """alpha B in float32 at least, for an output of this dtype."""
    if up is None:
        return None
    up = up.to(torch.promote_types(dtype, torch.float32))
    return up if isinstance(alpha, float) and alpha == 1 else alpha * up


_refuses_triton = functools.partial(
    triton.refuses,
    kind="transponder",
    tensors=6,
    outputs=lambda call: call.given[1].shape[0],
    most=2**36,
    most_in_training=2**39,
)


def _triton(*given: Any) -> Tensor:
    from relinear.kernels.triton import transponder as fused

    return fused.modulated_linear(*given)


def _refuses_layer(call: Call) -> str:
    """Refuse one call for a layer and its gates, as Python's part counts for one token: inference, alphas inside B.

    A few tokens are not worth a build. Training keeps to one form, whatever has been built.
    """
    x, weight, _, down, channel, _, channel_alpha, scalar_alpha = call.given
    if channel is None:
        return "no channel gate"
    if call.grad:
        return "gradients are recorded"
    if channel.shape[1] > native.LARGEST_NATIVE_RANK:
        return "too large a rank"
    reason = native.refuses(call) and native.refuses(call, fewest=1, may_build=False)
    if reason:
        return reason
    if not is_plain(weight):
        return "no plain weight on a CPU"
    if not (x.dtype == weight.dtype == down.dtype and channel.dtype == torch.float32):
        return "several dtypes"
    if isinstance(channel_alpha, Tensor) or isinstance(scalar_alpha, Tensor) or not channel_alpha == scalar_alpha == 1:
        return "alphas are not folded into B"
    return "autocast" if call.autocast else ""


def _whole_layer(x, weight, bias, down, channel, scalar, channel_alpha, scalar_alpha) -> Tensor:
    return native.kernels().modulated_linear(x, weight, bias, down, channel, scalar)


def _refuses_layer_gates(call: Call) -> str:
    _, weight, _, down, channel, *_ = call.given
    return _refuses_gates(call, channel, call.rows * weight.shape[0], weight, down)


def _refuses_small_layer(call: Call) -> str:
    return _refuses_small(call, call.rows * call.given[1].shape[0])


def _gated_layer(in_cpp: bool, x, weight, bias, down, channel, scalar, channel_alpha, scalar_alpha) -> Tensor:
    rows, weight, bias, down = lowered(x.reshape(-1, x.shape[-1]), weight, bias, down)
    with as_given(x):
        ups = _folded(channel, channel_alpha, rows.dtype), _folded(scalar, scalar_alpha, rows.dtype)
        if torch.is_grad_enabled():
            y = _ModulatedLinear.apply(rows, weight, bias, down, *ups, in_cpp)
        else:
            z = torch.nn.functional.linear(rows, weight, bias)
            y, _ = _modulated(z, rows, down, ups[0], ups[1], in_cpp, in_place=True)
        return y.view(*x.shape[:-1], weight.shape[0])


@dispatch(
    Form("Triton", _refuses_triton, _triton),
    Form("C++", _refuses_layer, _whole_layer),
    Form("torch's product, then gates in C++", _refuses_layer_gates, functools.partial(_gated_layer, True)),
    Form("torch's product, then gates", _refuses_small_layer, functools.partial(_gated_layer, False)),
    otherwise="reference",
)
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
    return reference.modulated_linear(x, weight, bias, down, channel, scalar, channel_alpha, scalar_alpha)


def few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    channel: Tensor | None,
    scalar: Tensor | None,
) -> Callable[[Tensor], Tensor] | None:
    """``modulated_linear`` as a function of a few rows like x, alphas folded into B; None where C++ is not to run.

    The parameters are asked about once, here: they must stay. Whoever calls asks ``native.refuses_rows`` every time.
    """
    if _refuses_layer(Call(x, weight, bias, down, channel, scalar, 1.0, 1.0)):
        return None
    layer = native.kernels().modulated_linear.default
    tell("transponder", "C++ for a few rows, prepared", shape_of(x), {})
    return lambda x: layer(x, weight, bias, down, channel, scalar)
