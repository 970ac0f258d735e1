"""Compute ``functional.ccl`` in few passes over memory: gates are fused with the products that they scale."""

# Legend: I in_features, O out_features, R rank, G width of the gate network's last hidden layer

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relinear.functional import ccl as reference
from relinear.kernels import autograd, native
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

#: epsilon of the LayerNorm
EPS = 1e-5

#: how many times larger a training step must be than inference for gates in C++ to be faster than torch's
LARGER_IN_TRAINING = 8


def _products_unsupported(call: Call) -> str:
    return "products in bfloat16 take longer than in float32" if call.emulated and not call.autocast else ""


def _products(x, features, basis, mix, bias, norm_gain, norm_offset, *gates) -> Tensor:
    """Compute the reference in the input's dtype.

    The gate network's last layer is two products, one per gate, so that no gate is a strided slice; the product that
    is gated adds the bias. If possible, the sigmoid of the output gate and its product are one pass over memory, and
    neither gates nor ungated outputs are saved for the backward pass.
    """
    basis_gate, basis_gate_bias, output_gate, output_gate_bias, gate_bias, eps = gates
    h = F.linear(x, basis)
    if norm_gain is not None:
        h = F.layer_norm(h, h.shape[-1:], norm_gain, norm_offset, eps)
    if basis_gate is not None:
        h = h * F.linear(features, basis_gate, basis_gate_bias).sigmoid_()
    if output_gate is None:
        return F.linear(h, mix, bias)
    y = _gated_linear(h, mix, bias if gate_bias else None, features, output_gate, output_gate_bias)
    return y if gate_bias or bias is None else y + bias


ccl = dispatch(Implementation("torch's products", _products_unsupported, _products), otherwise="reference")(
    reference.ccl
)


def prepare_few_rows(
    x: Tensor, width: int, trunk: Sequence[Tensor], *parameters: Any, gate_bias: bool
) -> Callable[[Tensor, Tensor | None], Tensor | None] | None:
    """Return the layer with its gate network as a function of a few rows like x and their context, one call in C++.

    Returns None if C++ does not support it; the function returns None for a context that rows share. Parameters are
    checked once, here, and must not change. The caller checks ``native.rows_unsupported`` on every call.

    Args:
        x: (..., I).
        width: features of the context, 0 without gates.
        trunk: weights and biases of the gate network's hidden layers, in turn.
        parameters: arguments of ``ccl``, from the basis to the output gate's bias.
        gate_bias: as in ``ccl``.
    """
    if native.few_rows_unsupported(x, *trunk, *parameters):
        return None
    log_choice("ccl", "C++ for a few rows, prepared", shape_of(x), {})
    layer = native.calls.ccl_layer(width, trunk, *parameters, gate_bias, EPS)

    def run(x: Tensor, context: Tensor | None) -> Tensor | None:
        if context is None:
            return layer(x, None)
        if context.numel() * x.shape[-1] != x.numel() * width or not is_untraced_cpu(context):
            return None
        return layer(x, context.to(x.dtype))

    return run


def _gates_unsupported(call: Call) -> str:
    h, mix, _, features, *_ = call.arguments
    if h.shape[:-1] != features.shape[:-1]:
        return "a context that several sequences share"
    fewest = native.MIN_NATIVE_ENTRIES * (LARGER_IN_TRAINING if call.grad else 1)
    return native.unsupported_reason(call, fewest, size=call.rows * mix.shape[0])


def _gated(h, mix, bias, features, weight, offset) -> Tensor:
    rows, feature_rows = h.reshape(-1, h.shape[-1]), features.reshape(-1, features.shape[-1])
    tensors = autocasted(rows, mix, bias, feature_rows, weight, offset)
    with without_autocast(h):
        return (_GatedLinear.apply if torch.is_grad_enabled() else _forward)(*tensors).view(*h.shape[:-1], mix.shape[0])


def _gated_product(
    h: Tensor, mix: Tensor, bias: Tensor | None, features: Tensor, weight: Tensor, offset: Tensor
) -> Tensor:
    """Return (mix h + bias) * sigmoid(weight features + offset)."""
    return F.linear(h, mix, bias) * F.linear(features, weight, offset).sigmoid()


_gated_linear = dispatch(Implementation("gates in C++", _gates_unsupported, _gated))(_gated_product)


def _forward(h, mix, bias, features, weight, offset) -> Tensor:
    """Compute ``_gated_product`` of matrices without a graph, in one kernel or a few tokens at a time."""
    y = h.new_empty(h.shape[0], mix.shape[0])
    offset = offset.contiguous()
    if h.dtype == torch.float32 and h.shape[1] + features.shape[1] <= h.shape[0]:  # else it repacks weights in vain
        bias = None if bias is None else bias.contiguous()
        h, mix, features, weight = (part.contiguous() for part in (h, mix, features, weight))
        native.calls.gated_product(y, h, mix, bias, features, weight, offset)
        return y
    for rows in row_portions(y):
        native.calls.gate(y[rows], F.linear(h[rows], mix, bias), F.linear(features[rows], weight), offset)
    return y


class _GatedLinear(torch.autograd.Function):
    """Differentiate ``_forward``; saves inputs and output, and recomputes the gates."""

    @staticmethod
    def forward(ctx, *arguments):
        y = _forward(*arguments)
        save(ctx, arguments, track_changes(ctx, y))
        return y

    @staticmethod
    @differentiable_as(_gated_product)
    def backward(ctx, grad):
        h, mix, bias, features, weight, offset, y = ctx.saved_tensors
        y = _forward(h, mix, bias, features, weight, offset) if was_changed(ctx) else y
        to_h, to_features = torch.empty_like(h), torch.empty_like(features)
        to_mix, to_weight = (torch.empty_like(one, dtype=torch.float32) for one in (mix, weight))
        to_biases = torch.zeros(2, mix.shape[0])

        def add(rows: slice) -> None:  # a function, so that a portion's tensors are freed before the next
            upstream, to_logits = grad[rows].contiguous(), F.linear(features[rows], weight)
            to_value = torch.empty_like(upstream)
            # gradients overwrite the logits
            native.calls.gate_backward(to_value, to_logits, to_biases, y[rows], upstream, offset.contiguous())
            torch.mm(to_value, mix, out=to_h[rows])
            torch.mm(to_logits, weight, out=to_features[rows])
            add_product(to_mix, to_value.T, h[rows], rows.start == 0)
            add_product(to_weight, to_logits.T, features[rows], rows.start == 0)

        for rows in row_portions(y, autograd.BACKWARD_PORTION):
            add(rows)
        to_bias, to_offset = to_biases.to(mix.dtype)
        grads = to_h, to_mix.to(mix.dtype), None if bias is None else to_bias
        return *grads, to_features, to_weight.to(weight.dtype), to_offset.to(offset.dtype)
