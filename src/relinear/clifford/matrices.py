"""The complex matrix representation of Cl(n, 0), in which geometric products are products of small matrices.

It is that of Jordan and Wigner: with m = floor(n/2) bits, e_{2j-1} = Z^(j-1) X and e_{2j} = Z^(j-1) i X Z. For odd n
the last vector is Z on every bit, and a second block, in which all vectors change sign, makes it faithful.
"""

# Legend: n dimensions, V = 2^n blades, P planes, m = floor(n/2), K = 2^m, S blocks (1 for even n, 2 for odd n)

import functools

import numpy as np
import torch
from torch import Tensor

from relinear.clifford.blades import blade_masks, multivector_dimension, parities
from relinear.clifford.pauli_strings import string_signs, strings_from_matrix, strings_to_matrix
from relinear.clifford.tables import compute_dtype, device_table, take_last


@functools.cache
def _pauli_strings(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for every blade the flat index a * K + b of its string and its phase (a complex power of i)."""
    m = n // 2
    generators = []
    for i in range(n):
        bit = 1 << (i // 2)
        below = bit - 1
        generators.append((bit, below | (bit if i % 2 else 0), i % 2) if i < 2 * m else (0, 2**m - 1, 0))
    index, phase = [], []
    for mask in blade_masks(n):
        a = b = power = 0
        for i in range(n):
            if mask >> i & 1:
                next_a, next_b, next_power = generators[i]
                power += next_power + 2 * ((b & next_a).bit_count() % 2)
                a, b = a ^ next_a, b ^ next_b
        index.append(a * 2**m + b)
        phase.append(1j ** (power % 4))
    return np.array(index), np.round(np.array(phase))


def _parity_order(n: int) -> np.ndarray:
    """Return the blade of every string (V,); for odd n first the even blade of every string, then the odd one."""
    index, _ = _pauli_strings(n)
    return np.argsort(index + parities(n) * 4**n * (n % 2), kind="stable")


def _ordered_phases(n: int) -> np.ndarray:
    return _pauli_strings(n)[1][_parity_order(n)]


def _inverse_order(n: int) -> np.ndarray:
    return np.argsort(_parity_order(n))


def to_matrix(x: Tensor) -> Tensor:
    """Return the faithful complex representation of a multivector: an algebra morphism.

    Args:
        x: (..., V) in blade coordinates, any real or complex dtype.

    Returns:
        (..., S, K, K), complex; S = 1 for even n and 2 for odd n. The scalar 1 gives the identity.

    Raises:
        ValueError: if the last dimension is not a power of two from 2 to 4096.

    Examples:
        >>> relinear.clifford.to_matrix(torch.randn(8)).shape
        torch.Size([2, 2, 2])
    """
    n = multivector_dimension(x)
    size = 2 ** (n // 2)
    dtype = torch.promote_types(compute_dtype(x.dtype), torch.complex64)
    ordered = take_last(x.to(dtype), device_table(_parity_order, n, x))
    coefficients = (ordered * device_table(_ordered_phases, n, x, dtype)).unflatten(-1, (-1, size, size))
    if n % 2:
        even, odd = coefficients.unbind(-3)
        coefficients = torch.stack((even + odd, even - odd), dim=-3)
    return strings_to_matrix(coefficients)


def from_matrix(matrix: Tensor) -> Tensor:
    """Return the complex blade coordinates (..., V) of matrices (..., S, K, K): inverse of ``to_matrix``.

    Args:
        matrix: (..., S, K, K), complex.

    Examples:
        >>> x = torch.randn(8)
        >>> torch.allclose(relinear.clifford.from_matrix(relinear.clifford.to_matrix(x)).real, x, atol=1e-6)
        True
    """
    blocks, size = matrix.shape[-3], matrix.shape[-1]
    n = 2 * (size.bit_length() - 1) + (blocks == 2)
    coefficients = strings_from_matrix(matrix)
    if n % 2:
        plus, minus = coefficients.unbind(-3)
        coefficients = torch.stack((plus + minus, plus - minus), dim=-3) / 2
    ordered = coefficients.flatten(-3) * device_table(_ordered_phases, n, matrix, matrix.dtype).conj()
    return take_last(ordered, device_table(_inverse_order, n, matrix))


def matrix_exp(matrix: Tensor) -> Tensor:
    """Return ``torch.linalg.matrix_exp`` (..., K, K) to the precision of the dtype, in value and gradient.

    torch truncates the series of a single matrix too early: for norms near 0.05 the error is 2e-10 in float64, for
    norms near 0.5 it is 4e-5 in float32. In a batch of several it does not. So a zero matrix is added here, which costs
    next to nothing, as torch sorts a batch by norms.
    """
    if matrix.shape[:-2].numel() != 1:
        return torch.linalg.matrix_exp(matrix)
    single = matrix.reshape(matrix.shape[-2:])
    return torch.linalg.matrix_exp(torch.stack((single, torch.zeros_like(single))))[0].view(matrix.shape)


def blade_matrices(n: int, blade_slice: slice) -> np.ndarray:
    """Return the matrices of some basis blades, (count, S, K, K)."""
    index, phase = _pauli_strings(n)
    size, odd = 2 ** (n // 2), parities(n)[blade_slice]
    columns = np.arange(size)
    dense = np.zeros((len(odd), 1 + n % 2, size, size), dtype=complex)
    for row, (string, factor) in enumerate(zip(index[blade_slice], phase[blade_slice])):
        a, b = divmod(int(string), size)
        for block in range(1 + n % 2):
            sign = -1 if block and odd[row] else 1
            dense[row, block, columns ^ a, columns] = sign * factor * string_signs(b, size)
    return dense
