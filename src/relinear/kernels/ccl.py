"""CCL with as few passes over memory as torch allows: gates and their products are one, forward and backward."""

# Legend: I in_features, O out_features, R rank, G width of the gate network's last hidden layer

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from relinear.kernels.choice import prefers_triton
from relinear.kernels.chunks import row_chunks
from relinear.kernels.pointwise import compiled, fuses_pointwise

__all__ = ["ccl"]

#: outputs computed at a time in inference: four megabytes in single precision
PORTION = 1 << 20


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
    product before it; sigmoid and product with the gate are one pass over memory where they can be.
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
        h = _gated(h, features, basis_gate, basis_gate_bias)
    if output_gate is None:
        return F.linear(h, mix, bias)
    if bias is None or gate_bias:
        if not torch.is_grad_enabled() and _in_portions(h, features, mix):
            return _gated_portions(h, mix, bias, features, output_gate, output_gate_bias)
        return _gated(F.linear(h, mix, bias), features, output_gate, output_gate_bias)
    return _gated(F.linear(h, mix), features, output_gate, output_gate_bias) + bias


def _gated(value: Tensor, features: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    """value * sigmoid(weight features + bias), differentiable once, but for the plain form: that is for compilers,
    which fuse it with its surroundings, and for a context that several sequences share."""
    assert features is not None
    if torch.compiler.is_compiling() or value.shape[:-1] != features.shape[:-1] or bias is None:
        return value * torch.sigmoid(F.linear(features, weight, bias))
    logits = F.linear(features, weight)  # without the bias, which would take a pass of its own over the logits
    return _Gate.apply(value, logits, bias) if torch.is_grad_enabled() else _product(value, logits, bias)


def _in_portions(h: Tensor, features: Tensor | None, mix: Tensor) -> bool:
    """Whether inference is faster with outputs and logits in cache: in single precision, where a product takes long
    enough to be worth a call."""
    assert features is not None
    return (
        h.dtype == torch.float32
        and h.shape[:-1] == features.shape[:-1]
        and h.numel() // h.shape[-1] * mix.shape[0] >= 2 * PORTION
        and not torch.is_autocast_enabled(h.device.type)
        and fuses_pointwise(h.new_empty(1).expand(PORTION))
    )


def _gated_portions(h, mix, bias, features, weight, gate_bias) -> Tensor:
    """(mix h + bias) * sigmoid(weight features + gate_bias), for few enough tokens at a time to stay in cache."""
    rows, given = h.reshape(-1, h.shape[-1]), features.reshape(-1, features.shape[-1])
    y = h.new_empty(rows.shape[0], mix.shape[0])
    for part in row_chunks(y, PORTION):
        compiled(_gate_product_into)(y[part], F.linear(rows[part], mix, bias), F.linear(given[part], weight), gate_bias)
    return y.view(*h.shape[:-1], -1)


def _gate_product_into(out: Tensor, value: Tensor, logits: Tensor, bias: Tensor) -> Tensor:
    return out.copy_(_gate_product(value, logits, bias))


def _product(value: Tensor, logits: Tensor, bias: Tensor) -> Tensor:
    if fuses_pointwise(value):
        return compiled(_gate_product)(value, logits, bias.to(logits.dtype))
    return (logits + bias.to(logits.dtype)).sigmoid_().mul_(value)


def _gate_product(value: Tensor, logits: Tensor, bias: Tensor) -> Tensor:
    return value * torch.sigmoid(logits + bias)


def _gate_gradients(grad: Tensor, value: Tensor, logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    gates = torch.sigmoid(logits + bias)
    to_value = grad * gates
    return to_value, to_value * value * (1 - gates)


class _Gate(torch.autograd.Function):
    """value * sigmoid(logits + bias) with value and logits (..., K), bias (K,): keeps its inputs alone, and no gate."""

    @staticmethod
    def forward(ctx, value, logits, bias):
        ctx.save_for_backward(value, logits, bias)
        return _product(value, logits, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        value, logits, bias = ctx.saved_tensors
        if fuses_pointwise(value):
            to_value, to_logits = compiled(_gate_gradients)(grad, value, logits, bias.to(logits.dtype))
        else:
            gates = (logits + bias.to(logits.dtype)).sigmoid_()
            to_value = grad * gates
            to_logits = gates.neg_().add_(1).mul_(to_value).mul_(value)
        return to_value, to_logits, to_logits.flatten(0, -2).sum(0).to(bias.dtype)
