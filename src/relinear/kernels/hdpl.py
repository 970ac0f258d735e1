"""HDPL without transposes: the detail path is added block by block onto the context path's output, in place."""

# Legend: N tokens, I in, O out, K blocks, R latent size

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from relinear.functional import hdpl as reference
from relinear.functional.hdpl import HDPLOutput, hdpl_sample
from relinear.kernels.block_diagonal import add_block_diagonal_, block_gradient

__all__ = ["hdpl"]


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
    layout; here each block multiplies a strided view and accumulates into the output. Compilers make in-place products
    into copies again, so under ``torch.compile`` it is the reference that runs.
    """
    if torch.compiler.is_compiling():
        return reference.hdpl(x, blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias, noise)
    leading, kind = x.shape[:-1], x.device.type
    tensors: tuple[Tensor | None, ...]
    tensors = (x.reshape(-1, x.shape[-1]), blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias)
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        tensors = tuple(None if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)
    with torch.autocast(kind, enabled=False):
        results = _HDPL.apply(*tensors, None if noise is None else noise.reshape(-1, noise.shape[-1]))
    y, z, *posterior = (result.view(*leading, result.shape[-1]) for result in results)
    return HDPLOutput(y, z, *posterior) if posterior else HDPLOutput(y, z, z, None)


class _HDPL(torch.autograd.Function):
    """(y, z, mu, logvar), or (y, mu) without noise, of a matrix x (N, I) in one dtype."""

    @staticmethod
    def forward(x, blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias, noise):  # type: ignore[override]
        z = mu = torch.addmm(mu_bias, x, mu_weight.T)
        logvar = None
        if noise is not None:
            logvar = torch.addmm(logvar_bias, x, logvar_weight.T)
            z = hdpl_sample(mu, logvar, noise)
        y = silu(z) @ decoder.T if bias is None else torch.addmm(bias, silu(z), decoder.T)
        add_block_diagonal_(y, x, blocks)
        return (y, mu) if noise is None else (y, z, mu, logvar)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        x, blocks, mu_weight, _, logvar_weight, _, decoder, _, noise = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, blocks, mu_weight, logvar_weight, decoder, noise, output[1], *output[3:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y, grad_z, grad_mu=None, grad_logvar=None):  # type: ignore[override]
        x, blocks, mu_weight, logvar_weight, decoder, noise, z, *logvar = ctx.saved_tensors
        need = ctx.needs_input_grad
        grads: list[Tensor | None] = [None] * 9
        if grad_y is not None:
            grads[1] = block_gradient(grad_y, x, blocks.shape[0]) if need[1] else None
            grads[6] = grad_y.T @ silu(z) if need[6] else None
            grads[7] = grad_y.sum(0) if need[7] else None
            grad_z = _sum(torch.ops.aten.silu_backward(grad_y @ decoder, z), grad_z)
        grad_mu = _sum(grad_mu, grad_z)
        if noise is not None and grad_z is not None:
            grad_noise = grad_z * torch.exp(0.5 * logvar[0].to(noise.dtype))
            grads[8] = grad_noise if need[8] else None
            grad_logvar = _sum((0.5 * noise * grad_noise).to(z.dtype), grad_logvar)
        if need[0]:
            grad_x = torch.zeros_like(x) if grad_mu is None else grad_mu @ mu_weight
            if grad_logvar is not None:
                grad_x.addmm_(grad_logvar, logvar_weight)
            grads[0] = grad_x if grad_y is None else add_block_diagonal_(grad_x, grad_y, blocks.transpose(1, 2))
        for first, gradient in ((2, grad_mu), (4, grad_logvar)):
            if gradient is not None:
                grads[first] = gradient.T @ x if need[first] else None
                grads[first + 1] = gradient.sum(0) if need[first + 1] else None
        return tuple(grads)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
