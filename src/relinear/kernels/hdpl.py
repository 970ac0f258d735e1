"""Twin of ``functional.hdpl`` without transposes: blocks write their part, the context path is added in place."""

# Legend: N tokens, I in, O out, K blocks, R latent size

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from relinear.functional import hdpl as reference
from relinear.functional.hdpl import HDPLOutput
from relinear.kernels import native, triton
from relinear.kernels.autograd import as_given, differentiable_as, lowered, save
from relinear.kernels.cpu.block_diagonal import block_diagonal_product, block_gradient
from relinear.kernels.cpu.products import deepest, product, product_gradient
from relinear.kernels.forms import Call, Form, dispatch, refuses_small, shape_of, tell

__all__ = ["few_rows", "hdpl"]

#: tokens from which one C++ kernel takes less time than a product a block and one for the latents: it copies weights
FEWEST_NATIVE_TOKENS = 512
#: inputs of an output (of its block and latent dimensions) up to which it does: it multiplies long sums more slowly
DEEPEST_NATIVE_PRODUCT = 256


_refuses_triton = functools.partial(
    triton.refuses, kind="hdpl", tensors=8, outputs=lambda call: call.given[6].shape[0], most=2**41
)


def _triton(*given: Any) -> HDPLOutput:
    from relinear.kernels.triton import hdpl as fused

    return fused.hdpl(*given)


def _refuses_few_rows(call: Call) -> str:
    x, blocks, mu_weight, mu_bias, _, _, decoder, bias, noise = call.given
    return "sampled" if noise is not None else native.refuses_few_rows(x, blocks, mu_weight, mu_bias, decoder, bias)


def _few_rows(x, blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias, noise) -> HDPLOutput:
    y, z = native.kernels().hdpl_layer(x, blocks, mu_weight, mu_bias, decoder, bias)
    return HDPLOutput(y, z, z, None)


def _refuses_products(call: Call) -> str:
    blocks, decoder = call.given[1], call.given[6]
    if call.size < FEWEST_NATIVE_TOKENS * call.x.shape[-1]:
        return "too few tokens"
    if call.dtype != torch.float32:
        return "not in float32"
    if blocks.shape[2] + decoder.shape[1] > deepest(DEEPEST_NATIVE_PRODUCT):
        return "sums that are too long"
    return native.refuses(call)


def _refuses_in_place(call: Call) -> str:
    # a gradient of large blocks, which the reference gives transposed, is copied once more by whoever accumulates it
    return refuses_small(call, max(call.size, call.given[1].numel() // 4))


def _in_place(in_cpp: bool, x: Tensor, *others: Tensor | None) -> HDPLOutput:
    leading, (*weights, noise) = x.shape[:-1], others
    if torch.is_autocast_enabled(x.device.type):
        given = lowered(x, *weights)
        with as_given(x):
            return _in_place(in_cpp, *given, noise)
    noise = None if noise is None else noise.reshape(-1, noise.shape[-1])
    run: Any = _HDPL.apply if torch.is_grad_enabled() else _results
    given = x.reshape(-1, x.shape[-1]), *weights, noise
    y, z, *posterior = run(*given, deepest(DEEPEST_NATIVE_PRODUCT) if in_cpp else 0)
    y, z = y.view(*leading, y.shape[1]), z.view(*leading, z.shape[1])
    if not posterior:
        return HDPLOutput(y, z, z, None)
    mu, logvar = posterior
    return HDPLOutput(y, z, mu.view(z.shape), logvar.view(z.shape))


@dispatch(
    Form("Triton", _refuses_triton, _triton),
    Form("C++ for a few rows", _refuses_few_rows, _few_rows),
    Form("products in C++", _refuses_products, functools.partial(_in_place, True)),
    Form("products in place", _refuses_in_place, functools.partial(_in_place, False)),
    otherwise="reference",
)
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
    layout; in place each block multiplies a strided view and writes to one. Compilers make in-place products into
    copies again, so under ``torch.compile`` it is the reference that runs.
    """
    return reference.hdpl(x, blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias, noise)


def few_rows(
    x: Tensor, blocks: Tensor, mu_weight: Tensor, mu_bias: Tensor, decoder: Tensor, bias: Tensor | None
) -> Callable[[Tensor], Tensor] | None:
    """y without noise as a function of a few rows like x, one call in C++; None where that is not to run.

    The parameters are asked about once, here: they must stay. Whoever calls asks ``native.refuses_rows`` every time.
    """
    if native.refuses_few_rows(x, blocks, mu_weight, mu_bias, decoder, bias):
        return None
    layer = native.kernels().hdpl_layer.default
    tell("hdpl", "C++ for a few rows, prepared", shape_of(x), {})
    return lambda x: layer(x, blocks, mu_weight, mu_bias, decoder, bias)[0]


def _block_low_rank(x: Tensor, s: Tensor, blocks: Tensor, up: Tensor, bias: Tensor | None, in_cpp: bool) -> Tensor:
    """diag(blocks) x + up s + bias (N, O), without a graph, of x (N, I), blocks (K, O/K, I/K), s (N, R), up (O, R)."""
    if not in_cpp:
        return block_diagonal_product(x, blocks, bias).addmm_(s, up.T)
    y = x.new_empty(x.shape[0], up.shape[0])
    bias = None if bias is None else bias.contiguous()
    native.kernels().block_low_rank(y, x.contiguous(), blocks, s.contiguous(), up, bias)
    return y


def _decoder_gradients(
    grad: Tensor, x: Tensor, s: Tensor, blocks: Tensor, decoder: Tensor, need: tuple[bool, bool], in_cpp: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of blocks and decoder, those that are needed, from that of ``_block_low_rank``'s result."""
    if in_cpp and all(need):
        found = [torch.empty_like(w, memory_format=torch.contiguous_format) for w in (blocks, decoder)]
        native.kernels().block_low_rank_gradient(*found, grad.contiguous(), x.contiguous(), s.contiguous())
        return found[0], found[1]
    to_blocks = block_gradient(grad, x, blocks.shape[0]) if need[0] else None
    return to_blocks, grad.T @ s if need[1] else None


def _posterior_gradient(
    x: Tensor,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    z: Tensor,
    posterior: list[Tensor],
    noise: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of mu, or those of mu and logvar side by side (N, 2 R), and that of z.

    Args:
        x: (N, I).
        grads: of silu(z), z, mu and logvar.
        z: (N, R).
        posterior: mu, or mu and logvar.
        noise: (N, R) where there is a logvar.
    """
    to_s, to_z, *to_posterior = grads
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


def _sample(mu: Tensor, logvar: Tensor, noise: Tensor) -> Tensor:
    """``functional.hdpl.hdpl_sample``, with noise in single precision at least."""
    wide = noise.dtype
    return torch.addcmul(mu.to(wide), logvar.to(wide).mul(0.5).exp_(), noise).to(mu.dtype)


def _results(
    x, blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias, noise, deepest
) -> tuple[Tensor, ...]:
    """(y, z, mu, logvar), or (y, mu) without noise, of a matrix x (N, I) in one dtype; without a graph."""
    encoders, in_cpp = deepest == math.inf, blocks.shape[2] + decoder.shape[1] <= deepest
    if noise is None:
        mu = product(x, mu_weight, mu_bias, encoders)
        return _block_low_rank(x, silu(mu), blocks, decoder, bias, in_cpp), mu
    # One product for both: x is read once, and the output is twice as wide.
    weight, offset = torch.cat([mu_weight, logvar_weight]), torch.cat([mu_bias, logvar_bias])
    mu, logvar = product(x, weight, offset, encoders).chunk(2, dim=1)
    z = _sample(mu, logvar, noise)
    return _block_low_rank(x, silu(z), blocks, decoder, bias, in_cpp), z, mu, logvar


class _HDPL(torch.autograd.Function):
    """``_results`` with a graph."""

    # torch looks up the names of arguments at every call where a context is set up by a function of its own
    @staticmethod
    def forward(ctx: Any, *given):  # type: ignore[override]
        results = _results(*given)
        ctx.set_materialize_grads(False)
        save(ctx, given, *(results[1:] if given[8] is None else results[2:]))  # mu, and logvar with noise
        return results

    @staticmethod
    @differentiable_as(lambda *given: reference.hdpl_results(*given[:-1]))
    def backward(ctx: Any, grad_y, grad_z, grad_mu=None, grad_logvar=None):  # type: ignore[override]
        x, blocks, mu_weight, _, logvar_weight, _, decoder, _, noise, _, *posterior = ctx.saved_tensors
        need, deepest = ctx.needs_input_grad, ctx.plain[9]
        encoders = deepest == math.inf
        grads: list[Tensor | None] = [None] * 10
        z = posterior[0] if noise is None else _sample(posterior[0], posterior[1], noise)
        grad_s = None
        if grad_y is not None:
            in_cpp, wanted = blocks.shape[2] + decoder.shape[1] <= deepest, (need[1], need[6])
            grads[1], grads[6] = _decoder_gradients(grad_y, x, silu(z), blocks, decoder, wanted, in_cpp)
            grads[7] = grad_y.sum(0) if need[7] else None
            grad_s = product(grad_y, decoder.T, None, encoders)
        gradient, to_z = _posterior_gradient(x, (grad_s, grad_z, grad_mu, grad_logvar), z, posterior, noise)
        if need[8] and to_z is not None:
            grads[8] = posterior[1].to(noise.dtype).mul(0.5).exp_().mul_(to_z)
        del z, to_z, grad_s, grad_z, grad_mu, grad_logvar  # the gradient of x is large: nothing else may be alive then
        weights = (mu_weight,) if noise is None else (mu_weight, logvar_weight)
        if any(need[2:6]):
            of_weights, of_biases = product_gradient(gradient, x, encoders), gradient.sum(0)
            grads[2 : 2 + 2 * len(weights) : 2] = of_weights.chunk(len(weights))
            grads[3 : 3 + 2 * len(weights) : 2] = of_biases.chunk(len(weights))
        if need[0]:
            if grad_y is not None and blocks.shape[1] + gradient.shape[1] <= deepest:
                grads[0] = _block_low_rank(grad_y, gradient, blocks.mT, torch.cat(weights).T, None, in_cpp=True)
            else:
                to_x = torch.zeros_like(x) if grad_y is None else block_diagonal_product(grad_y, blocks.mT)
                for weight, part in zip(weights, gradient.chunk(len(weights), 1), strict=True):
                    to_x.addmm_(part, weight)  # one after the other: no copy of both
                grads[0] = to_x
        for at, needed in enumerate(need):
            if not needed:
                grads[at] = None
        return tuple(grads)
