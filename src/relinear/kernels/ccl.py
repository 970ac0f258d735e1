"""CCL with as few passes over memory as torch allows: gates and their products are one, forward and backward."""

# Legend: I in_features, O out_features, R rank, G width of the gate network's last hidden layer

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from relinear.kernels.autocast import lowered
from relinear.kernels.choice import prefers_triton
from relinear.kernels.chunks import row_chunks
from relinear.kernels.epilogue import gates_in_products, linear_product, linear_sigmoid
from relinear.kernels.pointwise import compiled, fuses_pointwise
from relinear.kernels.weight_gradient import weight_gradient

__all__ = ["ccl"]

#: size of the outputs computed at a time
FORWARD_BYTES = 1 << 22
#: size of the outputs whose gradients are computed at a time
BACKWARD_BYTES = 1 << 23


def ccl(
    x: Tensor,
    features: Tensor | None,
    basis: Tensor,
    mix: Tensor,
    bias: Tensor | None = None,
    norm_gain: Tensor | None = None,
    norm_offset: Tensor | None = None,
    basis_gate: Tensor | None = None,
    basis_gate_bias: Tensor | None = None,
    output_gate: Tensor | None = None,
    output_gate_bias: Tensor | None = None,
    gate_bias: bool = True,
    eps: float = 1e-5,
) -> Tensor:
    """``functional.ccl.ccl`` in the input's dtype.

    The gate network's last layer is two products, one a gate, so that no gate is a strided slice; the bias rides in the
    product before it; sigmoid and product with the output gate are one pass over memory where they can be, and
    neither gates nor ungated outputs are kept for the backward pass.
    """
    gates = basis_gate, basis_gate_bias, output_gate, output_gate_bias
    if prefers_triton(x, features, basis, mix, bias, norm_gain, norm_offset, *gates):
        from relinear.kernels.triton import ccl as fused

        norm = norm_gain, norm_offset
        return fused.ccl(x, features, basis, mix, bias, *norm, *gates, gate_bias, eps)
    h = F.linear(x, basis)
    if norm_gain is not None:
        h = F.layer_norm(h, h.shape[-1:], norm_gain, norm_offset, eps)
    if basis_gate is not None:
        assert features is not None
        h = h * F.linear(features, basis_gate, basis_gate_bias).sigmoid_()
    if output_gate is None:
        return F.linear(h, mix, bias)
    assert features is not None
    assert output_gate_bias is not None
    gated_bias = bias if gate_bias else None
    if torch.compiler.is_compiling() or h.shape[:-1] != features.shape[:-1]:
        # a compiler fuses this with its surroundings; a context that several sequences share is broadcast
        y = F.linear(h, mix, gated_bias) * F.linear(features, output_gate, output_gate_bias).sigmoid()
    else:
        y = _gated_linear(h, mix, gated_bias, features, output_gate, output_gate_bias)
    return y if gate_bias or bias is None else y + bias


def _gated_linear(h, mix, bias, features, weight, gate_bias) -> Tensor:
    rows, given = h.reshape(-1, h.shape[-1]), features.reshape(-1, features.shape[-1])
    tensors = lowered(rows, mix, bias, given, weight, gate_bias)
    with torch.autocast(h.device.type, enabled=False):
        run: Any = _GatedLinear.apply if torch.is_grad_enabled() else _forward
        return run(*tensors).view(*h.shape[:-1], mix.shape[0])


def _gate_into(out: Tensor, value: Tensor, logits: Tensor, bias: Tensor) -> Tensor:
    return out.copy_(value * torch.sigmoid(logits + bias))


def _gate_gradients(grad: Tensor, y: Tensor, gates: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of value and, in ``out``, of logits of y = value * sigmoid(logits), which need y and not value."""
    to_value, to_logits = grad * gates, grad * y * (1 - gates)
    return to_value, out.copy_(to_logits)


def _gate_gradients_of_logits(grad: Tensor, y: Tensor, logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The same from logits and their bias, over ``logits``."""
    return _gate_gradients(grad, y, torch.sigmoid(logits + bias), logits)


def _forward(h, mix, bias, features, weight, gate_bias) -> Tensor:
    """(mix h + bias) * sigmoid(weight features + gate_bias), few enough tokens at a time to stay in cache."""
    if gates_in_products(h, h.shape[0] * mix.shape[0]):
        return linear_product(h, mix, bias, linear_sigmoid(features, weight, gate_bias))
    y = h.new_empty(h.shape[0], mix.shape[0])
    for rows in row_chunks(y, FORWARD_BYTES):
        value, logits = F.linear(h[rows], mix, bias), F.linear(features[rows], weight)
        if fuses_pointwise(value):
            compiled(_gate_into)(y[rows], value, logits, gate_bias)
        else:
            torch.mul(value, logits.add_(gate_bias).sigmoid_(), out=y[rows])
    return y


def _portion_gradients(grad: Tensor, y: Tensor, features: Tensor, weight: Tensor, gate_bias: Tensor):
    """Gradients (n, O) of value and of logits for some rows."""
    if gates_in_products(features, y.numel()):
        gates = linear_sigmoid(features, weight, gate_bias)
        return (compiled(_gate_gradients) if fuses_pointwise(y) else _gate_gradients)(grad, y, gates, gates)
    logits = F.linear(features, weight)
    if fuses_pointwise(y):
        return compiled(_gate_gradients_of_logits)(grad, y, logits, gate_bias)
    return _gate_gradients_of_logits(grad, y, logits, gate_bias)


class _GatedLinear(torch.autograd.Function):
    """``_forward``, differentiable once; keeps its inputs and its output, and computes the gates again."""

    @staticmethod
    def forward(ctx, h, mix, bias, features, weight, gate_bias):
        y = _forward(h, mix, bias, features, weight, gate_bias)
        ctx.save_for_backward(h, mix, features, weight, gate_bias, y)
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        h, mix, features, weight, gate_bias, y = ctx.saved_tensors
        wide = torch.promote_types(h.dtype, torch.float32)
        to_h, to_features = torch.empty_like(h), torch.empty_like(features)
        to_mix, to_weight = torch.zeros_like(mix, dtype=wide), torch.zeros_like(weight, dtype=wide)
        to_bias, to_gate_bias = torch.zeros_like(gate_bias, dtype=wide), torch.zeros_like(gate_bias, dtype=wide)

        def add(rows: slice) -> None:  # a function, so that nothing of one portion is alive during the next
            to_value, to_logits = _portion_gradients(grad[rows], y[rows], features[rows], weight, gate_bias)
            torch.mm(to_value, mix, out=to_h[rows])
            torch.mm(to_logits, weight, out=to_features[rows])
            to_mix.add_(weight_gradient(to_value, h[rows]))
            to_weight.add_(weight_gradient(to_logits, features[rows]))
            if ctx.has_bias:
                to_bias.add_(to_value.sum(0))
            to_gate_bias.add_(to_logits.sum(0))

        for rows in row_chunks(y, BACKWARD_BYTES):
            add(rows)
        grads = to_h, to_mix.to(mix.dtype), to_bias.to(mix.dtype) if ctx.has_bias else None
        return *grads, to_features, to_weight.to(weight.dtype), to_gate_bias.to(gate_bias.dtype)
