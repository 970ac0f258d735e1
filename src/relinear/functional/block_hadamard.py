"""Block-Hadamard maps: fast Walsh-Hadamard transforms, each followed by a block-diagonal product."""

# Legend: I in, O out, N padded width of one stage, P the largest power of two that divides N, Q = N / P, K blocks

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from relinear.functional.block_diagonal import block_diagonal, block_diagonal_to_dense, zero_padded


def hadamard(x: Tensor) -> Tensor:
    """Return the orthonormal Walsh-Hadamard transform H_P (x) I_Q along the last dimension; symmetric, its own inverse.

    P is the largest power of two that divides the size N = P Q of the last dimension: for a power of two this is the
    transform in natural (Sylvester) order, for an odd size the identity. It takes log2(P) additions per coordinate.

    Args:
        x: (..., N).
    """
    size = x.shape[-1]
    power = size & -size
    y = x.reshape(*x.shape[:-1], power, size // power)
    span = 1
    while span < power:
        y = y.unflatten(-2, (power // (2 * span), 2, span))
        low, high = y.unbind(-3)
        y = torch.stack((low + high, low - high), dim=-3).flatten(-4, -2)
        span *= 2
    return y.flatten(-2) / math.sqrt(power)


def block_hadamard_sizes(in_features: int, out_features: int, blocks: int, depth: int) -> list[tuple[int, int]]:
    """Return (input, output) width of each stage, padded so that each transform mixes all blocks.

    A transform of N = P Q coordinates mixes coordinates Q apart, so every block of N/K coordinates depends on every
    input exactly if P >= K. So N is the next multiple of lcm(K, the next power of two of K). The usual widths need no
    padding. Between stages the width is that of the narrower side.
    """
    unit = math.lcm(blocks, 1 << (blocks - 1).bit_length())

    def padded(size: int) -> int:
        return -(-size // unit) * unit

    inner = padded(min(in_features, out_features))
    widths = [padded(in_features), *[inner] * (depth - 1), padded(out_features)]
    return list(itertools.pairwise(widths))


def block_hadamard(
    x: Tensor, blocks: Sequence[Tensor], out_features: int, bias: Tensor | None = None, mix_input: bool = True
) -> Tensor:
    """Return y = B_L H ... B_1 H x + bias; the input is padded with zeros, the output truncated to ``out_features``.

    Args:
        x: (..., I).
        blocks: one (K, N_out/K, N_in/K) per stage, with the sizes of ``block_hadamard_sizes``.
        out_features: O.
        bias: (O,) or None.
        mix_input: whether a transform precedes the first product, too.
    """
    y = zero_padded(x, blocks[0].shape[0] * blocks[0].shape[2])
    for index, stage in enumerate(blocks):
        y = block_diagonal(hadamard(y) if index or mix_input else y, stage)
    y = y[..., :out_features]
    return y if bias is None else y + bias.to(y.dtype)  # autocast gives products half precision


def block_hadamard_dense(blocks: Sequence[Tensor], in_features: int, mix_input: bool = True) -> Tensor:
    """Return the (N_out, I) matrix of the stages, padded output rows included."""
    # H is symmetric, so B H is the transform of B's rows.
    first = block_diagonal_to_dense(blocks[0])
    dense = (hadamard(first) if mix_input else first)[:, :in_features]
    for stage in blocks[1:]:
        dense = hadamard(block_diagonal_to_dense(stage)) @ dense
    return dense


def block_hadamard_fit(
    weight: Tensor, blocks: Sequence[Tensor], mix_input: bool = True, sweeps: int = 8
) -> list[Tensor]:
    """Fit the stages to ``weight`` by least squares: in closed form at depth 1, by alternating closed forms otherwise.

    At depth 1 without padding, H is orthogonal and the fit is the diagonal blocks of W H^T. With padding, block k
    solves min |W_k - B_k H_k|, where H_k are its rows in the first I columns of H. At depth L > 1 the last stage and
    the first (with padded inputs) solve such problems if the other stages are fixed. They are solved in turn,
    ``sweeps`` times; the stages between them do not change.

    Args:
        weight: (O, I).
        blocks: one (K, N_out/K, N_in/K) per stage, which gives the sizes and, at depth > 1, the initial values.
        mix_input: whether a transform precedes the first stage, too.

    Returns:
        the stages, in float64.
    """
    stages = [stage.detach().double() for stage in blocks]
    count, rows, columns = stages[-1].shape
    inner = stages[0].shape[0] * stages[0].shape[2]
    target = torch.nn.functional.pad(weight.double(), (0, 0, 0, count * rows - weight.shape[0]))
    rotated = zero_padded(target, inner)
    rotated = hadamard(rotated) if mix_input else rotated
    for _ in range(sweeps if len(stages) > 1 else 1):
        before_last = torch.eye(inner, dtype=torch.float64, device=weight.device)[:, : weight.shape[1]]
        if len(stages) > 1:
            after_first = hadamard(block_diagonal_to_dense(stages[-1]))
            for stage in stages[-2:0:-1]:
                after_first = hadamard(after_first @ block_diagonal_to_dense(stage))
            parts = after_first.unflatten(1, stages[0].shape[:2]).permute(1, 0, 2)
            stages[0] = torch.linalg.pinv(parts) @ rotated.unflatten(1, (count, -1)).permute(1, 0, 2)
            before_last = block_hadamard_dense(stages[:-1], weight.shape[1], mix_input)
        mixed = hadamard(before_last.T).T if mix_input or len(stages) > 1 else before_last
        basis = mixed.unflatten(0, (count, columns))
        stages[-1] = target.unflatten(0, (count, rows)) @ torch.linalg.pinv(basis)
    return stages
