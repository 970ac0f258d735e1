"""Exponentials and logarithms in any signature (p, q, r), by matrices of left multiplication.

The algebra acts on itself, b -> a b, so that whatever holds of matrices V x V holds of multivectors, motors that no
eigenvectors diagonalise among them. Rotors are even, and act on the V/2 even coordinates alone.
"""

# Legend: n dimensions, V = 2^n blades, P planes, E = V/2 even blades

import math

import numpy as np
import torch
from torch import Tensor

from relinear.clifford.blades import multivector_dimension, parities, unit
from relinear.clifford.matrices import matrix_exp
from relinear.clifford.products import geometric_table, reverse, table_product
from relinear.clifford.tables import compute_dtype, device_table, is_concrete

ROOTS = 6
ITERATIONS = 12  # of a root: converges quadratically, from any rotor but those near -1 within ten
SERIES_TERMS = 12
NEAR = 0.25  # of 1: where no root is needed, and rounding of the roots would cost precision


def _matrix(x: Tensor, table: Tensor) -> Tensor:
    """Of left multiplication by x, for a table of products [x, result, other]."""
    return (x @ table.flatten(1)).unflatten(-1, table.shape[1:])


def left_matrix(x: Tensor, signature: tuple[int, int, int]) -> Tensor:
    """Return the matrix (..., V, V) of b -> x b in blade coordinates, of x (..., V)."""
    return _matrix(x, device_table(geometric_table, signature, x, x.dtype))


def regular_exp(x: Tensor, signature: tuple[int, int, int]) -> Tensor:
    """Return the exponential (..., V) of any multivector (..., V), as often differentiable as needed."""
    exact = x.to(compute_dtype(x.dtype))
    return matrix_exp(left_matrix(exact, signature))[..., 0].to(x.dtype)


def _even_blades(n: int) -> np.ndarray:
    return np.flatnonzero(parities(n) == 0)


def _even_table(p: int, q: int, r: int) -> np.ndarray:
    """Products of even blades, (E, E, E), as ``geometric_table``."""
    even = _even_blades(p + q + r)
    return geometric_table(p, q, r)[np.ix_(even, even, even)]


def _square_root(matrix: Tensor) -> Tensor:
    """The principal square root, by the product form of Denman and Beavers' iteration (Cheng et al. 2001)."""
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    root, rest = matrix, matrix
    for _ in range(ITERATIONS):
        inverse = torch.linalg.inv_ex(rest).inverse
        root = root @ (eye + inverse) / 2
        rest = (eye + (rest + inverse) / 2) / 2
    return root


def _log_near_one(matrix: Tensor) -> Tensor:
    """2 artanh((A - 1) (A + 1)^-1) by its series."""
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    ratio = torch.linalg.solve_ex(matrix + eye, matrix - eye).result
    square, total = ratio @ ratio, eye / (2 * SERIES_TERMS - 1)
    for term in range(SERIES_TERMS - 2, -1, -1):
        total = total @ square + eye / (2 * term + 1)
    return 2 * ratio @ total


def _principal_log(matrix: Tensor) -> Tensor:
    """The first column of the logarithm of matrices of left multiplication: (..., E)."""
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    near = ((matrix - eye)[..., 0].detach().abs().amax(-1) < NEAR)[..., None, None]
    root = matrix
    for _ in range(ROOTS):
        root = _square_root(root)
    return torch.where(near, _log_near_one(matrix), 2**ROOTS * _log_near_one(root))[..., 0]


def _rotor_error(x: Tensor, signature: tuple[int, int, int]) -> Tensor:
    """How far x (..., V) is from even, and x ~x from 1, relative to its size: (...,)."""
    scale = x.abs().amax(-1).clamp_min(1.0)
    n = multivector_dimension(x)
    odd = (x * device_table(parities, n, x, x.dtype)).abs().amax(-1)
    table = device_table(geometric_table, signature, x, x.dtype)
    off = table_product(x, reverse(x), table) - device_table(unit, 2**n, x, x.dtype)
    return torch.maximum(odd / scale, off.abs().amax(-1) / scale.square())


def regular_log(rotor: Tensor, signature: tuple[int, int, int]) -> Tensor:
    """Return the principal logarithm (..., P) of rotors (..., V) of any signature: even, r ~r = 1.

    Through repeated square roots, in double precision. Near 1 the error is relative to the bivector.

    Raises:
        ValueError: if the rotor is complex, not even, not normalised, or has no principal logarithm that is a bivector
            (it is -1 or near it, or minus a boost). Where nothing can be raised such a rotor gives NaN.
    """
    if rotor.is_complex():
        raise ValueError("log needs a real rotor")
    n, exact = multivector_dimension(rotor), rotor.double()
    tolerance = torch.finfo(compute_dtype(rotor.dtype)).eps ** 0.25
    error = _rotor_error(exact.detach(), signature)
    valid = error < tolerance
    even = exact[..., device_table(_even_blades, n, exact)]
    one = device_table(unit, even.shape[-1], exact, exact.dtype)
    even = torch.where(valid.unsqueeze(-1), even, one)
    table = device_table(_even_table, signature, exact, exact.dtype)
    found = _principal_log(_matrix(even, table))
    planes = n * (n - 1) // 2  # bivectors are the second of the even grades
    bivector = found[..., 1 : 1 + planes]
    with torch.no_grad():
        only = torch.nn.functional.pad(bivector, (1, found.shape[-1] - 1 - planes))
        missed = (matrix_exp(_matrix(only, table))[..., 0] - even).abs().amax(-1)
        reached = missed < 4 * tolerance * even.abs().amax(-1)
    if is_concrete(rotor) and not bool((valid & reached).all()):
        raise ValueError(
            f"log needs rotors (even, r ~r = 1; here an error of {float(error.max()):.3g}) that have a logarithm on "
            "the principal branch: none that is -1 or turns by nearly as much, and no -1 times a boost"
        )
    return torch.where((valid & reached).unsqueeze(-1), bivector, math.nan).to(rotor.dtype)
