"""Compute CGT's generated operator T in one kernel, with thin intermediate results on chip (not tuned).

It is for inference: in training torch's three products take as long (results/gpu).

All templates are concatenated to C = M R columns. With P = x R_all^T + b and the templates' weights s, each repeated R
times, the increment is h L_all with h = ((P * s) E) * s. E (C, C) is 1 where two columns have the same index within
their template.
"""

# Legend: N tokens, D width of x, M templates, R rank, C = M R columns

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from relinear.kernels.autograd import autocasted
from relinear.kernels.triton import tiles
from relinear.kernels.triton.tiles import add_product


@triton.jit
def _across(values, RANK: tl.constexpr, PAD: tl.constexpr):
    """Sum over templates and repeat the sums for all of them: values (n, C) times E."""
    at = tl.arange(0, PAD)
    same = (at[:, None] % RANK == at[None, :] % RANK).to(tl.float32)
    return tl.dot(values, same, input_precision="tf32x3")


@triton.jit
def _shares(sigma, row, row_ok, at, at_ok, RANK: tl.constexpr, COUNT: tl.constexpr):
    where = row[:, None] * COUNT + (at // RANK)[None, :]
    return tl.load(sigma + where, mask=row_ok[:, None] & at_ok[None, :], other=0.0).to(tl.float32)


@triton.jit
def _add_thin(x, thin, weight, y, width, row, row_ok, at, at_ok, TILE: tl.constexpr):
    """Write y = x + thin (n, C) weight (C, D), for all D."""
    for start in range(0, width, TILE.COLUMNS):
        column = start + tl.arange(0, TILE.COLUMNS)
        column_ok = column < width
        part = tl.load(
            weight + at[:, None] * width + column[None, :], mask=at_ok[:, None] & column_ok[None, :], other=0.0
        )
        where, ok = row[:, None] * width + column[None, :], row_ok[:, None] & column_ok[None, :]
        out = tl.load(x + where, mask=ok, other=0.0).to(tl.float32)
        out = tl.dot(thin.to(part.dtype), part, out, input_precision=TILE.PRECISION)
        tl.store(y + where, out.to(y.dtype.element_ty), mask=ok)


@triton.jit
def _forward_kernel(
    x,
    sigma,
    left,
    right,
    right_bias,
    y,
    tokens,
    width,
    COUNT: tl.constexpr,
    RANK: tl.constexpr,
    PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE.ROWS + tl.arange(0, TILE.ROWS)
    at = tl.arange(0, PAD)
    row_ok, at_ok = row < tokens, at < COUNT * RANK
    thin = tl.zeros((TILE.ROWS, PAD), tl.float32)
    thin = add_product(thin, x, width, row, row_ok, right, width, 1, at, at_ok, width, TILE)
    thin += tl.load(right_bias + at, mask=at_ok, other=0.0).to(tl.float32)[None, :]
    share = _shares(sigma, row, row_ok, at, at_ok, RANK, COUNT)
    thin = _across(thin * share, RANK, PAD) * share
    _add_thin(x, thin, left, y, width, row, row_ok, at, at_ok, TILE)


@torch.library.custom_op("relinear::cgt_modulate", mutates_args=())
def _forward(x: Tensor, sigma: Tensor, left: Tensor, right: Tensor, right_bias: Tensor) -> Tensor:
    """Return y for x (N, D) and sigma (N, M)."""
    tokens, width = x.shape
    y, (templates, rank, _) = torch.empty_like(x), left.shape
    constants = {"COUNT": templates, "RANK": rank, "PAD": tiles.pad(templates * rank), "num_warps": 4}
    constants |= {"ROWS": min(32, tiles.rows(tokens)), "COLUMNS": 64}  # a program loops over all columns
    arguments = x, sigma, left, right, right_bias, y, tokens, width
    tiles.launch(_forward_kernel, (tokens, 1), left.dtype, *arguments, **constants)
    return y


@_forward.register_fake
def _(x, sigma, left, right, right_bias):
    return torch.empty_like(x)


def modulate(x: Tensor, sigma: Tensor, left: Tensor, right: Tensor, right_bias: Tensor) -> Tensor:
    """Compute ``functional.cgt.modulate`` (same arguments and result) without gradients, for small M R."""
    leading = x.shape[:-1]
    x, sigma, left, right, right_bias = autocasted(x, sigma, left, right, right_bias)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    shares = sigma.expand(*leading, sigma.shape[-1]).reshape(len(flat), -1).contiguous()
    y = _forward(flat, shares, left.contiguous(), right.contiguous(), right_bias.contiguous())
    return y.view(*leading, -1)
