"""Define the blades of Cl(n): their order, their grades, and the index tables that the other files here use.

A multivector is a tensor (..., 2^n) of blade coordinates, ordered by grade and then lexicographically, as in the
``clifford`` package: 1, e1, ..., en, e12, e13, ..., e12...n. A bivector is (..., n(n-1)/2) in the same order.
"""

# Legend: n dimensions, V = 2^n blades, P = n(n-1)/2 planes

import functools
import itertools
import math

import numpy as np
import torch
from torch import Tensor

MAX_DIMENSION = 12


@functools.cache
def blade_masks(n: int) -> tuple[int, ...]:
    """Return bit masks of the V blades in order; bit i is the basis vector e_{i+1}."""
    return tuple(
        sum(1 << i for i in chosen) for grade in range(n + 1) for chosen in itertools.combinations(range(n), grade)
    )


def grades(n: int) -> np.ndarray:
    """Return the grade of each blade, (V,)."""
    return np.array([mask.bit_count() for mask in blade_masks(n)])


def parities(n: int) -> np.ndarray:
    """Return 1 for each odd blade and 0 for each even one, (V,)."""
    return grades(n) % 2


def scalar_one(size: int) -> np.ndarray:
    """Return coordinates (size,) of the scalar 1."""
    return np.eye(1, size)[0]


def multivector_dimension(x: Tensor) -> int:
    """Return n of a multivector (..., 2^n).

    Args:
        x: (..., V).

    Raises:
        ValueError: if the last dimension is not a power of two from 2 to 4096.

    Examples:
        >>> relinear.clifford.multivector_dimension(torch.randn(5, 8))
        3
    """
    size = x.shape[-1] if x.ndim else 0
    n = size.bit_length() - 1
    if size != 1 << max(n, 0) or not 1 <= n <= MAX_DIMENSION:
        raise ValueError(
            f"a multivector ends in 2^n coordinates, n from 1 to {MAX_DIMENSION}; got shape {tuple(x.shape)}"
        )
    return n


def bivector_dimension(beta: Tensor) -> int:
    """Return n of a bivector (..., n(n-1)/2); no coordinates at all means n = 1.

    Args:
        beta: (..., P).

    Raises:
        ValueError: if the last dimension is not n(n-1)/2 for n from 1 to 12.

    Examples:
        >>> relinear.clifford.bivector_dimension(torch.randn(5, 6))
        4
    """
    size = beta.shape[-1] if beta.ndim else -1
    n = (1 + math.isqrt(max(1 + 8 * size, 0))) // 2
    if size < 0 or n * (n - 1) // 2 != size or n > MAX_DIMENSION:
        raise ValueError(
            f"a bivector ends in n(n-1)/2 coordinates, n up to {MAX_DIMENSION}; got shape {tuple(beta.shape)}"
        )
    return n


def bivector_slice(n: int) -> slice:
    """Return where the bivector coordinates lie among the 2^n."""
    return slice(1 + n, 1 + n + n * (n - 1) // 2)


def embed_bivector(beta: Tensor) -> Tensor:
    """Return the bivector (..., P) as a multivector (..., V).

    Args:
        beta: (..., P).

    Raises:
        ValueError: if the last dimension is not n(n-1)/2 for n from 1 to 12.

    Examples:
        >>> relinear.clifford.embed_bivector(torch.tensor([2.0]))
        tensor([0., 0., 0., 2.])
    """
    n = bivector_dimension(beta)
    bivector_indices = bivector_slice(n)
    return torch.nn.functional.pad(beta, (bivector_indices.start, 2**n - bivector_indices.stop))


def take_bivector(x: Tensor) -> Tensor:
    """Return the grade-2 part (..., P) of a multivector (..., V).

    Args:
        x: (..., V) in blade coordinates.

    Raises:
        ValueError: if the last dimension is not a power of two from 2 to 4096.

    Examples:
        >>> relinear.clifford.take_bivector(torch.arange(4.0))
        tensor([3.])
    """
    return x[..., bivector_slice(multivector_dimension(x))]
