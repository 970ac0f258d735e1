"""Products of multivectors in blade coordinates, batched and differentiable.

Above n = 4 products are computed with matrices of size 2^floor(n/2), without a table of products of blades, which grows
as 8^n, or a 2^n x 2^n matrix. Up to n = 4 the table is faster. Half-precision inputs are computed in single precision;
batch dimensions broadcast.
"""

# Legend: n dimensions, V = 2^n blades, P = n(n-1)/2 planes, K = 2^floor(n/2)

import functools
import itertools

import numpy as np
import torch
from torch import Tensor

from relinear.clifford.blades import blade_masks, grades, multivector_dimension
from relinear.clifford.matrices import from_matrix, to_matrix
from relinear.clifford.tables import compute_dtype, device_table

MAX_TABLE = 4


def _table(n: int) -> np.ndarray:
    """Return products of blades, (V, V, V): entry [i, k, j] is the coordinate k of blade i times blade j."""
    masks = blade_masks(n)
    position = {mask: index for index, mask in enumerate(masks)}
    table = np.zeros((len(masks),) * 3)
    for (i, a), (j, b) in itertools.product(enumerate(masks), repeat=2):
        swaps = sum((a >> bit + 1).bit_count() for bit in range(n) if b >> bit & 1)
        table[i, position[a ^ b], j] = 1 - 2 * (swaps % 2)
    return table


def _reverse_signs(n: int) -> np.ndarray:
    grade = grades(n)
    return 1 - 2 * (grade * (grade - 1) // 2 % 2)


def _common(*inputs: Tensor) -> tuple[list[Tensor], torch.dtype]:
    """Return the inputs in the dtype to compute in, and the result's dtype; raise ValueError for different algebras."""
    dimensions = [multivector_dimension(x) for x in inputs]
    if len(set(dimensions)) > 1:
        raise ValueError(f"multivectors of different algebras: last dimensions {[x.shape[-1] for x in inputs]}")
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in inputs))
    exact = compute_dtype(dtype)
    return [x.to(exact) for x in inputs], dtype if dtype.is_floating_point or dtype.is_complex else exact


def _by_table(a: Tensor, b: Tensor, table: Tensor) -> Tensor:
    """Return sum_ij a_i table_ikj b_j (..., V) for a (..., V), b (..., V) and a table (V, V, V)."""
    return ((a @ table.flatten(1)).unflatten(-1, table.shape[1:]) @ b.unsqueeze(-1)).squeeze(-1)


def _product(first: Tensor, *factors: Tensor) -> Tensor:
    n = multivector_dimension(first)
    if n <= MAX_TABLE:
        table = device_table(_table, n, first, first.dtype)
        return functools.reduce(lambda a, b: _by_table(a, b, table), factors, first)
    x = from_matrix(functools.reduce(torch.matmul, map(to_matrix, (first, *factors))))
    return x if first.is_complex() else x.real


def reverse(a: Tensor) -> Tensor:
    """Return the reversion a~, which reverses the order of vectors in products: (-1)^(g(g-1)/2) on grade g.

    Args:
        a: (..., V).

    Raises:
        ValueError: if the last dimension is not a power of two from 2 to 4096.

    Examples:
        >>> relinear.clifford.reverse(torch.ones(4))
        tensor([ 1.,  1.,  1., -1.])
    """
    return a * device_table(_reverse_signs, multivector_dimension(a), a, a.dtype)


def geometric_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the geometric product a b in Cl(n, 0).

    Args:
        a, b: (..., V), batch dimensions broadcast; any real or complex dtypes.

    Returns:
        (..., V) in the dtype that the two promote to.

    Raises:
        ValueError: if the last dimensions differ or are not powers of two from 2 to 4096.

    Examples:
        >>> _, e1, e2, e12 = torch.eye(4)
        >>> torch.equal(relinear.clifford.geometric_product(e1, e2), e12)
        True
    """
    factors, dtype = _common(a, b)
    return _product(*factors).to(dtype)


def sandwich(r: Tensor, x: Tensor, s: Tensor | None = None) -> Tensor:
    """Return r x s~; by default s = r.

    It is the map of Lemma 1 and the rotor sandwich of arXiv 2507.11688.

    Args:
        r, x, s: (..., V), batch dimensions broadcast.

    Returns:
        (..., V) in the dtype that the inputs promote to.

    Raises:
        ValueError: if the last dimensions differ or are not powers of two from 2 to 4096.

    Examples:
        >>> r, e1 = relinear.clifford.exp(torch.tensor([torch.pi / 4])), torch.eye(4)[1]
        >>> relinear.clifford.sandwich(r, e1).abs().round()  # e2 or its opposite
        tensor([0., 0., 1., 0.])
    """
    (r, x, s), dtype = _common(r, x, r if s is None else s)
    return _product(r, x, reverse(s)).to(dtype)
