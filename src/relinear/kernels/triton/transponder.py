"""Compute a projection and its modulators in one kernel: gates scale the matrix product before it is written.

The loop that computes W x also computes the bottleneck A x from the same tiles of x. Tile sizes are not tuned.
"""

# Legend: N tokens, I in_features, O out_features, R rank, P parts into which tokens are divided for a sum over them

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from relinear.functional import transponder as reference
from relinear.kernels.autograd import autocasted, differentiable_as, save
from relinear.kernels.triton import tiles

#: parts of a sum over tokens, which are added in a fixed order afterwards
PARTS = 16


@triton.jit
def _logits(hidden, up, column, column_ok, rank_at, RANK: tl.constexpr):
    """Return hidden (n, R) times up^T (R, c) in single precision."""
    part = tl.load(
        up + column[None, :] * RANK + rank_at[:, None], mask=column_ok[None, :] & (rank_at < RANK)[:, None], other=0.0
    )
    return tl.dot(hidden, part, input_precision="tf32x3")


@triton.jit
def _scalar_gate(hidden, scalar, rank_at, RANK: tl.constexpr):
    weights = tl.load(scalar + rank_at, mask=rank_at < RANK, other=0.0)
    return 2 * tl.sigmoid(tl.sum(hidden * weights[None, :], 1))


@triton.jit
def _forward_kernel(
    x,
    weight,
    bias,
    down,
    channel,
    scalar,
    y,
    z,
    u,
    tokens,
    in_features,
    out_features,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE.ROWS + tl.arange(0, TILE.ROWS)
    column = tl.program_id(1) * TILE.COLUMNS + tl.arange(0, TILE.COLUMNS)
    rank_at = tl.arange(0, RANK_PAD)
    row_ok, column_ok, rank_ok = row < tokens, column < out_features, rank_at < RANK
    out = tl.zeros((TILE.ROWS, TILE.COLUMNS), tl.float32)
    bottleneck = tl.zeros((TILE.ROWS, RANK_PAD), tl.float32)
    for start in range(0, in_features, TILE.STEP):
        k = start + tl.arange(0, TILE.STEP)
        k_ok = k < in_features
        inputs = tl.load(x + row[:, None] * in_features + k[None, :], mask=row_ok[:, None] & k_ok[None, :], other=0.0)
        part = tl.load(
            weight + column[None, :].to(tl.int64) * in_features + k[:, None],
            mask=column_ok[None, :] & k_ok[:, None],
            other=0.0,
        )
        out = tl.dot(inputs, part, out, input_precision=TILE.PRECISION)
        thin = tl.load(
            down + rank_at[None, :] * in_features + k[:, None], mask=rank_ok[None, :] & k_ok[:, None], other=0.0
        )
        bottleneck = tl.dot(inputs, thin, bottleneck, input_precision=TILE.PRECISION)
    if bias is not None:
        out += tl.load(bias + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    at = row[:, None] * out_features + column[None, :]
    ok = row_ok[:, None] & column_ok[None, :]
    # rounded as a separate layer would round its output, so that gates of 1 change no bit of it
    out = out.to(y.dtype.element_ty)
    bottleneck = bottleneck.to(y.dtype.element_ty)
    if z is not None:
        tl.store(z + at, out, mask=ok)
        if tl.program_id(1) == 0:
            tl.store(u + row[:, None] * RANK + rank_at[None, :], bottleneck, mask=row_ok[:, None] & rank_ok[None, :])
    hidden = tl.sigmoid(bottleneck.to(tl.float32))
    gated = out.to(tl.float32)
    if channel is not None:
        gated *= 2 * tl.sigmoid(_logits(hidden, channel, column, column_ok, rank_at, RANK))
    if scalar is not None:
        gated *= _scalar_gate(hidden, scalar, rank_at, RANK)[:, None]
    tl.store(y + at, gated.to(y.dtype.element_ty), mask=ok)


@triton.jit
def _backward_rows_kernel(
    grad,
    z,
    u,
    channel,
    scalar,
    to_z,
    to_u,
    to_scalar,
    tokens,
    out_features,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute, for some tokens, the gradients of z, u and the scalar gate's logit. dg / dlogit = g (1 - g / 2)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rank_at = tl.arange(0, RANK_PAD)
    row_ok, rank_ok = row < tokens, rank_at < RANK
    thin_at = row[:, None] * RANK + rank_at[None, :]
    thin_ok = row_ok[:, None] & rank_ok[None, :]
    hidden = tl.sigmoid(tl.load(u + thin_at, mask=thin_ok, other=0.0).to(tl.float32))
    to_hidden = tl.zeros((ROWS, RANK_PAD), tl.float32)
    along = tl.zeros((ROWS,), tl.float32)
    gate_s = tl.full((ROWS,), 1.0, tl.float32)
    if scalar is not None:
        gate_s = _scalar_gate(hidden, scalar, rank_at, RANK)
    for start in range(0, out_features, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        column_ok = column < out_features
        at = row[:, None] * out_features + column[None, :]
        ok = row_ok[:, None] & column_ok[None, :]
        upstream = tl.load(grad + at, mask=ok, other=0.0).to(tl.float32)
        product = upstream * tl.load(z + at, mask=ok, other=0.0).to(tl.float32)
        upstream *= gate_s[:, None]
        if channel is not None:
            gate_c = 2 * tl.sigmoid(_logits(hidden, channel, column, column_ok, rank_at, RANK))
            upstream *= gate_c
            product *= gate_c
            up = tl.load(
                channel + column[:, None] * RANK + rank_at[None, :],
                mask=column_ok[:, None] & rank_ok[None, :],
                other=0.0,
            )
            logits = product * (1 - gate_c / 2) * gate_s[:, None]
            to_hidden = tl.dot(logits, up, to_hidden, input_precision="tf32x3")
        along += tl.sum(product, 1)
        tl.store(to_z + at, upstream.to(to_z.dtype.element_ty), mask=ok)
    if scalar is not None:
        logit = along * gate_s * (1 - gate_s / 2)
        tl.store(to_scalar + row, logit, mask=row_ok)
        weights = tl.load(scalar + rank_at, mask=rank_ok, other=0.0)
        to_hidden += logit[:, None] * weights[None, :]
    tl.store(to_u + thin_at, (to_hidden * hidden * (1 - hidden)).to(to_u.dtype.element_ty), mask=thin_ok)


@triton.jit
def _backward_channel_kernel(
    grad,
    z,
    u,
    channel,
    scalar,
    to_channel,
    tokens,
    out_features,
    per_part,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute, for some channels, one part of the tokens' contribution to the gradient of B."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rank_at = tl.arange(0, RANK_PAD)
    column_ok, rank_ok = column < out_features, rank_at < RANK
    first = tl.program_id(1).to(tl.int64) * per_part
    total = tl.zeros((COLUMNS, RANK_PAD), tl.float32)
    for start in range(0, per_part, ROWS):
        row = first + start + tl.arange(0, ROWS)
        row_ok = row < tokens
        ok = row_ok[:, None] & column_ok[None, :]
        at = row[:, None] * out_features + column[None, :]
        thin = tl.load(u + row[:, None] * RANK + rank_at[None, :], mask=row_ok[:, None] & rank_ok[None, :], other=0.0)
        hidden = tl.sigmoid(thin.to(tl.float32))
        logits = tl.load(grad + at, mask=ok, other=0.0).to(tl.float32) * tl.load(z + at, mask=ok, other=0.0).to(
            tl.float32
        )
        gate_c = 2 * tl.sigmoid(_logits(hidden, channel, column, column_ok, rank_at, RANK))
        logits *= gate_c * (1 - gate_c / 2)
        if scalar is not None:
            logits *= _scalar_gate(hidden, scalar, rank_at, RANK)[:, None]
        total = tl.dot(tl.trans(logits), hidden, total, input_precision="tf32x3")
    at = (tl.program_id(1).to(tl.int64) * out_features + column[:, None]) * RANK + rank_at[None, :]
    tl.store(to_channel + at, total, mask=column_ok[:, None] & rank_ok[None, :])


@torch.library.custom_op("relinear::modulated_linear", mutates_args=())
def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    channel: Tensor | None,
    scalar: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, z, u) for x (N, I); z and u, for the backward pass, are empty unless ``keep``.

    ``channel`` and ``scalar`` are alpha B in float32.
    """
    tokens, in_features = x.shape
    out_features, rank = weight.shape[0], down.shape[0]
    y = tiles.empty(x, tokens, out_features)
    z, u = (tiles.empty(x, tokens, size) if keep else tiles.empty(x, 0) for size in (out_features, rank))
    tensors = x, weight, bias, down, channel, scalar, y, *((z, u) if keep else (None, None))
    sizes, ranks = (tokens, in_features, out_features), {"RANK": rank, "RANK_PAD": tiles.pad(rank)}
    tiles.launch(_forward_kernel, (tokens, out_features), x.dtype, *tensors, *sizes, **ranks)
    return y, z, u


@_forward.register_fake
def _(x, weight, bias, down, channel, scalar, keep):
    size = x.shape[0], weight.shape[0]
    z, u = (x.new_empty(size), x.new_empty(size[0], down.shape[0])) if keep else (x.new_empty(0), x.new_empty(0))
    return x.new_empty(size), z, u


@torch.library.custom_op("relinear::modulated_linear_backward", mutates_args=())
def _backward(
    grad: Tensor, z: Tensor, u: Tensor, channel: Tensor | None, scalar: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of z (N, O), u (N, R), channel (O, R) and the scalar gate's logit (N,); empty if absent."""
    (tokens, out_features), rank = z.shape, u.shape[1]
    wide = torch.float32
    to_z, to_u = torch.empty_like(z), torch.empty_like(u)
    to_scalar = tiles.empty(z, 0 if scalar is None else tokens, dtype=wide)
    tile_rows = min(32, tiles.rows(tokens))
    shared = {"RANK": rank, "RANK_PAD": tiles.pad(rank), "ROWS": tile_rows, "COLUMNS": 64, "num_warps": 4}
    inputs = grad, z, u, channel, scalar
    results = to_z, to_u, None if scalar is None else to_scalar
    _backward_rows_kernel[(tiles.cdiv(tokens, tile_rows),)](*inputs, *results, tokens, out_features, **shared)
    if channel is None:
        return to_z, to_u, tiles.empty(z, 0, rank, dtype=wide), to_scalar
    per_part = tile_rows * tiles.cdiv(tokens, tile_rows * PARTS)
    parts = tiles.cdiv(tokens, per_part)
    partial = tiles.empty(z, parts, out_features, rank, dtype=wide)
    _backward_channel_kernel[(tiles.cdiv(out_features, 64), parts)](
        *inputs, partial, tokens, out_features, per_part, **shared
    )
    return to_z, to_u, partial.sum(0), to_scalar


@_backward.register_fake
def _(grad, z, u, channel, scalar):
    wide = {"dtype": torch.float32}
    to_channel = z.new_empty(0 if channel is None else z.shape[1], u.shape[1], **wide)
    return (
        torch.empty_like(z),
        torch.empty_like(u),
        to_channel,
        z.new_empty(0 if scalar is None else z.shape[0], **wide),
    )


def _setup(ctx, inputs, output):
    assert inputs[-1], "modulated_linear needs keep=True where gradients are wanted"
    save(ctx, inputs, *output[1:])


def _reference(x, weight, bias, down, channel, scalar, keep) -> Tensor:
    """Return the first result of ``_forward``."""
    return reference.modulated_linear(x, weight, bias, down, channel, scalar)


@differentiable_as(_reference)
def _differentiate(ctx, grad, _z, _u):
    x, weight, _, down, channel, scalar, _, z, u = ctx.saved_tensors
    need = ctx.needs_input_grad
    to_z, to_u, to_channel, logit = _backward(grad.contiguous(), z, u, channel, scalar)
    to_x = torch.addmm(to_z @ weight, to_u, down) if need[0] else None
    to_scalar = None if scalar is None else logit[None, :] @ torch.sigmoid(u.float())
    return (
        to_x,
        to_z.T @ x if need[1] else None,
        to_z.sum(0) if need[2] else None,
        to_u.T @ x if need[3] else None,
        None if channel is None else to_channel,
        to_scalar,
        None,
    )


_forward.register_autograd(_differentiate, setup_context=_setup)


def modulated_linear(x, weight, bias, down, channel, scalar, channel_alpha=1.0, scalar_alpha=1.0) -> Tensor:
    """Compute ``functional.transponder.modulated_linear`` (same arguments and result)."""
    x, weight, bias, down = autocasted(x, weight, bias, down)
    ups = [
        None if up is None else (alpha * up.float()).contiguous()
        for up, alpha in ((channel, channel_alpha), (scalar, scalar_alpha))
    ]
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    tensors = (flat, weight.contiguous(), bias, down.contiguous(), *ups)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return _forward(*tensors, keep)[0].view(*x.shape[:-1], weight.shape[0])
