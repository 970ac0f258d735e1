"""Float32 products of matrices in ``products.cpp``, where torch's library leaves half of the processor unused."""

# Legend: N rows, I inputs, O outputs, K blocks, R columns of a low-rank part

import torch
from torch import Tensor

from relinear.kernels import native

#: entries of a gradient up to which its sums, which are added to some rows at a time, stay in the second cache
LARGEST_GRADIENT = 1 << 19


def block_low_rank(x: Tensor, s: Tensor, blocks: Tensor, up: Tensor, bias: Tensor | None) -> Tensor:
    """diag(blocks) x + up s + bias (N, O), without a graph, of x (N, I), s (N, R), blocks (K, O/K, I/K), up (O, R)."""
    y, bias = x.new_empty(x.shape[0], up.shape[0]), None if bias is None else bias.contiguous()
    native.kernels().block_low_rank(y, x.contiguous(), blocks, s.contiguous(), up, bias)
    return y


def block_low_rank_gradient(grad: Tensor, x: Tensor, s: Tensor, blocks: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of blocks and up from that (N, O) of ``block_low_rank``'s result."""
    found = [torch.empty_like(w, memory_format=torch.contiguous_format) for w in (blocks, up)]
    native.kernels().block_low_rank_gradient(*found, grad.contiguous(), x.contiguous(), s.contiguous())
    return found[0], found[1]


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias (N, O), without a graph, of x (N, I) and weight (O, I)."""
    return block_low_rank(x, x.new_empty(x.shape[0], 0), weight[None], weight.new_empty(weight.shape[0], 0), bias)


def product_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x (O, I) of grad (N, O) and x (N, I), in C++ where it is small enough for it."""
    outputs, inputs = grad.shape[1], x.shape[1]
    if outputs * inputs > LARGEST_GRADIENT:
        return grad.T @ x
    empty = x.new_empty(x.shape[0], 0), x.new_empty(1, outputs, inputs), x.new_empty(outputs, 0)
    return block_low_rank_gradient(grad, x, *empty)[0][0]
