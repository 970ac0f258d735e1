"""Convert bivectors to antisymmetric matrices, and rotors to the matrices by which they turn vectors.

The bivector beta is the matrix K with K_ij = beta_ij for i < j. A rotor exp(beta) turns vectors by the matrix exp(2 K),
and bivectors, as matrices, by K' -> exp(2 K) K' exp(-2 K).
"""

# Legend: n dimensions, V = 2^n blades, P planes

import numpy as np
from torch import Tensor

from relinear.clifford.blades import bivector_dimension, blade_masks, multivector_dimension
from relinear.clifford.tables import device_table, take_last


def _pairs(n: int) -> np.ndarray:
    return np.array([[i, j] for i in range(n) for j in range(i + 1, n)], dtype=np.int64).reshape(-1, 2).T


def bivector_to_matrix(beta: Tensor) -> Tensor:
    """Return the antisymmetric matrix (..., n, n) with K_ij = beta_ij for i < j, of a bivector (..., P).

    Args:
        beta: (..., P).

    Raises:
        ValueError: if the last dimension is not n(n-1)/2 for n from 1 to 12.

    Examples:
        >>> relinear.clifford.bivector_to_matrix(torch.tensor([2.0]))
        tensor([[ 0.,  2.],
                [-2.,  0.]])
    """
    n = bivector_dimension(beta)
    rows, columns = device_table(_pairs, n, beta)
    upper = beta.new_zeros(*beta.shape[:-1], n * n).index_copy(-1, rows * n + columns, beta).unflatten(-1, (n, n))
    return upper - upper.mT


def bivector_from_matrix(matrix: Tensor) -> Tensor:
    """Return the bivector (..., P) of the antisymmetric part of a matrix (..., n, n).

    Args:
        matrix: (..., n, n), n from 1 to 12; its symmetric part is left out.

    Examples:
        >>> relinear.clifford.bivector_from_matrix(torch.tensor([[1.0, 2.0], [-2.0, 1.0]]))
        tensor([2.])
    """
    rows, columns = device_table(_pairs, matrix.shape[-1], matrix)
    antisymmetric = (matrix - matrix.mT) / 2
    return antisymmetric[..., rows, columns]


def _odd_neighbors(n: int) -> np.ndarray:
    """Return for every vector and every odd blade S the index of the even T = S ^ {i}, (n V/2,)."""
    position = {mask: index for index, mask in enumerate(blade_masks(n))}
    return np.array([position[mask ^ (1 << i)] for i in range(n) for mask in blade_masks(n) if mask.bit_count() % 2])


def _neighbor_signs(n: int, from_left: int) -> np.ndarray:
    """Return the sign of e_T e_i, or of e_i e_T, (n, V/2)."""
    masks = np.array([blade_masks(n)[position] for position in _odd_neighbors(n)]).reshape(n, -1)
    crossed = [
        [(mask & (1 << i) - 1 if from_left else mask >> i + 1).bit_count() for mask in row]
        for i, row in enumerate(masks.tolist())
    ]
    return 1 - 2 * (np.array(crossed) % 2)


def _times_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the odd coordinates of x e_i and of e_i x for every e_i, each (..., n, V/2), for the even part of x."""
    n = multivector_dimension(x)
    gathered = take_last(x, device_table(_odd_neighbors, n, x)).unflatten(-1, (n, -1))
    right = device_table(_neighbor_signs, (n, 0), x, x.dtype)
    left = device_table(_neighbor_signs, (n, 1), x, x.dtype)
    return gathered * right, gathered * left


def divided_bivector(rotor: Tensor, x: Tensor) -> Tensor:
    """Return the bivector part (..., P) of r~ x for even r and x (..., V).

    It equals <x, r e_i e_j> = <x e_j, r e_i>, so no product of multivectors is needed.
    """
    return bivector_from_matrix(_times_vectors(rotor)[0] @ _times_vectors(x)[0].mT)


def rotation_matrix(rotor: Tensor) -> Tensor:
    """Return O (..., n, n) with r e_j r~ = sum_i O_ij e_i, for a rotor (..., V): O_ij = <e_i r, r e_j>."""
    right, left = _times_vectors(rotor)
    return left @ right.mT
