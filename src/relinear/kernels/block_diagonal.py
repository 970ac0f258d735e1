"""Block-diagonal products in place: one GEMM a block on strided views, without the copies of a batched product."""

# Legend: N tokens, I in, O out, K blocks

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_block_diagonal_", "block_gradient"]


def add_block_diagonal_(out: Tensor, x: Tensor, blocks: Tensor) -> Tensor:
    """out += diag(W_1 .. W_K) x, in place and without a graph.

    Args:
        out: (N, O).
        x: (N, I).
        blocks: (K, O/K, I/K).
    """
    outs, inputs = _groups(out, blocks.shape[0]), _groups(x, blocks.shape[0])
    for part, given, block in zip(outs, inputs, blocks.unbind()):
        part.addmm_(given, block.T)
    return out


def block_gradient(gradient: Tensor, x: Tensor, count: int) -> Tensor:
    """The gradient (K, O/K, I/K) of ``count`` blocks, from that (N, O) of their output and their input (N, I)."""
    result = x.new_empty(count, gradient.shape[1] // count, x.shape[1] // count)
    for block, part, given in zip(result.unbind(), _groups(gradient, count), _groups(x, count)):
        torch.mm(part.T, given, out=block)
    return result


def _groups(x: Tensor, count: int) -> tuple[Tensor, ...]:
    return x.unflatten(1, (count, -1)).unbind(1)
