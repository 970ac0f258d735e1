"""Compute ``functional.hdpl`` in one kernel for a few rows; for more rows, add both paths without copies."""

# Legend: N tokens, I in, O out, K blocks, R latent size or columns of a low-rank part

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from relinear.functional import hdpl as reference
from relinear.functional.hdpl import HDPLOutput
from relinear.kernels import native, triton
from relinear.kernels.autograd import autocasted, differentiable_as, save, without_autocast
from relinear.kernels.block_diagonal import block_gradient, block_product, slices_unsupported
from relinear.kernels.implementations import Call, Implementation, dispatch, log_choice, shape_of
from relinear.kernels.products import matrix_product, transposed_product


def _outputs(call: Call) -> int:
    *_, decoder, _, _ = call.arguments
    return decoder.shape[0]


_triton_unsupported = functools.partial(triton.unsupported_reason, kind="hdpl", tensors=8, outputs=_outputs, most=2**41)


def _triton(*arguments: Any) -> HDPLOutput:
    from relinear.kernels.triton import hdpl as fused

    return fused.hdpl(*arguments)


def _few_rows_unsupported(call: Call) -> str:
    x, blocks, mu_weight, mu_bias, _, _, decoder, bias, noise = call.arguments
    return "sampled" if noise is not None else native.few_rows_unsupported(x, blocks, mu_weight, mu_bias, decoder, bias)


def _few_rows(x, blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias, noise) -> HDPLOutput:
    y, z = native.calls.hdpl_layer(blocks, mu_weight, mu_bias, decoder, bias)(x, True)
    return HDPLOutput(y, z, z, None)


def _sliced(x: Tensor, *parameters: Tensor | None) -> HDPLOutput:
    leading, (*weights, noise) = x.shape[:-1], parameters
    x, *weights = autocasted(x, *weights)
    noise = None if noise is None else noise.reshape(-1, noise.shape[-1])
    run: Any = _HDPL.apply if torch.is_grad_enabled() else _results
    with without_autocast(x):
        results = run(x.reshape(-1, x.shape[-1]), *weights, noise)
    y, z, *posterior = (result.view(*leading, result.shape[1]) for result in results)
    return HDPLOutput(y, z, *posterior) if posterior else HDPLOutput(y, z, z, None)


hdpl = dispatch(
    Implementation("Triton", _triton_unsupported, _triton),
    Implementation("C++ for a few rows", _few_rows_unsupported, _few_rows),
    Implementation("on slices", slices_unsupported, _sliced),
    otherwise="reference",
)(reference.hdpl)


def prepare_few_rows(x: Tensor, *parameters: Any) -> Callable[[Tensor], Tensor] | None:
    """Return y without noise as a function of a few rows like x, one call in C++; None if C++ does not support it.

    Parameters are checked once, here, and must not change. The caller checks ``native.rows_unsupported`` on every call.

    Args:
        x: (..., I).
        parameters: blocks, mu_weight, mu_bias, decoder and bias of ``hdpl``.
    """
    if native.few_rows_unsupported(x, *parameters):
        return None
    layer = native.calls.hdpl_layer(*parameters)
    log_choice("hdpl", "C++ for a few rows, prepared", shape_of(x), {})
    return lambda x: layer(x, False)[0]


def _results(x, blocks, mu_weight, mu_bias, logvar_weight, logvar_bias, decoder, bias, noise) -> tuple[Tensor, ...]:
    """Compute ``functional.hdpl.hdpl_results`` for a matrix x (N, I), without a graph."""
    if noise is None:
        mu = matrix_product(x, mu_weight, mu_bias)
        return block_product(x, blocks, matrix_product(silu(mu), decoder, bias)), mu
    # One product for both: x is read once, and the output is twice as wide.
    weight, offset = torch.cat([mu_weight, logvar_weight]), torch.cat([mu_bias, logvar_bias])
    mu, logvar = matrix_product(x, weight, offset).chunk(2, dim=1)
    z = reference.hdpl_sample(mu, logvar, noise)
    return block_product(x, blocks, matrix_product(silu(z), decoder, bias)), z, mu, logvar


class _HDPL(torch.autograd.Function):
    """Differentiate ``_results``; saves mu and log sigma^2, and recomputes z and silu(z)."""

    # not ``setup_context``: with it torch inspects the signature at every call
    @staticmethod
    def forward(ctx: Any, *arguments):  # type: ignore[override]
        *_, noise = arguments
        results = _results(*arguments)
        ctx.set_materialize_grads(False)
        save(ctx, arguments, *(results[1:] if noise is None else results[2:]))  # mu, and logvar with noise
        return results

    @staticmethod
    @differentiable_as(reference.hdpl_results)
    def backward(ctx: Any, grad_y, grad_z, *grads_of_posterior):  # type: ignore[override]
        x, blocks, mu_weight, _, logvar_weight, _, decoder, _, noise, *posterior = ctx.saved_tensors
        grad_y = x.new_zeros(x.shape[0], decoder.shape[0]) if grad_y is None else grad_y
        z = posterior[0] if noise is None else reference.hdpl_sample(posterior[0], posterior[1], noise)
        to_z = torch.ops.aten.silu_backward(matrix_product(grad_y, decoder.T), z)
        if grad_z is not None:
            to_z += grad_z
        weight, gradient, to_noise = mu_weight, to_z, None
        if noise is not None:
            to_noise = (0.5 * posterior[1].to(noise.dtype)).exp_().mul_(to_z)
            weight = torch.cat([mu_weight, logvar_weight])
            gradient = torch.cat([to_z, (to_noise * noise * 0.5).to(to_z.dtype)], 1)
        for part, grad in zip(gradient.chunk(len(posterior), 1), grads_of_posterior):
            if grad is not None:
                part += grad
        to_x = block_product(grad_y, blocks.mT, matrix_product(gradient, weight.T)) if ctx.needs_input_grad[0] else None
        of_weights, of_biases = transposed_product(gradient, x), gradient.sum(0)
        of_encoders = [
            part for pair in zip(of_weights.chunk(len(posterior)), of_biases.chunk(len(posterior))) for part in pair
        ]
        to_blocks, to_decoder = block_gradient(grad_y, x, blocks), transposed_product(grad_y, silu(z))
        grads = to_x, to_blocks, *of_encoders, *[None] * (4 - len(of_encoders)), to_decoder, grad_y.sum(0), to_noise
        return tuple(grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=True))
