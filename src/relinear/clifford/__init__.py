"""Clifford algebra Cl(n, 0), n = 1 to 12: products, exponentials and decompositions, batched and differentiable.

Multivectors are (..., 2^n) blade coordinates in the order of the ``clifford`` package, bivectors (..., n(n-1)/2).

Examples:
    >>> a, b = torch.randn(2, 8)  # of Cl(3): 1, e1, e2, e12, e3, e13, e23, e123
    >>> relinear.clifford.geometric_product(a, b).shape
    torch.Size([8])
"""

from relinear.clifford.bivectors import bivector_from_matrix, bivector_to_matrix
from relinear.clifford.blades import bivector_dimension, embed_bivector, multivector_dimension, take_bivector
from relinear.clifford.decomposition import decompose
from relinear.clifford.exponential import exp
from relinear.clifford.logarithm import log
from relinear.clifford.matrices import from_matrix, to_matrix
from relinear.clifford.products import geometric_product, reverse, sandwich
from relinear.clifford.spin import (
    SpinShape,
    from_spin,
    left_factor,
    left_multiplication,
    right_factor,
    right_multiplication,
    spin_shape,
    string_places,
    string_tables,
    to_spin,
)

__all__ = [
    "SpinShape",
    "bivector_dimension",
    "bivector_from_matrix",
    "bivector_to_matrix",
    "decompose",
    "embed_bivector",
    "exp",
    "from_matrix",
    "from_spin",
    "geometric_product",
    "left_factor",
    "left_multiplication",
    "log",
    "multivector_dimension",
    "reverse",
    "right_factor",
    "right_multiplication",
    "sandwich",
    "spin_shape",
    "string_places",
    "string_tables",
    "take_bivector",
    "to_matrix",
    "to_spin",
]
