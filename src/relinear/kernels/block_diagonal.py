"""Multiply by block-diagonal matrices without copies: one product per block reads and writes slices in place.

In bfloat16, batched products such as einsum's copy strided inputs into batches, and results out of them. These copies
often take longer than the products.
"""

# Legend: N tokens, I in, O out, K blocks

import torch
from torch import Tensor

from relinear.kernels.implementations import Call
from relinear.kernels.products import matrix_product, uses_onednn

#: elements of x from which avoiding copies saves more than the calls per block cost
MIN_SLICED = 1 << 17


def slices_unsupported(call: Call) -> str:
    """Return why block-diagonal products of x, the first argument, do not run on slices; "" if they do."""
    if call.size < MIN_SLICED:
        return "too few numbers"
    return call.opaque or ("" if call.plain else "no plain tensor on a CPU")


def block_product(x: Tensor, blocks: Tensor, total: Tensor | None = None) -> Tensor:
    """Return diag(W_1, ..., W_K) x (N, O) for x (N, I) and blocks (K, O/K, I/K), without a graph.

    Args:
        total: (N, O), to which the product is added in place; None makes a new tensor.
    """
    count, rows, _ = blocks.shape
    y = x.new_empty(len(x), count * rows) if total is None else total
    by_onednn = uses_onednn(x)  # its products write into a new tensor
    for block, inputs, results in zip(blocks, x.chunk(count, 1), y.chunk(count, 1), strict=True):
        if not by_onednn:
            results.addmm_(inputs, block.T, beta=0 if total is None else 1)
        elif total is None:
            results.copy_(matrix_product(inputs, block))
        else:
            results.add_(matrix_product(inputs, block))
    return y


def block_gradient(grad: Tensor, x: Tensor, blocks: Tensor) -> Tensor:
    """Return the gradient of the blocks (K, O/K, I/K) from that of the product (N, O) with x (N, I)."""
    gradient = torch.empty_like(blocks, memory_format=torch.contiguous_format)
    count = len(blocks)
    for block, upstream, inputs in zip(gradient, grad.chunk(count, 1), x.chunk(count, 1), strict=True):
        torch.mm(upstream.T, inputs, out=block)
    return gradient
