"""CCL with its gates in the epilogue: the gate's logits accumulate beside the product that they scale (untuned).

For inference: with gradients torch's operations run.
"""

# Legend: N tokens, I in_features, O out_features, R rank, G width of the gate network's last hidden layer

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from relinear.kernels.autograd import lowered
from relinear.kernels.triton import tiles
from relinear.kernels.triton.tiles import add_product

__all__ = ["ccl"]


@triton.jit
def _gate(features, weight, bias, row, row_ok, column, column_ok, width, total, TILE: tl.constexpr):
    """sigma(f W^T + b) of one tile; ``total`` is a tile of zeros."""
    total = add_product(total, features, width, row, row_ok, weight, width, 1, column, column_ok, width, TILE)
    total += tl.load(bias + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    return tl.sigmoid(total)


@triton.jit
def _kernel(
    a,
    weight,
    bias,
    features,
    gate_weight,
    gate_bias,
    y,
    tokens,
    size,
    width,
    out_features,
    BIAS_GATED: tl.constexpr,
    TILE: tl.constexpr,
):
    """a W^T + b, or a itself, times its gate; a bias that is not gated comes after."""
    row = tl.program_id(0).to(tl.int64) * TILE.ROWS + tl.arange(0, TILE.ROWS)
    column = tl.program_id(1) * TILE.COLUMNS + tl.arange(0, TILE.COLUMNS)
    row_ok, column_ok = row < tokens, column < out_features
    at, ok = row[:, None] * out_features + column[None, :], row_ok[:, None] & column_ok[None, :]
    out = tl.zeros((TILE.ROWS, TILE.COLUMNS), tl.float32)
    if weight is not None:
        out = add_product(out, a, size, row, row_ok, weight, size, 1, column, column_ok, size, TILE)
    else:
        out += tl.load(a + at, mask=ok, other=0.0).to(tl.float32)
    offset = tl.zeros((TILE.COLUMNS,), tl.float32)
    if bias is not None:
        offset += tl.load(bias + column, mask=column_ok, other=0.0).to(tl.float32)
    if BIAS_GATED:
        out += offset[None, :]
    zeros = tl.zeros((TILE.ROWS, TILE.COLUMNS), tl.float32)
    out *= _gate(features, gate_weight, gate_bias, row, row_ok, column, column_ok, width, zeros, TILE)
    if not BIAS_GATED:
        out += offset[None, :]
    tl.store(y + at, out.to(y.dtype.element_ty), mask=ok)


@torch.library.custom_op("relinear::gated_linear", mutates_args=())
def _gated(
    a: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    features: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    bias_gated: bool = True,
) -> Tensor:
    """y (N, O) of a (N, R) and features (N, G); without a weight the gate multiplies a itself."""
    tokens, size = a.shape
    out_features, width = gate_weight.shape
    y = tiles.empty(a, tokens, out_features)
    given, sizes = (a, weight, bias, features, gate_weight, gate_bias, y), (tokens, size, width, out_features)
    tiles.launch(_kernel, (tokens, out_features), a.dtype, *given, *sizes, BIAS_GATED=bias_gated)
    return y


@_gated.register_fake
def _(a, weight, bias, features, gate_weight, gate_bias, bias_gated=True):
    return a.new_empty(a.shape[0], gate_weight.shape[0])


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
    """``functional.ccl.ccl`` (same arguments and result), without gradients.

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
            y = _gated(h, mix, bias, features, *gates[2:], gate_bias)
    return y.view(*leading, mix.shape[0])
