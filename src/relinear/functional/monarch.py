"""Monarch maps (Dao et al. 2022, arXiv 2204.00595): two block-diagonal products with fixed permutations (reference)."""

# Legend: I in, O out, K blocks, P = ceil(I / K), S = ceil(O / K), R rank of a sub-block

import torch
from torch import Tensor

from relinear.functional.block_diagonal import block_diagonal, zero_padded


def monarch(x: Tensor, right: Tensor, left: Tensor, out_features: int, bias: Tensor | None = None) -> Tensor:
    """Return y = permute(left permute(right x)) + bias (Definition 3.1, any sizes); permute swaps block and position.

    The matrix's entry for output s K + l and input k P + p is sum_r left[l, s, k R + r] right[k, l R + r, p], so
    sub-block (l, k) has rank R. The input is padded with zeros to K P, the output truncated to ``out_features``.

    Args:
        x: (..., I).
        right: (K, K R, P), the first factor.
        left: (K, S, K R), the second.
        out_features: O.
        bias: (O,) or None.
    """
    blocks, inner, width = right.shape
    hidden = block_diagonal(zero_padded(x, blocks * width), right)
    hidden = hidden.unflatten(-1, (blocks, blocks, inner // blocks)).transpose(-3, -2).flatten(-3)
    y = block_diagonal(hidden, left).unflatten(-1, (blocks, -1)).transpose(-1, -2).flatten(-2)[..., :out_features]
    return y if bias is None else y + bias.to(y.dtype)  # autocast gives products half precision


def monarch_dense(right: Tensor, left: Tensor, in_features: int, out_features: int) -> Tensor:
    """Return the (O, I) matrix of the product, sub-block by sub-block."""
    blocks = right.shape[0]
    subs = torch.einsum("lskr,klrp->slkp", left.unflatten(2, (blocks, -1)), right.unflatten(1, (blocks, -1)))
    return subs.flatten(2).flatten(0, 1)[:out_features, :in_features]


def monarch_factors(weight: Tensor, blocks: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the Monarch matrix closest to ``weight`` in the Frobenius norm (Theorem 1), by an SVD of each sub-block.

    Args:
        weight: (O, I).
        blocks: K.
        rank: R; 1 is the paper's theorem; with min(P, S) the fit is exact.

    Returns:
        right (K, K R, P) and left (K, S, K R), in float64.
    """
    out_features, in_features = weight.shape
    width, rows = -(-in_features // blocks), -(-out_features // blocks)
    padding = (0, blocks * width - in_features, 0, blocks * rows - out_features)
    padded = torch.nn.functional.pad(weight.detach().double(), padding)
    subs = padded.view(rows, blocks, blocks, width).permute(1, 2, 0, 3)
    u, s, vh = torch.linalg.svd(subs, full_matrices=False)
    root = s[..., :rank].sqrt()
    left = (u[..., :rank] * root[..., None, :]).permute(0, 2, 1, 3).flatten(2)
    right = (root[..., None] * vh[..., :rank, :]).transpose(0, 1).flatten(1, 2)
    return right, left
