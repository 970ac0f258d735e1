"""Multiply by block-diagonal matrices, as several operators do."""

# Legend: I in, O out, K blocks

import torch
from torch import Tensor


def block_diagonal(x: Tensor, blocks: Tensor) -> Tensor:
    """Return y = diag(W_1, ..., W_K) x over contiguous groups of coordinates.

    Args:
        x: (..., I).
        blocks: (K, O/K, I/K).

    Returns:
        (..., O).
    """
    grouped = x.reshape(*x.shape[:-1], blocks.shape[0], blocks.shape[2])
    return torch.einsum("...ki,koi->...ko", grouped, blocks).flatten(-2)


def block_diagonal_to_dense(blocks: Tensor) -> Tensor:
    """Return the (O, I) matrix with ``blocks`` (K, O/K, I/K) on its diagonal."""
    return torch.block_diag(*blocks.unbind())


def block_diagonal_of(weight: Tensor, blocks: int) -> Tensor:
    """Return the K diagonal blocks (K, O/K, I/K) of ``weight`` (O, I), which form its closest block-diagonal matrix."""
    rows, columns = weight.shape[0] // blocks, weight.shape[1] // blocks
    return weight.reshape(blocks, rows, blocks, columns).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def zero_padded(x: Tensor, size: int) -> Tensor:
    """Return x (..., I) with zeros appended up to ``size`` coordinates; x itself if it has that many."""
    return x if x.shape[-1] == size else torch.nn.functional.pad(x, (0, size - x.shape[-1]))
