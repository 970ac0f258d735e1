"""CGT's generated operator T in one kernel: the thin products stay on chip, x is read and its result written (untuned).

With all templates side by side, C = M R columns, P = x R_all^T + b and s the shares repeated R times, the increment is
h L_all with h = ((P * s) E) * s, where E (C, C) has a 1 wherever two columns have the same place within their rank.
"""

# Legend: N tokens, D width of x, M templates, R rank, C = M R columns

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from relinear.functional import cgt as reference
from relinear.kernels.autograd import differentiable_as, lowered, save
from relinear.kernels.triton import tiles
from relinear.kernels.triton.tiles import add_product

__all__ = ["modulate"]


@triton.jit
def _across(values, RANK: tl.constexpr, PAD: tl.constexpr):
    """Sums over templates, spread back to all of them: values (n, C) times E."""
    at = tl.arange(0, PAD)
    same = (at[:, None] % RANK == at[None, :] % RANK).to(tl.float32)
    return tl.dot(values, same, input_precision="tf32x3")


@triton.jit
def _shares(sigma, row, row_ok, at, at_ok, RANK: tl.constexpr, COUNT: tl.constexpr):
    where = row[:, None] * COUNT + (at // RANK)[None, :]
    return tl.load(sigma + where, mask=row_ok[:, None] & at_ok[None, :], other=0.0).to(tl.float32)


@triton.jit
def _add_thin(x, thin, weight, y, width, row, row_ok, at, at_ok, C: tl.constexpr, COLUMNS: tl.constexpr, PRECISION):
    """y = x + thin (n, C) weight (C, D), for all D."""
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        column_ok = column < width
        part = tl.load(
            weight + at[:, None] * width + column[None, :], mask=at_ok[:, None] & column_ok[None, :], other=0.0
        )
        where, ok = row[:, None] * width + column[None, :], row_ok[:, None] & column_ok[None, :]
        out = tl.load(x + where, mask=ok, other=0.0).to(tl.float32)
        out = tl.dot(thin.to(part.dtype), part, out, input_precision=PRECISION)
        tl.store(y + where, out.to(y.dtype.element_ty), mask=ok)


@triton.jit
def _forward_kernel(
    x,
    sigma,
    left,
    right,
    right_bias,
    y,
    inner,
    tokens,
    width,
    COUNT: tl.constexpr,
    RANK: tl.constexpr,
    PAD: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, PAD)
    row_ok, at_ok = row < tokens, at < COUNT * RANK
    thin = tl.zeros((ROWS, PAD), tl.float32)
    thin = add_product(thin, x, width, row, row_ok, right, width, 1, at, at_ok, width, STEP, PRECISION)
    thin += tl.load(right_bias + at, mask=at_ok, other=0.0).to(tl.float32)[None, :]
    if KEEP:
        where, ok = row[:, None] * (COUNT * RANK) + at[None, :], row_ok[:, None] & at_ok[None, :]
        tl.store(inner + where, thin, mask=ok)
    share = _shares(sigma, row, row_ok, at, at_ok, RANK, COUNT)
    thin = _across(thin * share, RANK, PAD) * share
    _add_thin(x, thin, left, y, width, row, row_ok, at, at_ok, COUNT * RANK, COLUMNS, PRECISION)


@triton.jit
def _backward_kernel(
    grad,
    inner,
    sigma,
    left,
    right,
    to_x,
    to_inner,
    to_share,
    thin_out,
    tokens,
    width,
    COUNT: tl.constexpr,
    RANK: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of x, of P and of s, and h once more, which the gradient of L_all multiplies."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, PAD)
    row_ok, at_ok = row < tokens, at < COUNT * RANK
    to_thin = tl.zeros((ROWS, PAD), tl.float32)
    to_thin = add_product(to_thin, grad, width, row, row_ok, left, width, 1, at, at_ok, width, STEP, PRECISION)
    where, ok = row[:, None] * (COUNT * RANK) + at[None, :], row_ok[:, None] & at_ok[None, :]
    given = tl.load(inner + where, mask=ok, other=0.0)
    share = _shares(sigma, row, row_ok, at, at_ok, RANK, COUNT)
    spread = _across(given * share, RANK, PAD)
    tl.store(thin_out + where, (spread * share).to(thin_out.dtype.element_ty), mask=ok)
    back = _across(to_thin * share, RANK, PAD)
    tl.store(to_share + where, to_thin * spread + back * given, mask=ok)
    back *= share
    tl.store(to_inner + where, back.to(to_inner.dtype.element_ty), mask=ok)
    _add_thin(grad, back, right, to_x, width, row, row_ok, at, at_ok, COUNT * RANK, COLUMNS, PRECISION)


def _meta(tokens: int, left: Tensor) -> dict:
    templates, rank, _ = left.shape
    sizes = {"COUNT": templates, "RANK": rank, "PAD": tiles.pad(templates * rank), "ROWS": min(32, tiles.rows(tokens))}
    return tiles.meta(tokens, left.dtype) | sizes | {"COLUMNS": 64, "num_warps": 4}


@torch.library.custom_op("relinear::cgt_modulate", mutates_args=())
def _forward(
    x: Tensor, sigma: Tensor, left: Tensor, right: Tensor, right_bias: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    """(y, P) of x (N, D) and sigma (N, M); P (N, C) in single precision, for the backward, is empty unless kept."""
    (tokens, width), columns = x.shape, right_bias.numel()
    y = torch.empty_like(x)
    inner = tiles.empty(x, tokens, columns, dtype=torch.float32) if keep else tiles.empty(x, 0, dtype=torch.float32)
    meta = _meta(tokens, left)
    weights = left, right, right_bias
    _forward_kernel[(tiles.cdiv(tokens, meta["ROWS"]),)](x, sigma, *weights, y, inner, tokens, width, KEEP=keep, **meta)
    return y, inner


@_forward.register_fake
def _(x, sigma, left, right, right_bias, keep):
    size = (x.shape[0], right_bias.numel()) if keep else (0,)
    return torch.empty_like(x), x.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("relinear::cgt_modulate_backward", mutates_args=())
def _backward(
    grad: Tensor, inner: Tensor, sigma: Tensor, left: Tensor, right: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x (N, D), P (N, C) and s (N, C) in single precision; h (N, C)."""
    tokens, width = grad.shape
    to_x, to_share = torch.empty_like(grad), torch.empty_like(inner)
    to_inner, thin = (torch.empty_like(inner, dtype=grad.dtype) for _ in range(2))
    meta = _meta(tokens, left)
    results = to_x, to_inner, to_share, thin
    _backward_kernel[(tiles.cdiv(tokens, meta["ROWS"]),)](
        grad, inner, sigma, left, right, *results, tokens, width, **meta
    )
    return results


@_backward.register_fake
def _(grad, inner, sigma, left, right):
    to_inner, thin = (torch.empty_like(inner, dtype=grad.dtype) for _ in range(2))
    return torch.empty_like(grad), to_inner, torch.empty_like(inner), thin


def _setup(ctx, inputs, output):
    assert inputs[-1], "cgt_modulate needs keep=True where gradients are wanted"
    save(ctx, inputs, output[1])


def _reference(x, sigma, left, right, right_bias, keep) -> Tensor:
    """The first result of ``_forward``."""
    return reference.modulate(x, sigma, left, right, right_bias)


@differentiable_as(_reference)
def _differentiate(ctx, grad, _inner):
    x, sigma, left, right, _, _, inner = ctx.saved_tensors
    need = ctx.needs_input_grad
    grad = grad.contiguous()
    to_x, to_inner, to_share, thin = _backward(grad, inner, sigma, left, right)
    to_sigma = to_share.view(*sigma.shape, -1).sum(-1).to(sigma.dtype) if need[1] else None
    to_left = (thin.T @ grad).view(left.shape) if need[2] else None
    to_right = (to_inner.T @ x).view(right.shape) if need[3] else None
    to_bias = to_inner.sum(0).view(left.shape[:2]) if need[4] else None
    return to_x if need[0] else None, to_sigma, to_left, to_right, to_bias, None


_forward.register_autograd(_differentiate, setup_context=_setup)


def modulate(x: Tensor, sigma: Tensor, left: Tensor, right: Tensor, right_bias: Tensor) -> Tensor:
    """``functional.cgt.modulate`` (same arguments and result); for small M R (``kernels.cgt``)."""
    leading = x.shape[:-1]
    x, sigma, left, right, right_bias = lowered(x, sigma, left, right, right_bias)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    shares = sigma.expand(*leading, sigma.shape[-1]).reshape(len(flat), -1).contiguous()
    given = flat, shares, left.contiguous(), right.contiguous(), right_bias.contiguous()
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    return _forward(*given, keep)[0].view(*leading, -1)
