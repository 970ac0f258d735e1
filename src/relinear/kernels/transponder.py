"""Compute ``functional.transponder``: a layer and its gates in C++, with alpha folded into B.

Only the output y and u = A x are saved for the backward pass, which computes the gates again. As y is z times its
gates, the gradients need grad * y and grad * gates, but not z.
"""

# Legend: N tokens (all leading dimensions), I in_features, O out_features, R rank

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from relinear.functional import transponder as reference
from relinear.kernels import autograd, native, triton
from relinear.kernels.autograd import (
    add_product,
    autocasted,
    differentiable_as,
    row_portions,
    save,
    track_changes,
    was_changed,
    without_autocast,
)
from relinear.kernels.implementations import Call, Implementation, dispatch, is_untraced_cpu, log_choice, shape_of

Alpha = Tensor | float


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, channel: Tensor, scalar: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gated output (N, O) and u (N, R)."""
    y = torch.nn.functional.linear(x, weight, bias)
    u = y.new_empty(y.shape[0], down.shape[0])
    native.calls.modulate(y, u, y, x.contiguous(), down.contiguous(), channel.T.contiguous(), scalar)
    return y, u


class _ModulatedLinear(torch.autograd.Function):
    """Differentiate a layer and its gates; ``channel`` (O, R) and ``scalar`` (1, R) are alpha B."""

    @staticmethod
    def forward(ctx, *arguments):
        y, u = _forward(*arguments)
        save(ctx, arguments, track_changes(ctx, y), u)
        return y

    @staticmethod
    @differentiable_as(reference.modulated_linear)
    def backward(ctx, grad):
        *saved, y, u = ctx.saved_tensors
        x, weight, _, down, channel, scalar = saved
        need = ctx.needs_input_grad
        if was_changed(ctx):
            y, _ = _forward(*saved)
        hidden = torch.sigmoid(u.float())
        up = channel.T.contiguous()
        # twice the scalar gate, which includes the factor 2 of the channel gate
        twice = hidden.new_full((len(x), 1), 2.0) if scalar is None else (hidden @ scalar.T).sigmoid_().mul_(4)
        portions = row_portions(y, autograd.BACKWARD_PORTION)
        summed = torch.float32 if len(portions) > 1 else weight.dtype
        to_x, to_weight = torch.empty_like(x), torch.empty_like(weight, dtype=summed)
        to_bias = torch.zeros(weight.shape[0], dtype=torch.float32)
        to_hidden, to_up, total = torch.empty_like(hidden), torch.zeros_like(up), torch.empty_like(twice)

        def add(rows: slice) -> None:  # a function, so that a portion's tensors are freed before the next
            upstream = grad[rows].contiguous()
            to_z = torch.empty_like(upstream)
            results = to_hidden[rows], to_up, total[rows]
            native.calls.modulate_backward(to_z, *results, y[rows], upstream, hidden[rows], up, twice[rows])
            if need[0]:
                torch.mm(to_z, weight, out=to_x[rows])
            if need[1]:
                add_product(to_weight, to_z.T, x[rows], rows.start == 0)
            if need[2]:
                to_bias.add_(to_z.sum(0))

        for rows in portions:
            add(rows)
        to_scalar = None
        if scalar is not None:
            logits = total * (1 - twice / 4)  # a gate g = 2 sigmoid(l) has dg/dl = g (1 - g / 2)
            to_hidden.addmm_(logits, scalar)
            to_scalar = logits.T @ hidden
        to_u = (to_hidden * hidden * (1 - hidden)).to(u.dtype)
        to_weight, to_bias = to_weight.to(weight.dtype), to_bias.to(weight.dtype)
        gradients = to_x.addmm_(to_u, down), to_weight, to_bias, to_u.T @ x, to_up.T, to_scalar
        return tuple(gradient if needed else None for gradient, needed in zip(gradients, need, strict=True))


def _scaled(up: Tensor | None, alpha: Alpha) -> Tensor | None:
    """Return alpha B in float32."""
    if up is None:
        return None
    return up.float() if isinstance(alpha, float) and alpha == 1 else alpha * up.float()


def _outputs(call: Call) -> int:
    _, weight, *_ = call.arguments
    return weight.shape[0]


_triton_unsupported = functools.partial(
    triton.unsupported_reason,
    kind="transponder",
    tensors=6,
    outputs=_outputs,
    most=2**36,
    most_in_training=2**39,
)


def _triton(*arguments: Any) -> Tensor:
    from relinear.kernels.triton import transponder as fused

    return fused.modulated_linear(*arguments)


def _cpp_unsupported(call: Call) -> str:
    """Return why C++ does not run a call. In training this does not depend on whether kernels have been built."""
    _, weight, _, down, channel, *_ = call.arguments
    if channel is None:
        return "no channel gate"
    if channel.shape[1] > native.calls.MAX_RANK:
        return "too large a rank"
    reason = native.unsupported_reason(call, size=call.rows * weight.shape[0])
    if reason and not call.grad:  # with one token Python's overhead counts, but a build is not worth it
        reason = native.unsupported_reason(call, fewest=1, may_build=False)
    if reason:
        return reason
    if not is_untraced_cpu(weight):
        return "no plain weight on a CPU"
    same = call.autocast or call.dtype == weight.dtype == down.dtype
    return "" if same else "several dtypes"


def _in_cpp(x, weight, bias, down, channel, scalar, channel_alpha, scalar_alpha) -> Tensor:
    x, weight, bias, down = autocasted(x, weight, bias, down)
    with without_autocast(x):
        ups: Any = _scaled(channel, channel_alpha), _scaled(scalar, scalar_alpha)
        if torch.is_grad_enabled():
            y = _ModulatedLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias, down, *ups)
            return y.view(*x.shape[:-1], weight.shape[0])
        return native.calls.modulated_layer(weight, bias, down, *ups)(x)


modulated_linear = dispatch(
    Implementation("Triton", _triton_unsupported, _triton),
    Implementation("gates in C++", _cpp_unsupported, _in_cpp),
    otherwise="reference",
)(reference.modulated_linear)


def prepare_few_rows(x: Tensor, *parameters: Any) -> Callable[[Tensor], Tensor] | None:
    """Return ``modulated_linear`` as a function of a few rows like x, alphas folded into B; None if unsupported.

    Parameters are checked once, here, and must not change. The caller checks ``native.rows_unsupported`` on every call.

    Args:
        x: (..., I).
        parameters: weight, bias, down, channel and scalar of ``modulated_linear``.
    """
    call = Call(x, *parameters)
    if call.grad or call.autocast or _cpp_unsupported(call):
        return None
    log_choice("transponder", "C++ for a few rows, prepared", shape_of(x), {})
    return native.calls.modulated_layer(*parameters)
