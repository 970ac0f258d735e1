"""Rotor layers: sums of sandwiches r x s~ over windows of a vector, in the real spin representation.

A window of V = 2^n coordinates is an element X of Cl(n); for rotors r and s the sandwich is A X B^T with two small
matrices (``relinear.clifford.spin``), the left one acting on the rows of X seen as (L, M/L), the right one on the
columns of X seen as (M/R, R). General elements of the algebra (Lemma 1 of arXiv 2507.11688) and free Kronecker factors
have the same form.
"""

# Legend: N tokens, I / O windows of the input / output, W terms, M coordinates that share factors (V, or V/2 where the
# algebra has two blocks), L and R sizes of the left and the right factor, V = 2^n window

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from relinear import clifford

__all__ = [
    "branch_permutation",
    "from_windows",
    "nearest_kronecker",
    "rotor_layer",
    "sandwich_sum",
    "sandwich_windows",
    "shared_coordinates",
    "shared_sandwich_sum",
    "spin_tables",
    "through_blocks",
    "to_windows",
    "window_count",
    "window_size",
]


def window_size(in_features: int, out_features: int) -> int:
    """V: the largest power of two that fits into both sizes, at most 2^12."""
    return min(1 << (min(in_features, out_features).bit_length() - 1), 1 << 12)


def window_count(size: int, window: int) -> int:
    """How many windows of ``window`` coordinates cover ``size`` of them."""
    return -(-size // window)


def to_windows(x: Tensor, window: int) -> Tensor:
    """Windows (..., count, V) of x (..., size): one after another, the last wrapping round to the beginning."""
    missing = -x.shape[-1] % window
    if missing:
        x = torch.cat((x, x[..., :missing]), dim=-1)
    return x.unflatten(-1, (-1, window))


def from_windows(y: Tensor, size: int) -> Tensor:
    """Coordinates (..., size) of windows (..., count, V): each the mean over the windows that reach it."""
    y = y.flatten(-2)
    wrapped = y.shape[-1] - size
    if not wrapped:
        return y
    return torch.cat(((y[..., :wrapped] + y[..., size:]) / 2, y[..., wrapped:size]), dim=-1)


def branch_permutation(window: int, branches: int, seed: int, step: int) -> np.ndarray:
    """Fixed random permutations of branches that lie side by side, each within itself: indices (branches * window,).

    numpy's legacy generator keeps its stream for good, so that a seed in a checkpoint means the same everywhere.
    """
    draw = np.random.RandomState([seed, step])
    return np.concatenate([draw.permutation(window) + branch * window for branch in range(branches)])


def sandwich_sum(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """y_o = sum over terms w and input windows i of A_woi X_i B_woi^T.

    Args:
        x: (N, I, M).
        left: A, (W, O, I, L, L), acting on X as (L, M/L).
        right: B, (W, O, I, R, R), acting on X as (M/R, R).

    Returns:
        (N, O, M).
    """
    rows, columns = left.shape[-1], right.shape[-1]
    half = torch.einsum("nirc,woidc->nwoird", x.unflatten(-1, (-1, columns)), right)
    half = half.flatten(-2).unflatten(-1, (rows, -1))
    return torch.einsum("nwoilc,woikl->nokc", half, left).flatten(-2)


def shared_sandwich_sum(x: Tensor, left: Tensor, right: Tensor, count: int) -> Tensor:
    """``sandwich_sum`` of each of ``count`` parts of the coordinates with the same factors.

    Args:
        x: (N, I, M count).
        left, right: as for ``sandwich_sum``.

    Returns:
        (N, O, M count).
    """
    tokens = x.unflatten(-1, (count, -1)).transpose(1, 2).flatten(0, 1)  # every part is a token of its own
    y = sandwich_sum(tokens, left, right)
    return y.unflatten(0, (-1, count)).transpose(1, 2).flatten(-2)


def shared_coordinates(window: int, left: Tensor, right: Tensor) -> int:
    """M: how many coordinates of a window share a pair of factors (..., S, L, L) and (..., S, R, R)."""
    if left.shape[-1] * right.shape[-1] < window:  # two blocks with the same factors
        return window // clifford.spin_shape(window.bit_length() - 1).blocks
    return window // left.shape[-3]


def spin_tables(x: Tensor) -> tuple[clifford.SpinShape, Tensor, Tensor, Tensor]:
    """``clifford.spin_shape`` and ``clifford.string_tables`` of windows x (..., V)."""
    n = x.shape[-1].bit_length() - 1
    return clifford.spin_shape(n), *clifford.string_tables(n, x)


def through_blocks(x: Tensor, left: Tensor, right: Tensor, basis: str, product: Callable[..., Tensor]) -> Tensor:
    """``sandwich_windows`` by any form of ``shared_sandwich_sum``."""
    blocks = left.shape[3]
    if basis == "blade":
        x = clifford.to_spin(x)
    if blocks > 1:
        parts = x.unflatten(-1, (blocks, -1)).unbind(-2)
        pairs = zip(parts, left.unbind(3), right.unbind(3))
        y = torch.stack([product(part, a, b, 1) for part, a, b in pairs], dim=-2).flatten(-2)
    else:
        shared = x.shape[-1] // shared_coordinates(x.shape[-1], left, right)
        y = product(x, left.squeeze(3), right.squeeze(3), shared)
    return clifford.from_spin(y) if basis == "blade" else y


def sandwich_windows(x: Tensor, left: Tensor, right: Tensor, basis: str = "spinor") -> Tensor:
    """``sandwich_sum`` of whole windows, of one block or two, in either basis.

    Args:
        x: (N, I, V).
        left, right: (W, O, I, S, L, L) and (W, O, I, S, R, R); S = 1 where all blocks of a window share their factors.
        basis: "blade": coordinates are those of blades, so that rotors act as in the paper; "spinor": they are
            coordinates of the spin representation, the same family of maps conjugated by a fixed orthogonal one.

    Returns:
        (N, O, V).
    """
    return through_blocks(x, left, right, basis, shared_sandwich_sum)


def rotor_layer(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    out_features: int,
    window: int,
    basis: str = "spinor",
    product: Callable[..., Tensor] = sandwich_windows,
) -> Tensor:
    """A layer of sandwiches: windows of the input, ``sandwich_windows``, mean over the windows of the output.

    Args:
        x: (..., in_features).
        left, right, basis: as for ``sandwich_windows``.
        out_features: size of the result.
        window: V.
        product: ``sandwich_windows`` or its twin.

    Returns:
        (..., out_features).
    """
    windows = to_windows(x.reshape(-1, x.shape[-1]), window)
    y = product(windows, left, right, basis)
    return from_windows(y, out_features).reshape(*x.shape[:-1], out_features)


def nearest_kronecker(weight: Tensor, rows: int, columns: int, terms: int) -> tuple[Tensor, Tensor]:
    """The best sum of Kronecker products in the Frobenius norm (Van Loan and Pitsianis 1993).

    Args:
        weight: (L R, L R).
        rows, columns: L and R.
        terms: W, at most min(L^2, R^2).

    Returns:
        left (W, L, L) and right (W, R, R) in float64 with sum_w left_w (x) right_w nearest to ``weight``.
    """
    blocks = weight.double().unflatten(1, (rows, columns)).unflatten(0, (rows, columns)).transpose(1, 2)
    u, s, vh = torch.linalg.svd(blocks.reshape(rows * rows, columns * columns), full_matrices=False)
    root = s[:terms].sqrt()
    return (u[:, :terms] * root).T.unflatten(1, (rows, rows)), (root[:, None] * vh[:terms]).unflatten(1, (columns, -1))
