"""Block-diagonal products without copies, forward and backward: a product a block reads and writes slices in place.

Batched products, as an einsum's, copy what is strided into batches in bfloat16, and results out of them: often longer
than the products take.
"""

# Legend: N tokens, I in, O out, K blocks

import torch
from torch import Tensor

from relinear.kernels.implementations import Call

#: numbers from which products without copies save more than their calls take
FEWEST_SLICED = 1 << 17


def slices_unsupported(call: Call) -> str:
    """Say why an operator of block-diagonal products, whose first argument is x, does not run on slices."""
    if call.size < FEWEST_SLICED:
        return "too few numbers"
    return call.opaque or ("" if call.plain else "no plain tensor on a CPU")


def block_product(x: Tensor, blocks: Tensor, total: Tensor | None = None) -> Tensor:
    """diag(W_1, ..., W_K) x (N, O) of x (N, I) and blocks (K, O/K, I/K), without a graph.

    Args:
        total: (N, O), what the product is added to, in place; none makes a new tensor.
    """
    count, rows, _ = blocks.shape
    y = x.new_empty(len(x), count * rows) if total is None else total
    for block, inputs, results in zip(blocks, x.chunk(count, 1), y.chunk(count, 1), strict=True):
        results.addmm_(inputs, block.T, beta=0 if total is None else 1)
    return y


def block_gradient(grad: Tensor, x: Tensor, blocks: Tensor) -> Tensor:
    """The gradient of the blocks (K, O/K, I/K) from that (N, O) of the product with x (N, I)."""
    gradient, count = torch.empty_like(blocks, memory_format=torch.contiguous_format), len(blocks)
    for block, upstream, inputs in zip(gradient, grad.chunk(count, 1), x.chunk(count, 1), strict=True):
        torch.mm(upstream.T, inputs, out=block)
    return gradient
