"""Multivectors with operators: a thin layer over tensors of blade coordinates, for any signature of up to 6 dimensions.

    e = Algebra(3).blades
    rotor = (0.3 * e.e12).exp()
    rotor.sandwich(e.e1 + 2 * e.e3)

Coordinates are in the order of the rest of this room, and every operation is one of tensors: batched, differentiable,
on any device. Products of (n, 0, 0) are those of ``geometric_product``; of other signatures they come from a table.
"""

# Legend: n dimensions, V = 2^n blades, P = n(n-1)/2 planes

from __future__ import annotations

import functools
import itertools
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relinear.clifford.blades import bivector_slice, blade_masks, embed_bivector, grades, parities, take_bivector, unit
from relinear.clifford.decomposition import decompose
from relinear.clifford.exponential import exp
from relinear.clifford.logarithm import log
from relinear.clifford.products import geometric_product, geometric_table, reverse, table_product
from relinear.clifford.regular import left_matrix, regular_exp, regular_log
from relinear.clifford.tables import compute_dtype, device_table, is_concrete

LARGEST_ALGEBRA = 6


def _of_grades(signature: tuple[int, int, int], wanted: Callable[..., np.ndarray]) -> np.ndarray:
    """The table of products with the entries whose grades (of the first, the result, the second) are wanted."""
    grade = grades(sum(signature))
    return geometric_table(*signature) * wanted(grade[:, None, None], grade[None, :, None], grade[None, None, :])


def wedge_table(p: int, q: int, r: int) -> np.ndarray:
    """Outer products of blades: what is of grade s + t in a product of grades s and t."""
    return _of_grades((p, q, r), lambda s, result, t: result == s + t)


def left_contraction_table(p: int, q: int, r: int) -> np.ndarray:
    """Return what is of grade t - s."""
    return _of_grades((p, q, r), lambda s, result, t: result == t - s)


def right_contraction_table(p: int, q: int, r: int) -> np.ndarray:
    """Return what is of grade s - t."""
    return _of_grades((p, q, r), lambda s, result, t: result == s - t)


def inner_table(p: int, q: int, r: int) -> np.ndarray:
    """Return what is of grade abs(s - t), where neither is a scalar."""
    return _of_grades((p, q, r), lambda s, result, t: (result == abs(s - t)) & (s > 0) & (t > 0))


def _complement_signs(n: int) -> np.ndarray:
    """The sign of every blade times the blade of all other vectors, in terms of the pseudoscalar."""
    everything = 2**n - 1
    swaps = [
        sum((mask >> bit + 1).bit_count() for bit in range(n) if (everything ^ mask) >> bit & 1)
        for mask in blade_masks(n)
    ]
    return 1 - 2 * (np.array(swaps) % 2)


# not a cached property, whose lock compilers cannot take
@functools.cache
def _names(n: int, first: int) -> tuple[str, ...]:
    """Of the blades of n vectors whose numbers begin at ``first``."""
    indices = ("".join(str(first + i) for i in range(n) if mask >> i & 1) for mask in blade_masks(n))
    return tuple(f"e{index}" if index else "1" for index in indices)


@dataclass(frozen=True)
class Algebra:
    """Describe the Clifford algebra Cl(p, q, r) of n = p + q + r vectors, n from 1 to 6.

    The first r vectors square to 0, the next p to 1 and the last q to -1, as in the ``clifford`` package. Vectors are
    named e1 ... en, or e0 ... e(n-1) where r = 1, as is usual for projective algebras.

    Args:
        p, q, r: how many vectors square to 1, to -1 and to 0.

    Raises:
        ValueError: for negative numbers or n outside 1..6.

    Examples:
        >>> relinear.clifford.Algebra(2).names
        ('1', 'e1', 'e2', 'e12')
    """

    p: int
    q: int = 0
    r: int = 0

    def __post_init__(self) -> None:
        if min(self.signature) < 0 or not 1 <= self.n <= LARGEST_ALGEBRA:
            raise ValueError(
                f"an algebra (p, q, r) has 1 to {LARGEST_ALGEBRA} vectors in all; got {self.signature}. Up to 12 "
                "vectors that square to 1 are served by the functions of relinear.clifford on plain tensors"
            )

    @property
    def signature(self) -> tuple[int, int, int]:
        return self.p, self.q, self.r

    @property
    def n(self) -> int:
        return sum(self.signature)

    @property
    def is_euclidean(self) -> bool:
        """Whether every vector squares to 1."""
        return self.p == self.n

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the V blades in order: "1", "e1", ..., "e12", ..."""
        return _names(self.n, 0 if self.r == 1 else 1)

    def place_of(self, name: str) -> tuple[int, int]:
        """Where the coordinate of a blade is, and its sign: -1 for names such as "e21", an odd number of swaps away.

        Raises:
            KeyError: for a name that is none.
        """
        digits = name[1:] if name.startswith("e") else ""
        ordered = "".join(sorted(digits))
        standard = f"e{ordered}" if digits else name
        if standard not in self.names:
            raise KeyError(f"{self} has no blade {name!r}; its blades are {', '.join(self.names)}")
        swaps = sum(a > b for a, b in itertools.combinations(digits, 2))
        return self.names.index(standard), 1 - 2 * (swaps % 2)

    @property
    def blades(self) -> Blades:
        """The basis blades by name, such as ``blades.e12``, ``blades["e12"]`` or, with its sign, ``blades.e21``.

        They are in torch's default dtype.
        """
        return Blades(self)

    @property
    def pseudoscalar(self) -> Multivector:
        return Multivector(torch.nn.functional.pad(torch.ones(1), (2**self.n - 1, 0)), self)

    def multivector(self, values: Tensor | Sequence[Any] | Mapping[str, Any]) -> Multivector:
        """Return a multivector of coordinates (..., V), or of numbers and tensors (...,) by names of blades."""
        if not isinstance(values, Mapping):
            return Multivector(torch.as_tensor(values), self)
        total = self.scalar(0.0)
        for name, value in values.items():
            total = total + self.blades[name] * value
        return total

    def scalar(self, value: Tensor | float) -> Multivector:
        """Return a scalar, or a batch of them (...,)."""
        value = torch.as_tensor(value)
        value = value.to(compute_dtype(value.dtype)) if not value.dtype.is_floating_point else value
        return Multivector(value.unsqueeze(-1) * device_table(unit, 2**self.n, value, value.dtype), self)

    def _of_coordinates(self, kind: str, coordinates: Tensor | Sequence[Any], first: int, count: int) -> Multivector:
        coordinates = torch.as_tensor(coordinates)
        if coordinates.shape[-1:] != (count,):
            raise ValueError(f"a {kind} of {self} has {count} coordinates; got shape {tuple(coordinates.shape)}")
        return Multivector(torch.nn.functional.pad(coordinates, (first, 2**self.n - first - count)), self)

    def vector(self, coordinates: Tensor | Sequence[Any]) -> Multivector:
        """Return a vector of its coordinates (..., n)."""
        return self._of_coordinates("vector", coordinates, 1, self.n)

    def bivector(self, coordinates: Tensor | Sequence[Any]) -> Multivector:
        """Return a bivector of its coordinates (..., P)."""
        return self._of_coordinates("bivector", coordinates, 1 + self.n, self.n * (self.n - 1) // 2)


class Blades(Mapping[str, "Multivector"]):
    """The basis blades of an algebra by name, as a mapping and as attributes."""

    def __init__(self, algebra: Algebra) -> None:
        self._algebra = algebra

    def __getitem__(self, name: str) -> Multivector:
        position, sign = self._algebra.place_of(name)
        values = torch.zeros(2**self._algebra.n)
        values[position] = sign
        return Multivector(values, self._algebra)

    def __getattr__(self, name: str) -> Multivector:
        if name.startswith("_"):  # what copying and pickling ask for before there is an algebra
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._algebra.names)

    def __len__(self) -> int:
        return len(self._algebra.names)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._algebra.names[1:]]


def _is_scalar(x: object) -> bool:
    return isinstance(x, (numbers.Number, Tensor))


def _dimensions_taken(index: Any) -> int:
    """How many dimensions of a tensor one of its indices stands for."""
    if index is None:
        return 0
    return index.ndim if isinstance(index, Tensor) and index.dtype == torch.bool else 1


class Multivector:
    """Hold coordinates (..., V) of an algebra, with its operations.

    ``+``, ``-``, ``*`` (geometric product), ``^`` (outer product), ``|`` (inner product, zero with scalars, as in the
    ``clifford`` package), ``&`` (regressive product), ``~`` (reverse), ``/`` (by scalars and by what has an inverse)
    and ``**`` (by integers). A number is a scalar, and so is every entry of a tensor (...,). Mind that Python's ``^``,
    ``|`` and ``&`` bind less tightly than ``+``.

    Args:
        values: (..., V), real or complex; integers become floats.
        algebra: whose coordinates they are.

    Raises:
        ValueError: if the last dimension is not V.

    Examples:
        >>> e1, e2 = (relinear.clifford.Multivector(row, relinear.clifford.Algebra(2)) for row in torch.eye(4)[1:3])
        >>> (e1 * e2).values
        tensor([0., 0., 0., 1.])
    """

    __slots__ = ("algebra", "values")
    __array_ufunc__ = None  # numpy's numbers leave products with multivectors to these

    def __init__(self, values: Tensor, algebra: Algebra) -> None:
        if values.shape[-1:] != (2**algebra.n,):
            raise ValueError(
                f"a multivector of {algebra} has {2**algebra.n} coordinates in its last dimension; got shape "
                f"{tuple(values.shape)}"
            )
        inexact = values.dtype.is_floating_point or values.dtype.is_complex
        self.values = values if inexact else values.to(compute_dtype(values.dtype))
        self.algebra = algebra

    # Looking at coordinates

    @property
    def shape(self) -> torch.Size:
        """Of the batch."""
        return self.values.shape[:-1]

    @property
    def scalar(self) -> Tensor:
        """The scalar part, (...,)."""
        return self.values[..., 0]

    @property
    def vector(self) -> Tensor:
        """The coordinates of the vector part, (..., n)."""
        return self.values[..., 1 : 1 + self.algebra.n]

    @property
    def bivector(self) -> Tensor:
        """The coordinates of the bivector part, (..., P)."""
        return self.values[..., bivector_slice(self.algebra.n)]

    def __getitem__(self, index: Any) -> Any:
        """The coordinate (...,) of a blade by its name; entries of the batch by anything else."""
        if isinstance(index, str):
            position, sign = self.algebra.place_of(index)
            return sign * self.values[..., position]
        index = index if isinstance(index, tuple) else (index,)
        if any(i is Ellipsis for i in index):
            return self._made(self.values[(*index, slice(None))])
        if sum(map(_dimensions_taken, index)) > len(self.shape):
            raise IndexError(
                f"too many indices for a batch of shape {tuple(self.shape)}; coordinates are had by the names of "
                'their blades, as in x["e12"], and all of them by x.values'
            )
        return self._made(self.values[(*index, ...)])

    def grade(self, *wanted: int) -> Multivector:
        """Return the part of these grades.

        Raises:
            ValueError: for none, and for what is no grade of the algebra.
        """
        if not wanted or not set(wanted) <= set(range(self.algebra.n + 1)):
            raise ValueError(f"{self.algebra} has grades 0 to {self.algebra.n}; got {wanted}")
        of_blades = device_table(grades, self.algebra.n, self.values)
        return self._made(self.values * sum(of_blades == k for k in wanted))

    def grades(self, tolerance: float = 0.0) -> set[int]:
        """Return the grades in which anything in the batch is larger than ``tolerance``."""
        present = (self.values.abs() > tolerance).flatten(0, -2).any(0) if self.shape else self.values.abs() > tolerance
        return set(grades(self.algebra.n)[present.cpu().numpy()].tolist())

    def to(self, *args: Any, **kwargs: Any) -> Multivector:
        """On another device or in another dtype: ``torch.Tensor.to``."""
        return self._made(self.values.to(*args, **kwargs))

    def __repr__(self) -> str:
        if self.shape:
            return f"Multivector(shape={tuple(self.shape)}, {self.algebra}, dtype={self.values.dtype})"
        terms = [(v, name) for v, name in zip(self.values.tolist(), self.algebra.names) if v != 0]
        return " + ".join(f"{v:.5g}" + ("" if name == "1" else f" {name}") for v, name in terms) or "0"

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        """Whether all coordinates are the same, (...,); numbers and tensors (...,) are scalars."""
        lifted = self._lifted(other)
        return NotImplemented if lifted is None else (self.values == lifted.values).all(-1)

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        """Whether any coordinate differs, (...,)."""
        lifted = self._lifted(other)
        return NotImplemented if lifted is None else (self.values != lifted.values).any(-1)

    __hash__ = None  # type: ignore[assignment]

    # Sums and multiples

    def _made(self, values: Tensor) -> Multivector:
        return Multivector(values, self.algebra)

    def _lifted(self, other: Any) -> Multivector | None:
        """``other`` as a multivector of this algebra; None for what is none."""
        if isinstance(other, Multivector):
            if other.algebra != self.algebra:
                raise ValueError(f"multivectors of different algebras: {self.algebra} and {other.algebra}")
            return other
        if not _is_scalar(other):
            return None
        one = device_table(unit, 2**self.algebra.n, self.values, self.values.dtype)
        return self._made((other.unsqueeze(-1) if isinstance(other, Tensor) else other) * one)

    def __add__(self, other: Any) -> Multivector:
        lifted = self._lifted(other)
        return NotImplemented if lifted is None else self._made(self.values + lifted.values)

    __radd__ = __add__

    def __neg__(self) -> Multivector:
        return self._made(-self.values)

    def __pos__(self) -> Multivector:
        return self

    def __sub__(self, other: Any) -> Multivector:
        lifted = self._lifted(other)
        return NotImplemented if lifted is None else self._made(self.values - lifted.values)

    def __rsub__(self, other: Any) -> Multivector:
        return -self + other

    def _scaled(self, factor: Any) -> Multivector:
        return self._made(self.values * (factor.unsqueeze(-1) if isinstance(factor, Tensor) else factor))

    # Products

    def _by_table(self, other: Any, table: Callable[[int, int, int], np.ndarray], swapped: bool = False) -> Multivector:
        lifted = self._lifted(other)
        if lifted is None:
            return NotImplemented
        a, b = (lifted, self) if swapped else (self, lifted)
        dtype = torch.promote_types(a.values.dtype, b.values.dtype)
        exact = compute_dtype(dtype)
        entries = device_table(table, self.algebra.signature, a.values, exact)
        return self._made(table_product(a.values.to(exact), b.values.to(exact), entries).to(dtype))

    def __mul__(self, other: Any) -> Multivector:
        if _is_scalar(other):
            return self._scaled(other)
        if isinstance(other, Multivector) and other.algebra == self.algebra and self.algebra.is_euclidean:
            return self._made(geometric_product(self.values, other.values))
        return self._by_table(other, geometric_table)

    def __rmul__(self, other: Any) -> Multivector:
        return self._scaled(other) if _is_scalar(other) else NotImplemented

    def __xor__(self, other: Any) -> Multivector:
        return self._by_table(other, wedge_table)

    def __rxor__(self, other: Any) -> Multivector:
        return self._by_table(other, wedge_table, swapped=True)

    def __or__(self, other: Any) -> Multivector:
        return self._by_table(other, inner_table)

    def __ror__(self, other: Any) -> Multivector:
        return self._by_table(other, inner_table, swapped=True)

    def __and__(self, other: Multivector) -> Multivector:
        if not isinstance(other, Multivector):
            return NotImplemented
        return (self._complement() ^ other._complement())._complement_of()

    def wedge(self, other: Multivector | Tensor | float) -> Multivector:
        """Return the outer product, ``self ^ other``."""
        return self ^ other

    def left_contraction(self, other: Multivector | Tensor | float) -> Multivector:
        """Return what is of grade t - s in the product of grades s and t: ``self`` taken out of ``other``."""
        return self._by_table(other, left_contraction_table)

    def right_contraction(self, other: Multivector | Tensor | float) -> Multivector:
        """Return what is of grade s - t in the product of grades s and t: ``other`` taken out of ``self``."""
        return self._by_table(other, right_contraction_table)

    def sandwich(self, x: Multivector) -> Multivector:
        """r x r~ for this r."""
        return self * x * self.reverse()

    def reflect(self, mirror: Multivector) -> Multivector:
        """The mirror image in the hyperplane orthogonal to the vector ``mirror``, which need not be of unit length.

        Raises:
            ValueError: if ``mirror`` has no inverse (squares to zero).
        """
        return mirror * self.grade_involution() * mirror.inverse()

    # Involutions, duals, inverses

    def reverse(self) -> Multivector:
        """``~self``: products of vectors turned around."""
        return self._made(reverse(self.values))

    __invert__ = reverse

    def grade_involution(self) -> Multivector:
        """Return every vector with its sign changed: (-1)^g on grade g."""
        odd = device_table(parities, self.algebra.n, self.values, self.values.dtype)
        return self._made(self.values * (1 - 2 * odd))

    def conjugate(self) -> Multivector:
        """Clifford conjugation: reversed, and every vector with its sign changed."""
        return self.grade_involution().reverse()

    def _complement(self) -> Multivector:
        # blades of the other vectors come in the opposite order
        signs = device_table(_complement_signs, self.algebra.n, self.values, self.values.dtype)
        return self._made((self.values * signs).flip(-1))

    def _complement_of(self) -> Multivector:
        signs = device_table(_complement_signs, self.algebra.n, self.values, self.values.dtype)
        return self._made(self.values.flip(-1) * signs)

    def dual(self) -> Multivector:
        """Return the product with the inverse of the pseudoscalar I; where r > 0 and it has none, the right complement.

        The right complement of a blade a is the blade b with a ^ b = I.
        """
        if self.algebra.r:
            return self._complement()
        return self * self.algebra.pseudoscalar.to(self.values).reverse() * (-1) ** self.algebra.q

    def undual(self) -> Multivector:
        """Return the inverse of ``dual``."""
        if self.algebra.r:
            return self._complement_of()
        return self * self.algebra.pseudoscalar.to(self.values)

    def squared_norm(self) -> Tensor:
        """Return the scalar part of (~a) a, (...,); negative for some multivectors where q > 0."""
        return (self.reverse() * self).scalar

    def norm(self) -> Tensor:
        """Return the square root of the absolute value of ``squared_norm``, (...,)."""
        return self.squared_norm().abs().sqrt()

    def normalized(self) -> Multivector:
        """Divided by its norm."""
        return self / self.norm()

    def inverse(self) -> Multivector:
        """b with a b = b a = 1, of any multivector that has one.

        Raises:
            ValueError: if one in the batch has none to the precision of its dtype. Inside ``torch.vmap`` and
                ``torch.compile`` nothing can be raised, and its coordinates are not finite or very large.
        """
        exact = self.values.to(compute_dtype(self.values.dtype))
        matrix = left_matrix(exact, self.algebra.signature)
        one = device_table(unit, 2**self.algebra.n, exact, exact.dtype).expand(exact.shape)
        found = torch.linalg.solve_ex(matrix, one.unsqueeze(-1)).result.squeeze(-1)
        if is_concrete(found):
            condition = matrix.detach().flatten(-2).norm(dim=-1) * found.detach().norm(dim=-1)
            if not bool((condition < 0.1 / torch.finfo(exact.dtype).eps).all()):
                raise ValueError("a multivector without an inverse: it, or a product with it, is zero")
        return self._made(found.to(self.values.dtype))

    def __truediv__(self, other: Any) -> Multivector:
        if _is_scalar(other):
            return self._scaled(1 / other)
        return self * other.inverse() if isinstance(other, Multivector) else NotImplemented

    def __rtruediv__(self, other: Any) -> Multivector:
        return self.inverse()._scaled(other) if _is_scalar(other) else NotImplemented

    def __pow__(self, exponent: int) -> Multivector:
        if not isinstance(exponent, int):
            return NotImplemented
        factor = self if exponent >= 0 else self.inverse()
        result = self.algebra.scalar(torch.ones_like(self.scalar))
        for _ in range(abs(exponent)):
            result = result * factor
        return result

    # Rotors

    @property
    def _is_bivector(self) -> bool:
        """Whether it is known to be one."""
        return is_concrete(self.values) and self.grades() <= {2}

    def exp(self) -> Multivector:
        """Return the exponential: of a bivector a rotor, or a motor in a projective and conformal algebra.

        Bivectors of (n, 0, 0) go the way of ``clifford.exp``. All else is the exponential of a V x V matrix; so are
        they inside ``torch.vmap`` and ``torch.compile``, where their grade is not known (``clifford.exp`` takes their
        coordinates there).
        """
        if self.algebra.is_euclidean and self._is_bivector:
            return self._made(exp(take_bivector(self.values)))
        return self._made(regular_exp(self.values, self.algebra.signature))

    def log(self) -> Multivector:
        """Return the bivector whose exponential is this rotor (even, r ~r = 1): in projective algebras of a motor.

        In (n, 0, 0) that of ``clifford.log``; in other signatures the principal one, to which a rotor that is or comes
        near -1 has none.

        Raises:
            ValueError: for what is no rotor, or has no such logarithm. Inside ``torch.vmap`` and ``torch.compile`` it
                is NaN instead.
        """
        found = log(self.values) if self.algebra.is_euclidean else regular_log(self.values, self.algebra.signature)
        return self._made(embed_bivector(found))

    def decompose(self) -> list[Multivector]:
        """floor(n/2) commuting simple bivectors that sum to this one, by norm, descending.

        Raises ValueError for other grades and where not every vector squares to 1.
        """
        if not self.algebra.is_euclidean:
            raise ValueError(
                f"decompose is for algebras whose vectors all square to 1, (n, 0, 0); got {self.algebra}: with other "
                "signatures there need not be such a decomposition"
            )
        if is_concrete(self.values) and not self.grades() <= {2}:
            raise ValueError(f"decompose is of bivectors; this multivector has grades {sorted(self.grades())}")
        parts = decompose(take_bivector(self.values))
        return [self._made(embed_bivector(part)) for part in parts.unbind(-2)]
