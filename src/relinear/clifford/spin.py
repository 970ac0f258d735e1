"""The real spin representation: a sandwich r x s~ of even r and s is A X B^T with small real matrices A and B.

For even r and s the signature can be chosen: e_S -> (-1)^floor(|S|/2) e'_S maps the sandwich from Cl(n, 0) to Cl(0, n).
Of the two, we take the algebra with the smaller real form M_K(F), where F is the reals, the complex numbers, the
quaternions or two copies of the reals:

    n mod 8     0       1       2       3       4       5       6       7
    algebra  (n, 0)  (n, 0)  (n, 0)  (n, 0)  (n, 0)  (0, n)  (0, n)  (0, n)
    F           R     R + R     R       C       H       C       R     R + R

A multivector becomes X of shape (S, K, F, K), with S = 2 for R + R, else 1. The F components of each number lie between
row and column, so that left multiplication acts on (K F) and right multiplication on (F K), both plain views. The map
from blade coordinates is orthogonal: a signed permutation, a Walsh-Hadamard transform and a permutation by XOR. In
R + R all vectors have the sign of the block, so that the two blocks share A and B.
"""

# Legend: n dimensions, V = 2^n, P planes, S blocks, K rows = columns, F components of a number; a, b, l, r over K

import functools
import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from relinear.clifford.blades import bivector_dimension, bivector_slice, blade_masks, multivector_dimension
from relinear.clifford.exponential import exp, represented_exp
from relinear.clifford.pauli_strings import hadamard, string_signs, strings_from_matrix, strings_to_matrix
from relinear.clifford.tables import compute_dtype, device_table, take_last

# From this dimension on, factors are computed faster from the rotor's blades, whose exponentials have smaller matrices.
MIN_BY_BLADES = 12

LEFT, RIGHT = 0, 1


class SpinShape(NamedTuple):
    """Hold the sizes of the spin representation of Cl(n): S K F K = 2^n.

    Attributes:
        blocks: S.
        rows: K.
        components: F, of a number.
        columns: K.

    Examples:
        >>> relinear.clifford.spin_shape(3) == relinear.clifford.SpinShape(blocks=1, rows=2, components=2, columns=2)
        True
    """

    blocks: int
    rows: int
    components: int
    columns: int


class _Element(NamedTuple):
    """Represent +-X^a Z^b times unit h of F times (the sign of the block)^chi."""

    a: int = 0
    b: int = 0
    h: int = 0
    chi: int = 0
    sign: int = 1


# Products of the units 1, i, j, k (of which C has the first two) by index: unit g times unit h is +-unit g ^ h.
_UNIT_SIGNS = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, -1, -1, 1], [1, 1, -1, -1]])


def _multiply(x: _Element, y: _Element) -> _Element:
    swap = 1 - 2 * ((x.b & y.a).bit_count() % 2)
    sign = x.sign * y.sign * swap * int(_UNIT_SIGNS[x.h, y.h])
    return _Element(x.a ^ y.a, x.b ^ y.b, x.h ^ y.h, x.chi ^ y.chi, sign)


def _imaginary_strings() -> list[_Element]:
    """Find seven anticommuting real strings on three bits that square to -1: the imaginary octonions."""
    candidates = [_Element(a, b) for a in range(8) for b in range(8) if (a & b).bit_count() % 2]
    for chosen in itertools.combinations(candidates, 7):
        if all(((x.a & y.b).bit_count() + (x.b & y.a).bit_count()) % 2 for x, y in itertools.combinations(chosen, 2)):
            return list(chosen)
    raise AssertionError("three bits have seven anticommuting imaginary strings")


@functools.cache
def _generators(n: int) -> tuple[_Element, ...]:
    """Return the elements that represent e1 ... en."""
    x, z = _Element(1, 0), _Element(0, 1)
    match n:
        case 0:
            return ()
        case 1:
            return (_Element(chi=1),)
        case 2 | 3 | 4:
            by_n = {2: (), 3: (_Element(1, 1, 1),), 4: (_Element(1, 1, 1), _Element(1, 1, 2))}
            return (x, z, *by_n[n])
        case 5:
            return (_Element(1, 0, 1), _Element(0, 1, 1), _Element(3, 1), _Element(1, 3), _Element(3, 3, 1))
        case 6 | 7:
            return tuple(g._replace(chi=n % 2) for g in _imaginary_strings()[:n])
        case 8:
            return (*(g._replace(a=g.a | 8, b=g.b | 8) for g in _imaginary_strings()), _Element(8, 0))
    # Periodicity: Cl(n) = Cl(8) (x) Cl(n - 8), with the volume element of Cl(8) before the generators of Cl(n - 8).
    first = _generators(8)
    volume = functools.reduce(_multiply, first)
    rest = [
        g._replace(a=volume.a | g.a << 4, b=volume.b | g.b << 4, sign=volume.sign * g.sign) for g in _generators(n - 8)
    ]
    return tuple(g._replace(chi=1 if n == 9 else g.chi) for g in (*first, *rest))


def spin_shape(n: int) -> SpinShape:
    """Return the sizes (S, K, F, K) of the spin representation of Cl(n).

    Args:
        n: from 1 to 12.

    Examples:
        >>> relinear.clifford.spin_shape(4)
        SpinShape(blocks=1, rows=2, components=4, columns=2)
    """
    components = {3: 2, 5: 2, 4: 4}.get(n % 8, 1)
    blocks = 2 if n % 8 in (1, 7) else 1
    rows = 2 ** ((n - (components * blocks).bit_length() + 1) // 2)
    return SpinShape(blocks, rows, components, rows)


@functools.cache
def _elements(n: int) -> tuple[_Element, ...]:
    """Return the element that represents every blade of Cl(n, 0), in order."""
    generators = _generators(n)
    negative = n % 8 in (5, 6, 7)
    images = []
    for mask in blade_masks(n):
        image = functools.reduce(_multiply, (generators[i] for i in range(n) if mask >> i & 1), _Element())
        flip = negative and mask.bit_count() // 2 % 2
        images.append(image._replace(sign=-image.sign if flip else image.sign))
    return tuple(images)


def _index(n: int) -> np.ndarray:
    # flat position of every blade's string in (S, F, a, b)
    _, rows, components, _ = spin_shape(n)
    return np.array([((e.chi * components + e.h) * rows + e.a) * rows + e.b for e in _elements(n)])


def _order(n: int) -> np.ndarray:
    return np.argsort(_index(n))


def _signs(n: int) -> np.ndarray:
    """Return the sign of every string in (S, F, a, b), scaled so that the whole map is orthogonal."""
    blocks, rows, _, _ = spin_shape(n)
    return np.array([e.sign for e in _elements(n)])[_order(n)] / np.sqrt(blocks * rows)


def string_tables(n: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tables of ``to_spin``, for kernels that compute it.

    Args:
        n: from 1 to 12.
        like: a tensor on the device that the tables are for.

    Returns:
        The blade of every string in (S, F, a, b), int32 (V,), its sign and scale (V,), and the Walsh-Hadamard matrix
        (K, K), both in single precision.

    Examples:
        >>> [tuple(table.shape) for table in relinear.clifford.string_tables(3, torch.empty(0))]
        [(8,), (8,), (2, 2)]
    """
    walsh = device_table(hadamard, spin_shape(n).rows.bit_length() - 1, like, torch.float32)
    return device_table(_order, n, like, torch.int32), device_table(_signs, n, like, torch.float32), walsh


def string_places(n: int, like: Tensor) -> Tensor:
    """Return the position of every blade's string, int32 (V,): the inverse of the first of ``string_tables``.

    Args:
        n: from 1 to 12.
        like: a tensor on the device that the table is for.

    Examples:
        >>> relinear.clifford.string_places(3, torch.empty(0)).shape
        torch.Size([8])
    """
    return device_table(_index, n, like, torch.int32)


def to_spin(x: Tensor) -> Tensor:
    """Return the spin coordinates of a multivector; an orthogonal map.

    Args:
        x: (..., V) in blade coordinates.

    Returns:
        (..., V), which is X of shape ``spin_shape(n)`` flattened.

    Raises:
        ValueError: if the last dimension is not a power of two from 2 to 4096.

    Examples:
        >>> relinear.clifford.to_spin(torch.randn(5, 8)).shape
        torch.Size([5, 8])
    """
    n = multivector_dimension(x)
    blocks, rows, components, _ = spin_shape(n)
    dtype = compute_dtype(x.dtype)
    coefficients = take_last(x.to(dtype), device_table(_order, n, x)) * device_table(_signs, n, x, dtype)
    matrix = strings_to_matrix(coefficients.unflatten(-1, (blocks, components, rows, rows)))
    if blocks == 2:
        even, odd = matrix.unbind(-4)
        matrix = torch.stack((even + odd, even - odd), dim=-4)
    return matrix.transpose(-3, -2).flatten(-4).to(x.dtype)


def from_spin(x: Tensor) -> Tensor:
    """Return blade coordinates (..., V) of spin coordinates (..., V): inverse and transpose of ``to_spin``.

    Args:
        x: (..., V) in spin coordinates.

    Raises:
        ValueError: if the last dimension is not a power of two from 2 to 4096.

    Examples:
        >>> x = torch.randn(8)
        >>> torch.allclose(relinear.clifford.from_spin(relinear.clifford.to_spin(x)), x, atol=1e-6)
        True
    """
    n = multivector_dimension(x)
    blocks, rows, _, _ = shape = spin_shape(n)
    dtype = compute_dtype(x.dtype)
    matrix = x.to(dtype).unflatten(-1, shape).transpose(-3, -2)
    if blocks == 2:
        plus, minus = matrix.unbind(-4)
        matrix = torch.stack((plus + minus, plus - minus), dim=-4)
    scale = device_table(_signs, n, x, dtype) * rows  # strings_from_matrix has divided by K, the square of the scale
    coefficients = strings_from_matrix(matrix).flatten(-4) * scale
    return take_last(coefficients, device_table(_index, n, x)).to(x.dtype)


def _unit_matrices(components: int, side: int) -> np.ndarray:
    """Return multiplication by each unit: left y[c'] = L[h, c', c] x[c], right y[c'] = x[c] R[h, c, c']."""
    matrices = np.zeros((components, components, components))
    for h, c in itertools.product(range(components), repeat=2):
        matrices[(h, c, c ^ h) if side else (h, h ^ c, c)] = _UNIT_SIGNS[(c, h) if side else (h, c)]
    return matrices


def _element_matrix(a: Tensor) -> Tensor:
    # spin coordinates are scaled so that the map from blades is orthogonal; multiplication needs them unscaled
    shape = spin_shape(multivector_dimension(a))
    dtype = compute_dtype(a.dtype)
    return a.to(dtype).unflatten(-1, shape) * (shape.blocks * shape.rows) ** 0.5


def left_multiplication(a: Tensor) -> Tensor:
    """Return the matrices of x -> a x for a general element a of the represented algebra, given in spin coordinates.

    Args:
        a: (..., V), spin coordinates.

    Returns:
        (..., S, K F, K F): one matrix for each block.

    Raises:
        ValueError: if the last dimension is not a power of two from 2 to 4096.

    Examples:
        >>> relinear.clifford.left_multiplication(relinear.clifford.to_spin(torch.randn(8))).shape
        torch.Size([1, 4, 4])
    """
    matrix = _element_matrix(a)
    units = device_table(_unit_matrices, (matrix.shape[-2], LEFT), a, matrix.dtype)
    return torch.einsum("...rhl,hcd->...rcld", matrix, units).flatten(-4, -3).flatten(-2)


def right_multiplication(b: Tensor) -> Tensor:
    """Return the matrices of x -> x b, as weights for ``F.linear`` on (S, K, F K): see ``left_multiplication``.

    Args:
        b: (..., V), spin coordinates.

    Raises:
        ValueError: if the last dimension is not a power of two from 2 to 4096.

    Examples:
        >>> relinear.clifford.right_multiplication(relinear.clifford.to_spin(torch.randn(8))).shape
        torch.Size([1, 4, 4])
    """
    matrix = _element_matrix(b)
    units = device_table(_unit_matrices, (matrix.shape[-2], RIGHT), b, matrix.dtype)
    return torch.einsum("...lhr,hdc->...crdl", matrix, units).flatten(-4, -3).flatten(-2)


def _bivector_factors(n: int, side: int) -> np.ndarray:
    _, rows, components, _ = spin_shape(n)
    units = _unit_matrices(components, side)
    columns = np.arange(rows)
    factors = []
    for element in _elements(n)[bivector_slice(n)]:
        matrix = np.zeros((rows, rows))
        matrix[columns ^ element.a, columns] = element.sign * string_signs(element.b, rows)
        unit = units[element.h]
        factors.append(np.kron(unit, matrix) if side else np.kron(matrix, unit))
    return np.array(factors).reshape(len(factors), rows * components, rows * components)


def _factor(beta: Tensor, side: int) -> Tensor:
    beta = beta.to(compute_dtype(beta.dtype))
    if bivector_dimension(beta) < MIN_BY_BLADES:
        # The right action of s~ = exp(-beta) on row vectors is exp(-R); R is antisymmetric, so its transpose is exp(R).
        return represented_exp(beta, _bivector_factors, side)
    multiplication, beta = (right_multiplication, -beta) if side else (left_multiplication, beta)
    return multiplication(to_spin(exp(beta)))[..., 0, :, :]  # both blocks share it, as a rotor is even


def left_factor(beta: Tensor) -> Tensor:
    """Return A with A @ X = r x for the rotor r = exp(beta), where X is viewed as (S, K F, K).

    Args:
        beta: bivectors (..., P).

    Returns:
        (..., K F, K F) in at least single precision; orthogonal for real beta.

    Raises:
        ValueError: if the last dimension is not n(n-1)/2 for n from 1 to 12.

    Examples:
        >>> relinear.clifford.left_factor(torch.randn(3)).shape
        torch.Size([4, 4])
    """
    return _factor(beta, LEFT)


def right_factor(beta: Tensor) -> Tensor:
    """Return B with X @ B^T = x s~ for the rotor s = exp(beta), where X is viewed as (S, K, F K).

    It is a weight for ``F.linear``.

    Args:
        beta: bivectors (..., P).

    Returns:
        (..., F K, F K) in at least single precision; orthogonal for real beta.

    Raises:
        ValueError: if the last dimension is not n(n-1)/2 for n from 1 to 12.

    Examples:
        >>> relinear.clifford.right_factor(torch.randn(3)).shape
        torch.Size([4, 4])
    """
    return _factor(beta, RIGHT)
