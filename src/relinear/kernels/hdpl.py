"""Twin of ``functional.hdpl`` without transposes: blocks write their part, the context path is added in place."""

# Legend: N tokens, I in, O out, K blocks, R latent size

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from relinear.functional import hdpl as reference
from relinear.functional.hdpl import HDPLOutput, hdpl_sample
from relinear.kernels.autograd import differentiable_as, lowered, save
from relinear.kernels.choice import (
    against_few_rows,
    against_native_kl,
    against_native_product,
    against_native_sample,
    against_opaque,
    against_triton,
    took,
)
from relinear.kernels.cpu.block_diagonal import block_diagonal_product, block_gradient
from relinear.kernels.cpu.products import deepest, product, product_gradient
from relinear.kernels.cpu.weight_gradient import weight_gradient
from relinear.kernels.native import kernels

__all__ = ["few_rows", "hdpl", "token_kl"]

#: tokens from which one C++ kernel takes less time than a product a block and one for the latents: it copies weights
FEWEST_NATIVE_TOKENS = 512
#: inputs of an output (of its block and latent dimensions) up to which it does, for outputs and for gradients of
#: weights: it multiplies long sums more slowly
DEEPEST_NATIVE_PRODUCT, DEEPEST_NATIVE_GRADIENT = 384, 256
#: entries of mu from which the KL is that of the C++ kernel, in place of eight passes
FEWEST_NATIVE_LATENTS = 1 << 14


def hdpl(
    x: Tensor,
    blocks: Tensor,
    mu_weight: Tensor,
    mu_bias: Tensor,
    logvar_weight: Tensor | None,
    logvar_bias: Tensor | None,
    decoder: Tensor,
    bias: Tensor | None = None,
    noise: Tensor | None = None,
) -> HDPLOutput:
    """``functional.hdpl.hdpl`` with a backward of its own.

    The reference turns the block-diagonal product into a batched one, which copies input and output into another
    layout; here each block multiplies a strided view and writes to one. Compilers make in-place products into copies
    again, so under ``torch.compile`` it is the reference that runs.
    """
    given = x, blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias
    triton = against_triton("hdpl", *given, outputs=decoder.shape[0])
    if not triton:
        took("hdpl", "Triton", x)
        from relinear.kernels.triton import hdpl as fused

        return fused.hdpl(x, blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias, noise)
    few = "sampled" if noise is not None else against_few_rows(x, blocks, mu_weight, mu_bias, decoder, bias)
    if not few:
        took("hdpl", "C++ for a few rows", x, triton=triton)
        return _few_rows(x, blocks, mu_weight, mu_bias, decoder, bias)
    opaque = against_opaque()
    took("hdpl", "reference" if opaque else "products in place", x, triton=triton, few=few, opaque=opaque)
    if opaque:
        return reference.hdpl(x, blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias, noise)
    leading, kind = x.shape[:-1], x.device.type
    weights = blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias
    tensors = lowered(x.reshape(-1, x.shape[-1]), *weights)
    with torch.autocast(kind, enabled=False):
        run: Any = _HDPL.apply if torch.is_grad_enabled() else _results
        results = run(*tensors, None if noise is None else noise.reshape(-1, noise.shape[-1]))
    y, z, *posterior = (result.view(*leading, result.shape[-1]) for result in results)
    return HDPLOutput(y, z, *posterior) if posterior else HDPLOutput(y, z, z, None)


def _few_rows(x, blocks, mu_weight, mu_bias, decoder, bias) -> HDPLOutput:
    rows, leading = x.reshape(-1, x.shape[-1]).contiguous(), x.shape[:-1]
    y = rows.new_empty(rows.shape[0], decoder.shape[0])
    z = rows.new_empty(rows.shape[0], mu_weight.shape[0])
    kernels().hdpl_rows(y, z, rows, blocks, mu_weight, mu_bias, decoder, bias)
    z = z.view(*leading, z.shape[1])
    return HDPLOutput(y.view(*leading, y.shape[1]), z, z, None)


def few_rows(
    x: Tensor, blocks: Tensor, mu_weight: Tensor, mu_bias: Tensor, decoder: Tensor, bias: Tensor | None
) -> Callable[[Tensor], Tensor] | None:
    """y without noise as a function of a few rows like x, one call in C++; None where that is not to run.

    The parameters are asked about once, here: they must stay. Whoever calls asks ``against_rows`` every time.
    """
    if against_few_rows(x, blocks, mu_weight, mu_bias, decoder, bias):
        return None
    layer = kernels().hdpl_layer.default

    def run(x: Tensor) -> Tensor:
        took("hdpl", "C++ for a few rows", x)
        return layer(x, blocks, mu_weight, mu_bias, decoder, bias)

    return run


def _against_block_low_rank(x: Tensor, depth: int) -> str:
    return against_native_product(x, depth, deepest(DEEPEST_NATIVE_PRODUCT), FEWEST_NATIVE_TOKENS)


def _block_low_rank(x: Tensor, s: Tensor, blocks: Tensor, up: Tensor, bias: Tensor | None = None) -> Tensor:
    """diag(blocks) x + up s + bias (N, O), without a graph, of x (N, I), blocks (K, O/K, I/K), s (N, R), up (O, R)."""
    native = _against_block_low_rank(x, blocks.shape[2] + up.shape[1])
    took("hdpl's blocks and decoder", "a product a block" if native else "C++", x, native=native)
    if not native:
        y = x.new_empty(x.shape[0], up.shape[0])
        bias = None if bias is None else bias.contiguous()
        kernels().block_low_rank(y, x.contiguous(), blocks, s.contiguous(), up, bias)
        return y
    return block_diagonal_product(x, blocks, bias).addmm_(s, up.T)


def _decoder_gradients(
    grad: Tensor, x: Tensor, s: Tensor, blocks: Tensor, decoder: Tensor, need: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of blocks and decoder, those that are needed, from that of ``_block_low_rank``'s result."""
    depth = blocks.shape[2] + decoder.shape[1]
    frozen = "" if all(need) else "not all gradients are needed"
    native = frozen or against_native_product(x, depth, deepest(DEEPEST_NATIVE_GRADIENT), FEWEST_NATIVE_TOKENS)
    took("hdpl's gradients of weights", "a product a block" if native else "C++", x, native=native)
    if not native:
        found = [torch.empty_like(w, memory_format=torch.contiguous_format) for w in (blocks, decoder)]
        kernels().block_low_rank_gradient(*found, grad.contiguous(), x.contiguous(), s.contiguous())
        return found[0], found[1]
    to_blocks = block_gradient(grad, x, blocks.shape[0]) if need[0] else None
    return to_blocks, weight_gradient(grad, s) if need[1] else None


def _sample(x: Tensor, mu: Tensor, logvar: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """z and silu(z) (N, R) of a layer with inputs x (N, I)."""
    native = against_native_sample(x, noise)
    took("hdpl's sample", "torch's operations" if native else "C++", x, native=native)
    if not native:
        z, s = (x.new_empty(mu.shape) for _ in range(2))
        kernels().sample(z, s, mu, logvar, noise.contiguous())
        return z, s
    z = hdpl_sample(mu, logvar, noise)
    return z, silu(z)


def _posterior_gradient(
    x: Tensor,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    z: Tensor,
    posterior: list[Tensor],
    noise: Tensor | None,
    need_z: bool,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of mu, or those of mu and logvar side by side (N, 2 R), and that of z if it is needed.

    Args:
        x: (N, I).
        grads: of silu(z), z, mu and logvar.
        z: (N, R).
        posterior: mu, or mu and logvar.
        noise: (N, R) where there is a logvar.
        need_z: whether the gradient of z is needed by itself.
    """
    to_s, to_z, *to_posterior = grads
    if noise is not None and to_s is not None and to_z is None and not need_z and not against_native_sample(x, noise):
        total = x.new_empty(len(x), 2 * z.shape[1])
        kernels().sample_backward(total, to_s, *posterior, noise.contiguous())
    else:
        if to_s is not None:
            through = torch.ops.aten.silu_backward(to_s, z)
            to_z = through if to_z is None else through.add_(to_z)
        if to_z is None:
            total = x.new_zeros(len(x), len(posterior) * z.shape[1])
        elif noise is None:
            total = to_z.clone() if to_s is None else to_z
        else:
            to_logvar = posterior[1].to(noise.dtype).mul(0.5).exp_().mul_(noise).mul_(0.5).mul_(to_z)
            total = torch.cat([to_z, to_logvar.to(z.dtype)], 1)
    for part, grad in zip(total.chunk(len(posterior), 1), to_posterior):
        if grad is not None:
            part += grad
    return total, to_z


def _results(x, blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias, noise) -> tuple[Tensor, ...]:
    """(y, z, mu, logvar), or (y, mu) without noise, of a matrix x (N, I) in one dtype; without a graph."""
    if noise is None:
        mu = product(x, mu_weight, mu_bias)
        return _block_low_rank(x, silu(mu), blocks, decoder, bias), mu
    # One product for both: x is read once, and the output is twice as wide.
    weight, offset = torch.cat([mu_weight, logvar_weight]), torch.cat([mu_bias, logvar_bias])
    mu, logvar = product(x, weight, offset).chunk(2, dim=1)
    z, s = _sample(x, mu, logvar, noise)
    return _block_low_rank(x, s, blocks, decoder, bias), z, mu, logvar


class _HDPL(torch.autograd.Function):
    """``_results`` with a graph."""

    # torch looks up the names of arguments at every call where a context is set up by a function of its own
    @staticmethod
    def forward(ctx: Any, *given):  # type: ignore[override]
        results = _results(*given)
        ctx.set_materialize_grads(False)
        save(ctx, given, *(results[1:] if given[-1] is None else results[2:]))  # mu, and logvar with noise
        return results

    @staticmethod
    @differentiable_as(reference.hdpl_results)
    def backward(ctx: Any, grad_y, grad_z, grad_mu=None, grad_logvar=None):  # type: ignore[override]
        x, blocks, mu_weight, _, logvar_weight, _, decoder, _, noise, *posterior = ctx.saved_tensors
        need = ctx.needs_input_grad
        grads: list[Tensor | None] = [None] * 9
        if noise is None:
            z, s = posterior[0], silu(posterior[0])
        else:
            z, s = _sample(x, posterior[0], posterior[1], noise)
        grad_s = None
        if grad_y is not None:
            grads[1], grads[6] = _decoder_gradients(grad_y, x, s, blocks, decoder, (need[1], need[6]))
            grads[7] = grad_y.sum(0) if need[7] else None
            grad_s = product(grad_y, decoder.T)
        del s
        gradient, to_z = _posterior_gradient(x, (grad_s, grad_z, grad_mu, grad_logvar), z, posterior, noise, need[8])
        if need[8] and to_z is not None:
            grads[8] = posterior[1].to(noise.dtype).mul(0.5).exp_().mul_(to_z)
        del z, to_z, grad_s, grad_z, grad_mu, grad_logvar  # the gradient of x is large: nothing else may be alive then
        weights = (mu_weight,) if noise is None else (mu_weight, logvar_weight)
        if any(need[2:6]):
            of_weights, of_biases = product_gradient(gradient, x), gradient.sum(0)
            grads[2 : 2 + 2 * len(weights) : 2] = of_weights.chunk(len(weights))
            grads[3 : 3 + 2 * len(weights) : 2] = of_biases.chunk(len(weights))
        if need[0]:
            if grad_y is not None and not _against_block_low_rank(grad_y, blocks.shape[1] + gradient.shape[1]):
                grads[0] = _block_low_rank(grad_y, gradient, blocks.mT, torch.cat(weights).T)
            else:
                to_x = torch.zeros_like(x) if grad_y is None else block_diagonal_product(grad_y, blocks.mT)
                for weight, part in zip(weights, gradient.chunk(len(weights), 1), strict=True):
                    to_x.addmm_(part, weight)  # one after the other: no copy of both
                grads[0] = to_x
        return tuple(grad if needed else None for grad, needed in zip(grads, need, strict=True))


def token_kl(mu: Tensor, logvar: Tensor) -> Tensor:
    """``functional.hdpl.token_kl`` in few passes over memory, with a backward of its own.

    Where the loss is clamped for every token, as with the paper's bound nearly always, the backward costs nothing.
    """
    if against_opaque():
        return reference.token_kl(mu, logvar)
    run: Any = _TokenKL.apply if torch.is_grad_enabled() else _token_kl
    kl = run(*(t.reshape(-1, t.shape[-1]) for t in (mu, logvar)))
    return kl.view(mu.shape[:-1])


def _token_kl(mu: Tensor, logvar: Tensor) -> Tensor:
    """The KL (N,) of matrices (N, R), without a graph."""
    native = against_native_kl(mu, logvar, FEWEST_NATIVE_LATENTS)
    took("hdpl's KL", "torch's operations" if native else "C++", mu, native=native)
    if not native:
        kl = torch.empty(len(mu), dtype=torch.float32)  # whatever torch's default is
        kernels().token_kl(kl, mu, logvar)
        return kl
    mu, logvar = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (mu, logvar))
    variance = torch.exp(logvar).sum(-1)
    return torch.linalg.vector_norm(mu, dim=-1).square_().add_(variance).sub_(logvar.sum(-1) + mu.shape[-1]).mul_(0.5)


class _TokenKL(torch.autograd.Function):
    """``_token_kl`` with a graph."""

    @staticmethod
    def forward(ctx: Any, mu, logvar):  # type: ignore[override]
        save(ctx, (mu, logvar))
        return _token_kl(mu, logvar)

    @staticmethod
    @differentiable_as(reference.token_kl)
    def backward(ctx: Any, grad):  # type: ignore[override]
        mu, logvar = ctx.saved_tensors
        # On a GPU the question would cost more than the answer saves: it would wait for the device.
        if grad.device.type == "cpu" and not grad.any():
            return None, None  # rather than zeros to be added
        grad = grad.unsqueeze(-1)
        change = torch.exp(logvar.to(grad.dtype)).sub_(1).mul_(0.5 * grad)
        return (mu * grad).to(mu.dtype), change.to(logvar.dtype)
