"""Compute ``functional.block_hadamard`` with the transform as a few small matrix products.

H_P = H_A (x) H_B, so the transform of P = A B coordinates is two products with Hadamard matrices of about sqrt(P)
rows. This takes more arithmetic than the log2(P) butterflies, but matrix products are fast, while butterflies are
limited by memory bandwidth.
"""

# Legend: N width, P the largest power of two that divides N, Q = N / P, S size of one small transform

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from relinear.functional.block_diagonal import block_diagonal, zero_padded
from relinear.functional.block_hadamard import hadamard as butterflies
from relinear.kernels.autograd import with_backward
from relinear.kernels.block_diagonal import block_gradient, block_product, slices_unsupported
from relinear.kernels.implementations import Call, Implementation, dispatch, is_traced, is_transformed

MAX_FACTOR = 64  # beyond it the product costs more than another pass over memory


def _factors(power: int) -> list[int]:
    """Factor ``power`` into powers of two, as few and as equal as possible."""
    bits = power.bit_length() - 1
    most = MAX_FACTOR.bit_length() - 1
    count = max(1, -(-bits // most))
    return [1 << (bits // count + (index < bits % count)) for index in range(count)]


@functools.cache
def _constant(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # not an inference tensor, which autograd could not save for a backward pass
    with torch.inference_mode(False), torch.no_grad():
        return butterflies(torch.eye(size, dtype=dtype, device=device))


def _matrix(size: int, like: Tensor) -> Tensor:
    """Return the matrix of a transform; cached, as for few tokens building it takes longer than the products.

    Under compilers, dispatch modes and torch.func's transforms it is built again, as their tensors cannot be cached.
    """
    if is_traced(like) or is_transformed():
        return butterflies(torch.eye(size, dtype=like.dtype, device=like.device))
    return _constant(size, like.dtype, like.device)


def _products_unsupported(call: Call) -> str:
    return "products in bfloat16 take longer than additions" if call.emulated else ""


def _products(x: Tensor) -> Tensor:
    left, right = 1, x.shape[-1]
    y = x
    for factor in _factors(right & -right):
        right //= factor
        matrix = _matrix(factor, x)
        if right == 1:
            y = y.reshape(*x.shape[:-1], left, factor) @ matrix
        else:
            y = matrix @ y.reshape(*x.shape[:-1], left, factor, right)
        left *= factor
    return y.reshape(x.shape)


hadamard = dispatch(Implementation("products", _products_unsupported, _products), otherwise="additions")(butterflies)


def hadamard_flops(size: int) -> int:
    """Count the FLOPs that ``hadamard`` takes for one vector of ``size`` coordinates."""
    return 2 * size * sum(_factors(size & -size))


def _stage(x: Tensor, blocks: Tensor, mixed: bool) -> Tensor:
    """Return diag(W_1, ..., W_K) H x for x (..., I); without H if not ``mixed``."""
    return block_diagonal(hadamard(x) if mixed else x, blocks)


def _sliced_forward(x: Tensor, blocks: Tensor, mixed: bool) -> Tensor:
    return block_product(hadamard(x) if mixed else x, blocks)


@with_backward(_sliced_forward, _stage)
def _sliced(ctx, grad):
    x, blocks, _ = ctx.saved_tensors
    mixed = hadamard if ctx.plain[2] else lambda x: x  # H is symmetric
    to_x = mixed(block_product(grad, blocks.mT)) if ctx.needs_input_grad[0] else None
    return to_x, block_gradient(grad, mixed(x), blocks) if ctx.needs_input_grad[1] else None, None


stage = dispatch(Implementation("on slices", slices_unsupported, _sliced), otherwise="reference")(_stage)


def block_hadamard(
    x: Tensor, blocks: Sequence[Tensor], out_features: int, bias: Tensor | None = None, mix_input: bool = True
) -> Tensor:
    """Compute ``functional.block_hadamard.block_hadamard`` with this module's transform and products."""
    y = zero_padded(x, blocks[0].shape[0] * blocks[0].shape[2])
    for index, stage_blocks in enumerate(blocks):
        y = stage(y, stage_blocks, bool(index or mix_input))
    y = y[..., :out_features]
    return y if bias is None else y + bias.to(y.dtype)  # autocast gives products half precision
