"""Block-diagonal products in place: one GEMM a block on strided views, without the copies of a batched product."""

# Legend: N tokens, I in, O out, K blocks

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["block_diagonal_product", "block_gradient"]

#: up to so many tokens one batched product takes less time than the calls of one product a block
MOST_TOKENS_BATCHED = {torch.float32: 16, torch.bfloat16: 1024}


def block_diagonal_product(x: Tensor, blocks: Tensor, bias: Tensor | None = None) -> Tensor:
    """diag(W_1 .. W_K) x + bias without a graph: (N, O).

    Args:
        x: (N, I).
        blocks: (K, O/K, I/K).
        bias: (O,) or None.
    """
    count, outs, ins = blocks.shape
    # never a view: a result of autograd functions must be one that can be changed in place
    y = x.new_empty(x.shape[0], count * outs)
    if x.shape[0] <= MOST_TOKENS_BATCHED.get(x.dtype, 0):
        groups = y.view(-1, count, outs).transpose(0, 1)
        torch.bmm(x.unflatten(1, (count, ins)).transpose(0, 1), blocks.mT, out=groups)
        return y if bias is None else y.add_(bias)
    given = x.unflatten(1, (count, ins)).unbind(1)
    biases = [None] * count if bias is None else bias.view(count, outs).unbind()
    for part, rows, block, offset in zip(y.unflatten(1, (count, outs)).unbind(1), given, blocks.unbind(), biases):
        if offset is None:
            torch.mm(rows, block.T, out=part)
        else:
            torch.addmm(offset, rows, block.T, out=part)
    return y


def block_gradient(gradient: Tensor, x: Tensor, count: int) -> Tensor:
    """The gradient (K, O/K, I/K) of ``count`` blocks, from that (N, O) of their output and their input (N, I)."""
    result = x.new_empty(count, gradient.shape[1] // count, x.shape[1] // count)
    parts, given = gradient.unflatten(1, (count, -1)).unbind(1), x.unflatten(1, (count, -1)).unbind(1)
    for block, part, rows in zip(result.unbind(), parts, given):
        torch.mm(part.T, rows, out=block)
    return result
