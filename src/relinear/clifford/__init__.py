"""Clifford algebra Cl(n, 0), n = 1 to 12: products, exponentials and decompositions, batched and differentiable.

Multivectors are (..., 2^n) blade coordinates in the order of the ``clifford`` package, bivectors (..., n(n-1)/2).

Examples:
    >>> a, b = torch.randn(2, 8)  # of Cl(3): 1, e1, e2, e12, e3, e13, e23, e123
    >>> relinear.clifford.geometric_product(a, b).shape
    torch.Size([8])
"""

from types import ModuleType as _ModuleType

from relinear.clifford.bivectors import bivector_from_matrix as bivector_from_matrix
from relinear.clifford.bivectors import bivector_to_matrix as bivector_to_matrix
from relinear.clifford.blades import bivector_dimension as bivector_dimension
from relinear.clifford.blades import embed_bivector as embed_bivector
from relinear.clifford.blades import multivector_dimension as multivector_dimension
from relinear.clifford.blades import take_bivector as take_bivector
from relinear.clifford.decomposition import decompose as decompose
from relinear.clifford.exponential import exp as exp
from relinear.clifford.logarithm import log as log
from relinear.clifford.matrices import from_matrix as from_matrix
from relinear.clifford.matrices import to_matrix as to_matrix
from relinear.clifford.products import geometric_product as geometric_product
from relinear.clifford.products import reverse as reverse
from relinear.clifford.products import sandwich as sandwich
from relinear.clifford.spin import SpinShape as SpinShape
from relinear.clifford.spin import from_spin as from_spin
from relinear.clifford.spin import left_factor as left_factor
from relinear.clifford.spin import left_multiplication as left_multiplication
from relinear.clifford.spin import right_factor as right_factor
from relinear.clifford.spin import right_multiplication as right_multiplication
from relinear.clifford.spin import spin_shape as spin_shape
from relinear.clifford.spin import string_places as string_places
from relinear.clifford.spin import string_tables as string_tables
from relinear.clifford.spin import to_spin as to_spin

__all__ = [name for name, value in list(globals().items()) if name[0] != "_" and not isinstance(value, _ModuleType)]
