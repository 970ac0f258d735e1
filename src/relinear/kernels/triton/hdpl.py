"""Compute HDPL in two kernels: the latent with its noise, then the sum of both paths (not tuned)."""

# Legend: N tokens, I in, O out, K blocks, R latent size

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, silu

from relinear.functional.hdpl import HDPLOutput, hdpl_results
from relinear.kernels.autograd import autocasted, differentiable_as, save
from relinear.kernels.triton import tiles
from relinear.kernels.triton.tiles import add_product


@triton.jit
def _encode_kernel(
    x,
    mu_weight,
    mu_bias,
    logvar_weight,
    logvar_bias,
    noise,
    z,
    mu,
    logvar,
    tokens,
    in_features,
    rank,
    TILE: tl.constexpr,
):
    """Compute mu, log sigma^2 and z = mu + sigma noise: two products that share their reads of x."""
    row = tl.program_id(0).to(tl.int64) * TILE.ROWS + tl.arange(0, TILE.ROWS)
    column = tl.program_id(1) * TILE.COLUMNS + tl.arange(0, TILE.COLUMNS)
    row_ok, column_ok = row < tokens, column < rank
    mean = tl.zeros((TILE.ROWS, TILE.COLUMNS), tl.float32)
    log_var = tl.zeros((TILE.ROWS, TILE.COLUMNS), tl.float32)
    for start in range(0, in_features, TILE.STEP):
        k = start + tl.arange(0, TILE.STEP)
        k_ok = k < in_features
        xs = tl.load(x + row[:, None] * in_features + k[None, :], mask=row_ok[:, None] & k_ok[None, :], other=0.0)
        at, ok = column[None, :] * in_features + k[:, None], column_ok[None, :] & k_ok[:, None]
        mean = tl.dot(xs, tl.load(mu_weight + at, mask=ok, other=0.0), mean, input_precision=TILE.PRECISION)
        log_var = tl.dot(xs, tl.load(logvar_weight + at, mask=ok, other=0.0), log_var, input_precision=TILE.PRECISION)
    mean += tl.load(mu_bias + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    log_var += tl.load(logvar_bias + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    # z is sampled from the rounded mean and variance, which the regulariser and the backward pass use
    mean, log_var = mean.to(mu.dtype.element_ty), log_var.to(logvar.dtype.element_ty)
    at, ok = row[:, None] * rank + column[None, :], row_ok[:, None] & column_ok[None, :]
    drawn = tl.load(noise + at, mask=ok, other=0.0).to(tl.float32)
    sample = mean.to(tl.float32) + tl.exp(0.5 * log_var.to(tl.float32)) * drawn
    tl.store(mu + at, mean, mask=ok)
    tl.store(logvar + at, log_var, mask=ok)
    tl.store(z + at, sample.to(z.dtype.element_ty), mask=ok)


@triton.jit
def _decode_kernel(x, z, blocks, decoder, bias, y, tokens, in_block, out_block, count, rank, TILE: tl.constexpr):
    """Compute y = W_k x_k + D silu(z) + bias for some tokens and some rows of one block."""
    row = tl.program_id(0).to(tl.int64) * TILE.ROWS + tl.arange(0, TILE.ROWS)
    block = tl.program_id(2)
    local = tl.program_id(1) * TILE.COLUMNS + tl.arange(0, TILE.COLUMNS)
    row_ok, column_ok = row < tokens, local < out_block
    column = block * out_block + local
    total = tl.zeros((TILE.ROWS, TILE.COLUMNS), tl.float32)
    source, width = x + block * in_block, count * in_block
    total = add_product(total, source, width, row, row_ok, blocks, in_block, 1, column, column_ok, in_block, TILE)
    for start in range(0, rank, TILE.STEP):
        k = start + tl.arange(0, TILE.STEP)
        k_ok = k < rank
        latent = tl.load(z + row[:, None] * rank + k[None, :], mask=row_ok[:, None] & k_ok[None, :], other=0.0)
        wide = latent.to(tl.float32)
        part = tl.load(
            decoder + column[None, :] * rank + k[:, None], mask=column_ok[None, :] & k_ok[:, None], other=0.0
        )
        total = tl.dot((wide * tl.sigmoid(wide)).to(latent.dtype), part, total, input_precision=TILE.PRECISION)
    if bias is not None:
        total += tl.load(bias + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    at = row[:, None] * (count * out_block) + column[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])


@triton.jit
def _latent_gradient_kernel(
    grad,
    decoder,
    z,
    logvar,
    noise,
    grad_z,
    grad_mu,
    grad_logvar,
    to_mu,
    to_logvar,
    to_noise,
    tokens,
    out_features,
    rank,
    TILE: tl.constexpr,
):
    """Compute the gradients of mu, log sigma^2 and the noise through D and silu, after the product grad D."""
    row = tl.program_id(0).to(tl.int64) * TILE.ROWS + tl.arange(0, TILE.ROWS)
    column = tl.program_id(1) * TILE.COLUMNS + tl.arange(0, TILE.COLUMNS)
    row_ok, column_ok = row < tokens, column < rank
    total = tl.zeros((TILE.ROWS, TILE.COLUMNS), tl.float32)
    total = add_product(total, grad, out_features, row, row_ok, decoder, 1, rank, column, column_ok, out_features, TILE)
    at, ok = row[:, None] * rank + column[None, :], row_ok[:, None] & column_ok[None, :]
    latent = tl.load(z + at, mask=ok, other=0.0).to(tl.float32)
    share = tl.sigmoid(latent)
    total *= share * (1 + latent * (1 - share))
    if grad_z is not None:
        total += tl.load(grad_z + at, mask=ok, other=0.0).to(tl.float32)
    if noise is not None:
        scaled = total * tl.exp(0.5 * tl.load(logvar + at, mask=ok, other=0.0).to(tl.float32))
        if to_noise is not None:
            tl.store(to_noise + at, scaled.to(to_noise.dtype.element_ty), mask=ok)
        scaled *= 0.5 * tl.load(noise + at, mask=ok, other=0.0).to(tl.float32)
        if grad_logvar is not None:
            scaled += tl.load(grad_logvar + at, mask=ok, other=0.0).to(tl.float32)
        tl.store(to_logvar + at, scaled.to(to_logvar.dtype.element_ty), mask=ok)
    if grad_mu is not None:
        total += tl.load(grad_mu + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(to_mu + at, total.to(to_mu.dtype.element_ty), mask=ok)


@triton.jit
def _input_gradient_kernel(
    grad,
    blocks,
    to_mu,
    mu_weight,
    to_logvar,
    logvar_weight,
    to_x,
    tokens,
    in_block,
    out_block,
    count,
    rank,
    TILE: tl.constexpr,
):
    """Compute the gradient of x: the sum of those through both encoders and through the blocks."""
    row = tl.program_id(0).to(tl.int64) * TILE.ROWS + tl.arange(0, TILE.ROWS)
    block = tl.program_id(2)
    local = tl.program_id(1) * TILE.COLUMNS + tl.arange(0, TILE.COLUMNS)
    row_ok, column_ok = row < tokens, local < in_block
    in_features = count * in_block
    column = block * in_block + local
    total = tl.zeros((TILE.ROWS, TILE.COLUMNS), tl.float32)
    source, weight = grad + block * out_block, blocks + block * out_block * in_block
    total = add_product(
        total, source, count * out_block, row, row_ok, weight, 1, in_block, local, column_ok, out_block, TILE
    )
    total = add_product(total, to_mu, rank, row, row_ok, mu_weight, 1, in_features, column, column_ok, rank, TILE)
    if to_logvar is not None:
        total = add_product(
            total, to_logvar, rank, row, row_ok, logvar_weight, 1, in_features, column, column_ok, rank, TILE
        )
    at = row[:, None] * in_features + column[None, :]
    tl.store(to_x + at, total.to(to_x.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])


@torch.library.custom_op("relinear::hdpl_encode", mutates_args=())
def _encode(
    x: Tensor, mu_weight: Tensor, mu_bias: Tensor, logvar_weight: Tensor, logvar_bias: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (z, mu, logvar), each (N, R), for x (N, I)."""
    (tokens, in_features), rank = x.shape, mu_weight.shape[0]
    z, mu, logvar = (tiles.empty(x, tokens, rank) for _ in range(3))
    arguments = x, mu_weight, mu_bias, logvar_weight, logvar_bias, noise, z, mu, logvar, tokens, in_features, rank
    tiles.launch(_encode_kernel, (tokens, rank), x.dtype, *arguments, COLUMNS=64)
    return z, mu, logvar


@_encode.register_fake
def _(x, mu_weight, mu_bias, logvar_weight, logvar_bias, noise):
    z, mu, logvar = (x.new_empty(noise.shape) for _ in range(3))
    return z, mu, logvar


@torch.library.custom_op("relinear::hdpl_decode", mutates_args=())
def _decode(x: Tensor, z: Tensor, blocks: Tensor, decoder: Tensor, bias: Tensor | None) -> Tensor:
    """Return y (N, O) for x (N, I) and z (N, R)."""
    tokens, (count, out_block, in_block) = x.shape[0], blocks.shape
    y = tiles.empty(x, tokens, count * out_block)
    arguments = x, z, blocks, decoder, bias, y, tokens, in_block, out_block, count, z.shape[1]
    tiles.launch(_decode_kernel, (tokens, out_block, count), x.dtype, *arguments)
    return y


@_decode.register_fake
def _(x, z, blocks, decoder, bias):
    return x.new_empty(x.shape[0], decoder.shape[0])


@torch.library.custom_op("relinear::hdpl_backward", mutates_args=())
def _backward(
    grad: Tensor,
    grad_z: Tensor | None,
    grad_mu: Tensor | None,
    grad_logvar: Tensor | None,
    z: Tensor,
    logvar: Tensor | None,
    noise: Tensor | None,
    blocks: Tensor,
    mu_weight: Tensor,
    logvar_weight: Tensor | None,
    decoder: Tensor,
    to_noise: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x (N, I), mu, logvar and the noise, all (N, R); without noise the last two are empty."""
    (tokens, rank), (count, out_block, in_block) = z.shape, blocks.shape
    sampled = noise is not None
    to_x, to_mu = tiles.empty(z, tokens, count * in_block), torch.empty_like(z)
    to_logvar = torch.empty_like(z) if sampled else tiles.empty(z, 0)
    of_noise = torch.empty_like(noise) if noise is not None and to_noise else tiles.empty(z, 0)
    results = to_mu, to_logvar if sampled else None, of_noise if sampled and to_noise else None
    upstream = grad, decoder, z, logvar, noise, grad_z, grad_mu, grad_logvar
    arguments = *upstream, *results, tokens, count * out_block, rank
    tiles.launch(_latent_gradient_kernel, (tokens, rank), z.dtype, *arguments, COLUMNS=64)
    encoders = to_mu, mu_weight, results[1], logvar_weight
    sizes = tokens, in_block, out_block, count, rank
    tiles.launch(_input_gradient_kernel, (tokens, in_block, count), z.dtype, grad, blocks, *encoders, to_x, *sizes)
    return to_x, to_mu, to_logvar, of_noise


@_backward.register_fake
def _(grad, grad_z, grad_mu, grad_logvar, z, logvar, noise, blocks, mu_weight, logvar_weight, decoder, to_noise):
    sampled = noise is not None
    to_logvar = torch.empty_like(z) if sampled else z.new_empty(0)
    of_noise = torch.empty_like(noise) if sampled and to_noise else z.new_empty(0)
    return z.new_empty(z.shape[0], mu_weight.shape[1]), torch.empty_like(z), to_logvar, of_noise


def _block_gradient(grad: Tensor, x: Tensor, count: int) -> Tensor:
    """Return the gradient (K, O/K, I/K) of K = ``count`` blocks from their input x (N, I) and the output's gradient."""
    return torch.einsum("nko,nki->koi", grad.unflatten(1, (count, -1)), x.unflatten(1, (count, -1)))


class _HDPL(torch.autograd.Function):
    """Return (y, mu), or (y, z, mu, logvar) with noise; one graph node for both kernels, so that x has one gradient."""

    @staticmethod
    def forward(x, blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias, noise):  # type: ignore[override]
        if noise is None:
            mu = linear(x, mu_weight, mu_bias)
            return _decode(x, mu, blocks, decoder, bias), mu
        z, mu, logvar = _encode(x, mu_weight, mu_bias, logvar_weight, logvar_bias, noise)
        return _decode(x, z, blocks, decoder, bias), z, mu, logvar

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        save(ctx, inputs, output[1], *output[3:])

    @staticmethod
    @differentiable_as(hdpl_results)
    def backward(ctx, grad, grad_z, grad_mu=None, grad_logvar=None):  # type: ignore[override]
        x, blocks, mu_weight, _, logvar_weight, _, decoder, _, noise, z, *logvar = ctx.saved_tensors
        need = ctx.needs_input_grad
        grad = x.new_zeros(x.shape[0], decoder.shape[0]) if grad is None else grad.contiguous()
        latent = [None if g is None else g.contiguous() for g in (grad_z, grad_mu, grad_logvar)]
        weights = blocks, mu_weight, logvar_weight, decoder
        to_x, to_mu, to_logvar, to_noise = _backward(
            grad, *latent, z, logvar[0] if logvar else None, noise, *weights, need[8]
        )
        sampled = noise is not None
        return (
            to_x if need[0] else None,
            _block_gradient(grad, x, blocks.shape[0]) if need[1] else None,
            to_mu.T @ x if need[2] else None,
            to_mu.sum(0) if need[3] else None,
            to_logvar.T @ x if sampled and need[4] else None,
            to_logvar.sum(0) if sampled and need[5] else None,
            grad.T @ silu(z) if need[6] else None,
            grad.sum(0) if need[7] else None,
            to_noise if sampled and need[8] else None,
        )


def hdpl(x, blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias=None, noise=None) -> HDPLOutput:
    """Compute ``functional.hdpl.hdpl`` (same arguments and result)."""
    leading = x.shape[:-1]
    weights = autocasted(x, blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias)
    inputs = [None if t is None else t.contiguous() for t in weights]
    inputs[0] = inputs[0].reshape(-1, x.shape[-1])
    flat_noise = None if noise is None else noise.reshape(-1, noise.shape[-1]).contiguous()
    with torch.autocast(x.device.type, enabled=False):
        results = _HDPL.apply(*inputs, flat_noise)
    y, z, *posterior = (result.view(*leading, result.shape[-1]) for result in results)
    return HDPLOutput(y, z, *posterior) if posterior else HDPLOutput(y, z, z, None)
