"""CCL with its gates in the epilogue: the gate's logits accumulate beside the product that they scale (untuned)."""

# Legend: N tokens, I in_features, O out_features, R rank, G width of the gate network's last hidden layer

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from relinear.kernels.autograd import differentiable_as, lowered, save
from relinear.kernels.triton import tiles
from relinear.kernels.triton.tiles import add_product

__all__ = ["ccl"]


@triton.jit
def _gate(features, weight, bias, row, row_ok, column, column_ok, width, total, STEP, PRECISION):
    """sigma(f W^T + b) of one tile; ``total`` is a tile of zeros."""
    total = add_product(
        total, features, width, row, row_ok, weight, width, 1, column, column_ok, width, STEP, PRECISION
    )
    total += tl.load(bias + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    return tl.sigmoid(total)


@triton.jit
def _forward_kernel(
    a,
    weight,
    bias,
    features,
    gate_weight,
    gate_bias,
    y,
    v,
    tokens,
    size,
    width,
    out_features,
    PRODUCT: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_GATED: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """v times its gate, v = a W^T + b or a itself; a bias that is not gated comes after."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_ok, column_ok = row < tokens, column < out_features
    at, ok = row[:, None] * out_features + column[None, :], row_ok[:, None] & column_ok[None, :]
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    if PRODUCT:
        out = add_product(out, a, size, row, row_ok, weight, size, 1, column, column_ok, size, STEP, PRECISION)
    else:
        out += tl.load(a + at, mask=ok, other=0.0).to(tl.float32)
    offset = tl.zeros((COLUMNS,), tl.float32)
    if BIAS:
        offset += tl.load(bias + column, mask=column_ok, other=0.0).to(tl.float32)
    if BIAS_GATED:
        out += offset[None, :]
    if KEEP:
        tl.store(v + at, out.to(v.dtype.element_ty), mask=ok)
    zeros = tl.zeros((ROWS, COLUMNS), tl.float32)
    out *= _gate(features, gate_weight, gate_bias, row, row_ok, column, column_ok, width, zeros, STEP, PRECISION)
    if not BIAS_GATED:
        out += offset[None, :]
    tl.store(y + at, out.to(y.dtype.element_ty), mask=ok)


@triton.jit
def _backward_kernel(
    grad,
    v,
    features,
    gate_weight,
    gate_bias,
    to_v,
    to_logits,
    tokens,
    width,
    out_features,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of v and of the gate's logits; the gate itself is computed again rather than kept."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_ok, column_ok = row < tokens, column < out_features
    zeros = tl.zeros((ROWS, COLUMNS), tl.float32)
    gate = _gate(features, gate_weight, gate_bias, row, row_ok, column, column_ok, width, zeros, STEP, PRECISION)
    at, ok = row[:, None] * out_features + column[None, :], row_ok[:, None] & column_ok[None, :]
    given = tl.load(grad + at, mask=ok, other=0.0).to(tl.float32) * gate
    logits = given * tl.load(v + at, mask=ok, other=0.0).to(tl.float32) * (1 - gate)
    tl.store(to_v + at, given.to(to_v.dtype.element_ty), mask=ok)
    tl.store(to_logits + at, logits.to(to_logits.dtype.element_ty), mask=ok)


@torch.library.custom_op("relinear::gated_linear", mutates_args=())
def _forward(
    a: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    features: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    bias_gated: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """(y, v) of a (N, R) and features (N, G); v, for the backward, is empty unless kept or where it is a itself."""
    tokens, size = a.shape
    out_features, width = gate_weight.shape
    y = tiles.empty(a, tokens, out_features)
    keep = keep and weight is not None
    v = tiles.empty(a, tokens, out_features) if keep else tiles.empty(a, 0)
    meta = tiles.meta(tokens, a.dtype)
    _forward_kernel[(tiles.cdiv(tokens, meta["ROWS"]), tiles.cdiv(out_features, meta["COLUMNS"]))](
        a,
        weight,
        bias,
        features,
        gate_weight,
        gate_bias,
        y,
        v,
        tokens,
        size,
        width,
        out_features,
        PRODUCT=weight is not None,
        BIAS=bias is not None,
        BIAS_GATED=bias_gated,
        KEEP=keep,
        **meta,
    )
    return y, v


@_forward.register_fake
def _(a, weight, bias, features, gate_weight, gate_bias, bias_gated, keep):
    size = a.shape[0], gate_weight.shape[0]
    return a.new_empty(size), a.new_empty(size if keep and weight is not None else 0)


@torch.library.custom_op("relinear::gated_linear_backward", mutates_args=())
def _backward(
    grad: Tensor, v: Tensor, features: Tensor, gate_weight: Tensor, gate_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of v (N, O) and of the gate's logits (N, O)."""
    tokens, (out_features, width) = grad.shape[0], gate_weight.shape
    to_v, to_logits = torch.empty_like(v), torch.empty_like(v)
    meta = tiles.meta(tokens, v.dtype)
    grid = tiles.cdiv(tokens, meta["ROWS"]), tiles.cdiv(out_features, meta["COLUMNS"])
    gate = features, gate_weight, gate_bias
    _backward_kernel[grid](grad, v, *gate, to_v, to_logits, tokens, width, out_features, **meta)
    return to_v, to_logits


@_backward.register_fake
def _(grad, v, features, gate_weight, gate_bias):
    return torch.empty_like(v), torch.empty_like(v)


def _setup(ctx, inputs, output):
    assert inputs[-1], "gated_linear needs keep=True where gradients are wanted"
    save(ctx, inputs, None if inputs[1] is None else output[1])


def _reference(a, weight, bias, features, gate_weight, gate_bias, bias_gated, keep) -> Tensor:
    """The first result of ``_forward``."""
    v = a if weight is None else F.linear(a, weight, bias if bias_gated else None)
    y = v * torch.sigmoid(F.linear(features, gate_weight, gate_bias))
    return y if bias is None or bias_gated else y + bias


@differentiable_as(_reference)
def _differentiate(ctx, grad, _v):
    a, weight, _, features, gate_weight, gate_bias, _, _, v = ctx.saved_tensors
    v = a if v is None else v
    need = ctx.needs_input_grad
    to_v, to_logits = _backward(grad.contiguous(), v, features, gate_weight, gate_bias)
    to_a = to_v if weight is None else to_v @ weight
    return (
        to_a if need[0] else None,
        to_v.T @ a if need[1] else None,
        (to_v if ctx.plain[6] else grad).sum(0) if need[2] else None,
        to_logits @ gate_weight if need[3] else None,
        to_logits.T @ features if need[4] else None,
        to_logits.sum(0) if need[5] else None,
        None,
        None,
    )


_forward.register_autograd(_differentiate, setup_context=_setup)


def _gated(a: Tensor, weight: Tensor | None, bias: Tensor | None, *gate: Any, bias_gated: bool = True) -> Tensor:
    # the gate: features (N, G), weight (K, G) and bias (K,)
    given = (a, weight, bias, *gate)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    return _forward(a, weight, bias, *gate, bias_gated, keep)[0]


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
    """``functional.ccl.ccl`` (same arguments and result).

    Without the LayerNorm the basis gate is in the epilogue of x W_basis. The LayerNorm needs whole rows of the basis
    first, so there torch computes it and the gate multiplies its result. What has no gate is torch's.
    """
    leading = x.shape[:-1]
    parts = basis_gate, basis_gate_bias, output_gate, output_gate_bias
    given = lowered(x, features, basis, mix, bias, norm_gain, norm_offset, *parts)
    given = tuple(None if t is None else t.contiguous() for t in given)
    x, features, basis, mix, bias, norm_gain, norm_offset, *gates = given
    with torch.autocast(x.device.type, enabled=False):
        h = x.reshape(-1, x.shape[-1])
        if features is not None:
            features = features.expand(*leading, features.shape[-1]).reshape(len(h), -1).contiguous()
        weight: Tensor | None = basis
        if norm_gain is not None:
            h, weight = F.layer_norm(F.linear(h, basis), basis.shape[:1], norm_gain, norm_offset, eps), None
        if gates[0] is not None:
            h = _gated(h, weight, None, features, *gates[:2])
        elif weight is not None:
            h = F.linear(h, basis)
        if gates[2] is None:
            y = F.linear(h, mix, bias)
        else:
            y = _gated(h, mix, bias, features, *gates[2:], bias_gated=gate_bias)
    return y.view(*leading, mix.shape[0])
