"""HDPL without transposes: the detail path is written block by block, the context path's product added in place."""

# Legend: N tokens, I in, O out, K blocks, R latent size

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from relinear.functional import hdpl as reference
from relinear.functional.hdpl import HDPLOutput, hdpl_sample
from relinear.kernels.autocast import lowered
from relinear.kernels.block_diagonal import block_diagonal_product, block_gradient
from relinear.kernels.choice import prefers_triton
from relinear.kernels.weight_gradient import weight_gradient

__all__ = ["hdpl", "token_kl"]


def hdpl(
    x: Tensor,
    blocks: Tensor,
    mu_weight: Tensor,
    mu_bias: Tensor,
    logvar_weight: Tensor,
    logvar_bias: Tensor,
    decoder: Tensor,
    bias: Tensor | None = None,
    noise: Tensor | None = None,
) -> HDPLOutput:
    """``functional.hdpl.hdpl`` with a backward of its own (first order only).

    The reference turns the block-diagonal product into a batched one, which copies input and output into another
    layout; here each block multiplies a strided view and writes to one. Compilers make in-place products into copies
    again, so under ``torch.compile`` it is the reference that runs.
    """
    if prefers_triton(x, blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias):
        from relinear.kernels.triton import hdpl as fused

        return fused.hdpl(x, blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias, noise)
    if torch.compiler.is_compiling():
        return reference.hdpl(x, blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias, noise)
    leading, kind = x.shape[:-1], x.device.type
    weights = blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias
    tensors = lowered(x.reshape(-1, x.shape[-1]), *weights)
    with torch.autocast(kind, enabled=False):
        run: Any = _HDPL.apply if torch.is_grad_enabled() else _HDPL.forward
        results = run(*tensors, None if noise is None else noise.reshape(-1, noise.shape[-1]))
    y, z, *posterior = (result.view(*leading, result.shape[-1]) for result in results)
    return HDPLOutput(y, z, *posterior) if posterior else HDPLOutput(y, z, z, None)


class _HDPL(torch.autograd.Function):
    """(y, z, mu, logvar), or (y, mu) without noise, of a matrix x (N, I) in one dtype."""

    @staticmethod
    def forward(x, blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias, noise):  # type: ignore[override]
        if noise is None:
            z = mu = torch.addmm(mu_bias, x, mu_weight.T)
        else:
            # One product for both: x is read once, and the output is twice as wide.
            weight, offset = torch.cat([mu_weight, logvar_weight]), torch.cat([mu_bias, logvar_bias])
            mu, logvar = torch.addmm(offset, x, weight.T).chunk(2, dim=1)
            z = hdpl_sample(mu, logvar, noise)
        y = block_diagonal_product(x, blocks, bias).addmm_(silu(z), decoder.T)
        return (y, mu) if noise is None else (y, z, mu, logvar)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        x, blocks, mu_weight, _, logvar_weight, _, decoder, _, noise = inputs
        ctx.set_materialize_grads(False)
        latents = output[1:] if noise is None else output[2:]  # mu, and the logarithm of the variance with noise
        ctx.save_for_backward(x, blocks, mu_weight, logvar_weight, decoder, noise, *latents)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y, grad_z, grad_mu=None, grad_logvar=None):  # type: ignore[override]
        x, blocks, mu_weight, logvar_weight, decoder, noise, mu, *logvar = ctx.saved_tensors
        need = ctx.needs_input_grad
        grads: list[Tensor | None] = [None] * 9
        z = mu if noise is None else hdpl_sample(mu, logvar[0], noise)
        if grad_y is not None:
            grads[1] = block_gradient(grad_y, x, blocks.shape[0]) if need[1] else None
            grads[6] = weight_gradient(grad_y, silu(z)) if need[6] else None
            grads[7] = grad_y.sum(0) if need[7] else None
            grad_z = _sum(torch.ops.aten.silu_backward(grad_y @ decoder, z), grad_z)
        grad_mu = _sum(grad_mu, grad_z)
        if noise is not None and grad_z is not None:
            grad_noise = logvar[0].to(noise.dtype).mul(0.5).exp_().mul_(grad_z)
            grads[8] = grad_noise.clone() if need[8] else None
            grad_logvar = _sum(grad_noise.mul_(noise).mul_(0.5).to(z.dtype), grad_logvar)
            del grad_noise
        of_latents = [(grad_mu, mu_weight, 2), (grad_logvar, logvar_weight, 4)]
        parts = [(w, first) for g, w, first in of_latents if g is not None]
        gradient = torch.cat([g for g, _, _ in of_latents if g is not None] or [x.new_zeros(len(x), 0)], 1)
        del z, grad_z, grad_mu, grad_logvar, of_latents  # the gradient of x is large: nothing else may be alive then
        sizes = [len(w) for w, _ in parts]
        if any(need[2:6]):
            pairs = zip(weight_gradient(gradient, x).split(sizes), gradient.sum(0).split(sizes), strict=True)
            for (of_weight, of_bias), (_, first) in zip(pairs, parts, strict=True):
                grads[first] = of_weight if need[first] else None
                grads[first + 1] = of_bias if need[first + 1] else None
        if need[0]:
            to_x = torch.zeros_like(x) if grad_y is None else block_diagonal_product(grad_y, blocks.mT)
            for (weight, _), part in zip(parts, gradient.split(sizes, 1), strict=True):
                to_x.addmm_(part, weight)
            grads[0] = to_x
        return tuple(grads)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def token_kl(mu: Tensor, logvar: Tensor) -> Tensor:
    """``functional.hdpl.token_kl`` in few passes over memory, with a backward of its own (first order only).

    Where the loss is clamped for every token, as with the paper's bound nearly always, the backward costs nothing.
    """
    if torch.compiler.is_compiling():
        return reference.token_kl(mu, logvar)
    return _TokenKL.apply(mu, logvar)


class _TokenKL(torch.autograd.Function):
    @staticmethod
    def forward(mu, logvar):  # type: ignore[override]
        mu, logvar = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (mu, logvar))
        variance = torch.exp(logvar).sum(-1)
        return (
            torch.linalg.vector_norm(mu, dim=-1).square_().add_(variance).sub_(logvar.sum(-1) + mu.shape[-1]).mul_(0.5)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad):  # type: ignore[override]
        mu, logvar = ctx.saved_tensors
        # On a GPU the question would cost more than the answer saves: it would wait for the device.
        if grad.device.type == "cpu" and not grad.any():
            zero = mu.new_zeros(()).expand(mu.shape)
            return zero, zero.to(logvar.dtype)
        grad = grad.unsqueeze(-1)
        change = torch.exp(logvar.to(grad.dtype)).sub_(1).mul_(0.5 * grad)
        return (mu * grad).to(mu.dtype), change.to(logvar.dtype)
