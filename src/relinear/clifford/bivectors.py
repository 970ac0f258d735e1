"""Bivectors as antisymmetric matrices, and what a pair of multivectors says about vectors and bivectors.

The bivector beta is the matrix K with K_ij = beta_ij for i < j. A rotor exp(beta) turns vectors by the matrix exp(2 K),
and bivectors, as matrices, by K' -> exp(2 K) K' exp(-2 K).
"""

# Legend: n dimensions, V = 2^n blades, P planes

from __future__ import annotations

import functools

import numpy as np
from torch import Tensor

from relinear.clifford.blades import (
    bivector_dimension,
    blade_masks,
    device_table,
    multivector_dimension,
    take_last,
)

__all__ = ["bivector_from_matrix", "bivector_to_matrix", "divided_bivector", "turned_vectors"]


def _pairs(n: int) -> np.ndarray:
    return np.array([[i, j] for i in range(n) for j in range(i + 1, n)], dtype=np.int64).reshape(-1, 2).T


def bivector_to_matrix(beta: Tensor) -> Tensor:
    """Return the antisymmetric matrix (..., n, n) with K_ij = beta_ij for i < j, of a bivector (..., P)."""
    n = bivector_dimension(beta)
    rows, columns = device_table(_pairs, n, beta)
    upper = beta.new_zeros(*beta.shape[:-1], n * n).index_copy(-1, rows * n + columns, beta).unflatten(-1, (n, n))
    return upper - upper.mT


def bivector_from_matrix(matrix: Tensor) -> Tensor:
    """Return the bivector (..., P) of the antisymmetric part of a matrix (..., n, n)."""
    rows, columns = device_table(_pairs, matrix.shape[-1], matrix)
    antisymmetric = (matrix - matrix.mT) / 2
    return antisymmetric[..., rows, columns]


@functools.cache
def _odd_neighbours(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every vector and every odd blade S: which even T = S ^ {i}, the sign of e_T e_i and that of e_i e_T."""
    masks = blade_masks(n)
    position = {mask: index for index, mask in enumerate(masks)}
    odd = [mask for mask in masks if mask.bit_count() % 2]
    even = [[mask ^ (1 << i) for mask in odd] for i in range(n)]
    above = [[(mask >> i + 1).bit_count() % 2 for mask in row] for i, row in enumerate(even)]
    below = [[(mask & (1 << i) - 1).bit_count() % 2 for mask in row] for i, row in enumerate(even)]
    index = np.array([[position[mask] for mask in row] for row in even])
    return index.reshape(-1), 1 - 2 * np.array(above), 1 - 2 * np.array(below)


def _neighbour_index(n: int) -> np.ndarray:
    return _odd_neighbours(n)[0]


def _signs_from_the_right(n: int) -> np.ndarray:
    return _odd_neighbours(n)[1]


def _signs_from_the_left(n: int) -> np.ndarray:
    return _odd_neighbours(n)[2]


def _times_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """The odd coordinates of x e_i and of e_i x for every vector, each (..., n, V/2), of the even part of x."""
    n = multivector_dimension(x)
    gathered = take_last(x, device_table(_neighbour_index, n, x)).unflatten(-1, (n, -1))
    right = device_table(_signs_from_the_right, n, x, x.dtype)
    left = device_table(_signs_from_the_left, n, x, x.dtype)
    return gathered * right, gathered * left


def divided_bivector(rotor: Tensor, x: Tensor) -> Tensor:
    """Return the bivector part (..., P) of r~ x for even r and x (..., V).

    It is <x, r e_i e_j> = <x e_j, r e_i>, so that no product of multivectors is needed.
    """
    return bivector_from_matrix(_times_vectors(rotor)[0] @ _times_vectors(x)[0].mT)


def turned_vectors(rotor: Tensor) -> Tensor:
    """O (..., n, n) with r e_j r~ = sum_i O_ij e_i, of a rotor (..., V): O_ij = <e_i r, r e_j>."""
    right, left = _times_vectors(rotor)
    return left @ right.mT
