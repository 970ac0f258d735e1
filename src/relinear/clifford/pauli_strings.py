"""Convert coefficients of Pauli strings X^a Z^b to the matrix of their sum, and back.

For bit vectors a, b, l of m bits X^a Z^b |l> = (-1)^(b.l) |l ^ a>, so M[l ^ a, l] = sum_b (-1)^(b.l) c[a, b]. This is a
Walsh-Hadamard transform and a permutation by XOR ("skew"). A product of strings is a string: X^a Z^b X^a' Z^b' =
(-1)^(b.a') X^(a^a') Z^(b^b').
"""

# Legend: m bits, K = 2^m; a, b, l, r run over K

import numpy as np
from torch import Tensor

from relinear.clifford.tables import device_table, take_last


def string_signs(b: int, columns: int) -> np.ndarray:
    """Return (-1)^(b.l) for every column l: the entries of Z^b."""
    return np.array([1 - 2 * ((b & column).bit_count() % 2) for column in range(columns)])


def hadamard(m: int) -> np.ndarray:
    """Return the unnormalised Walsh-Hadamard matrix (K, K): (-1)^(b.l)."""
    return np.stack([string_signs(b, 2**m) for b in range(2**m)])


def _skew(m: int) -> np.ndarray:
    # (r, l) -> flat index of (a, l) with a = r ^ l; its own inverse
    bits = np.arange(2**m)
    return ((bits[:, None] ^ bits[None, :]) * 2**m + bits[None, :]).reshape(-1)


def strings_to_matrix(coefficients: Tensor) -> Tensor:
    """Return the matrix sum_ab c[a, b] X^a Z^b.

    Args:
        coefficients: (..., K, K), over a and b.

    Returns:
        (..., K, K), over rows r and columns l.
    """
    size = coefficients.shape[-1]
    m = size.bit_length() - 1
    walsh = device_table(hadamard, m, coefficients, coefficients.dtype)
    spectrum = (coefficients @ walsh).flatten(-2)
    return take_last(spectrum, device_table(_skew, m, coefficients)).unflatten(-1, (size, size))


def strings_from_matrix(matrix: Tensor) -> Tensor:
    """Return the coefficients (..., K, K), over a and b, of a matrix (..., K, K): inverse of ``strings_to_matrix``."""
    size = matrix.shape[-1]
    m = size.bit_length() - 1
    spectrum = take_last(matrix.flatten(-2), device_table(_skew, m, matrix)).unflatten(-1, (size, size))
    return spectrum @ (device_table(hadamard, m, matrix, matrix.dtype) / size)
