"""Products and exponentials of multivectors in blade coordinates, batched and differentiable.

Everything goes through matrices of size 2^floor(n/2): no Cayley table (which grows as 8^n) and no 2^n x 2^n matrix.
Half-precision inputs are computed in single precision; batch dimensions broadcast.
"""

# Legend: n dimensions, V = 2^n blades, P = n(n-1)/2 planes, K = 2^floor(n/2)

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from relinear.clifford.blades import bivector_dimension, compute_dtype, device_table, grades, multivector_dimension
from relinear.clifford.matrices import bivector_matrices, from_matrix, matrix_exp, to_matrix

__all__ = ["exp", "geometric_product", "reverse", "sandwich"]


def _reverse_signs(n: int) -> np.ndarray:
    grade = grades(n)
    return 1 - 2 * (grade * (grade - 1) // 2 % 2)


def _result(matrix: Tensor, *inputs: Tensor) -> Tensor:
    """Blade coordinates in the dtype that the inputs promote to."""
    dtype = inputs[0].dtype
    for other in inputs[1:]:
        dtype = torch.promote_types(dtype, other.dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        dtype = compute_dtype(dtype)
    x = from_matrix(matrix)
    return (x if dtype.is_complex else x.real).to(dtype)


def _same_dimension(*inputs: Tensor) -> int:
    dimensions = [multivector_dimension(x) for x in inputs]
    if len(set(dimensions)) > 1:
        raise ValueError(f"multivectors of different algebras: last dimensions {[x.shape[-1] for x in inputs]}")
    return dimensions[0]


def reverse(a: Tensor) -> Tensor:
    """The reversion a~, which turns every product of vectors around: (-1)^(g(g-1)/2) on grade g.

    Args:
        a: (..., V).
    """
    return a * device_table(_reverse_signs, multivector_dimension(a), a, a.dtype)


def geometric_product(a: Tensor, b: Tensor) -> Tensor:
    """The geometric product a b in Cl(n, 0).

    Args:
        a, b: (..., V), batch dimensions broadcast; any real or complex dtypes.

    Returns:
        (..., V) in the dtype that the two promote to.

    Raises:
        ValueError: if the last dimensions differ or are no power of two from 2 to 4096.
    """
    _same_dimension(a, b)
    dtype = torch.promote_types(a.dtype, b.dtype)
    return _result(to_matrix(a.to(dtype)) @ to_matrix(b.to(dtype)), a, b)


def sandwich(r: Tensor, x: Tensor, s: Tensor | None = None) -> Tensor:
    """r x s~, with s = r where it is not given (Lemma 1 and the rotor sandwich of arXiv 2507.11688).

    Args:
        r, x, s: (..., V), batch dimensions broadcast.

    Returns:
        (..., V) in the dtype that the inputs promote to.

    Raises:
        ValueError: if the last dimensions differ or are no power of two from 2 to 4096.
    """
    s = r if s is None else s
    _same_dimension(r, x, s)
    dtype = torch.promote_types(torch.promote_types(r.dtype, x.dtype), s.dtype)
    left, middle, right = (to_matrix(t.to(dtype)) for t in (r, x, reverse(s)))
    return _result(left @ middle @ right, r, x, s)


def exp(beta: Tensor) -> Tensor:
    """The exponential of a bivector: a rotor, exp(b) = cos|b| + sin|b| b / |b| for a simple b.

    It turns vectors by v -> r v r~, a rotation by twice the norm of each simple part.

    Args:
        beta: (..., P), any real or complex dtype.

    Returns:
        (..., V): an even multivector with r r~ = 1.

    Raises:
        ValueError: if the last dimension is no n(n-1)/2 for n from 1 to 12.
    """
    n = bivector_dimension(beta)
    dtype = torch.promote_types(compute_dtype(beta.dtype), torch.complex64)
    generators = device_table(bivector_matrices, n, beta, dtype)
    size = generators.shape[-1]
    generator = (beta.to(dtype) @ generators.flatten(1)).unflatten(-1, (size, size))
    blocks = matrix_exp(generator).unsqueeze(-3).expand(*beta.shape[:-1], 1 + n % 2, size, size)
    return _result(blocks, beta)
