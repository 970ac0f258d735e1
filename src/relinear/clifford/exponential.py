"""The exponential of bivectors, differentiable any number of times.

For n <= 4 there is a closed form; the even part of Cl(4) is two copies of the quaternions. For larger n it is computed
by matrices of the complex Cl(n - 1), which is isomorphic to the even part of Cl(n) by e_ij -> v_ij, e_in -> i v_i. For
even n these matrices have half the size of those of Cl(n).
"""

# Legend: n dimensions, V = 2^n blades, P planes, K = 2^floor((n-1)/2), S blocks (1 for odd n, 2 for even n)

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relinear.clifford.bivectors import bivector_from_matrix, bivector_to_matrix, divided_bivector
from relinear.clifford.blades import bivector_dimension, bivector_slice, blade_masks, embed_bivector
from relinear.clifford.matrices import blade_matrices, from_matrix, matrix_exp
from relinear.clifford.products import geometric_product
from relinear.clifford.tables import compute_dtype, device_table, take_last

SERIES_TERMS = 16
# Below these sizes the gradient of torch's matrix exponential is faster than the one written here.
MIN_BY_HAND = 6
MIN_ENTRIES = 1024


def _series() -> np.ndarray:
    """Return coefficients of cos(s) and of sin(s)/s in powers of s^2, (terms, 2)."""
    return np.array([[(-1) ** m / math.factorial(2 * m + odd) for odd in (0, 1)] for m in range(SERIES_TERMS)])


def _cosine_and_sine(square: Tensor) -> Tensor:
    """Return cos(s) and sin(s)/s (..., 2) of s^2 (..., 1); for s^2 < 1 by their series, which is smooth at zero."""
    small = square < 1
    near, far = torch.where(small, square, 0.0), torch.where(small, 1.0, square).sqrt()
    powers, power = torch.cat((torch.ones_like(near), near), dim=-1), near
    while powers.shape[-1] < SERIES_TERMS:
        power = power * power
        powers = torch.cat((powers, powers * power), dim=-1)
    series = powers @ device_table(_series, (), square, square.dtype)
    return torch.where(small, series, torch.cat((far.cos(), far.sin() / far), dim=-1))


def _one_plane(beta: Tensor, n: int) -> Tensor:
    """Return exp for n <= 3, where every bivector is simple."""
    cosine, sine = _cosine_and_sine((beta * beta).sum(-1, keepdim=True)).split(1, dim=-1)
    zero = torch.zeros_like(cosine)
    return torch.cat((cosine, *[zero] * n, sine * beta, *[zero] * (n == 3)), dim=-1)


def _halves() -> np.ndarray:
    """Return the matrix (P, 2 P) of b -> (b - b*)/2 and (b + b*)/2 of Cl(4), the two halves b (1 +- e1234)/2."""
    dual = np.zeros((6, 6))
    dual[range(6), range(5, -1, -1)] = 1, -1, 1, 1, -1, 1
    return np.hstack((np.eye(6) - dual, np.eye(6) + dual)) / 2


def _two_halves(beta: Tensor) -> Tensor:
    """Return exp for n = 4: the two halves commute, and each squares to a multiple of its idempotent (1 +- e1234)/2."""
    halves = (beta @ device_table(_halves, (), beta, beta.dtype)).unflatten(-1, (2, -1))
    cosine, sine = _cosine_and_sine(2 * (halves * halves).sum(-1, keepdim=True)).split(1, dim=-1)
    plus, minus = cosine.squeeze(-1).split(1, dim=-1)
    zero = torch.zeros_like(plus)
    bivector = (sine * halves).sum(-2)
    return torch.cat(((plus + minus) / 2, *[zero] * 4, bivector, *[zero] * 4, (plus - minus) / 2), dim=-1)


def _generators(n: int) -> np.ndarray:
    """Return the matrices of the P basis bivectors, (P, S, K, K)."""
    vectors = blade_matrices(n - 1, slice(1, n))
    planes = blade_matrices(n - 1, bivector_slice(n - 1))
    inner, outer = iter(planes), iter(1j * vectors)
    return np.array([next(outer if j == n - 1 else inner) for i in range(n) for j in range(i + 1, n)])


def _real_generators(n: int) -> np.ndarray:
    return _generators(n).reshape(n * (n - 1) // 2, -1).view(float)


def _complex_generators(n: int) -> np.ndarray:
    return _generators(n).reshape(n * (n - 1) // 2, -1)


def _sources(n: int) -> np.ndarray:
    """Return for every blade of Cl(n) the index of the blade of Cl(n - 1) that represents it."""
    position = {mask: index for index, mask in enumerate(blade_masks(n - 1))}
    return np.array([position[mask & ~(1 << n - 1)] for mask in blade_masks(n)])


def _phases(n: int) -> np.ndarray:
    """Return the factor of every blade of Cl(n): 1, -i if it contains the last vector, 0 for odd blades."""
    return np.array([(1 - mask.bit_count() % 2) * (-1j if mask >> n - 1 else 1) for mask in blade_masks(n)])


def _by_matrices(beta: Tensor) -> Tensor:
    """Return exp by matrix exponentials, for n >= 2."""
    n = bivector_dimension(beta)
    blocks, size = 2 - n % 2, 2 ** ((n - 1) // 2)
    if beta.is_complex():
        generator = beta @ device_table(_complex_generators, n, beta, beta.dtype)
    else:
        pairs = beta @ device_table(_real_generators, n, beta, beta.dtype)
        generator = torch.view_as_complex(pairs.unflatten(-1, (-1, 2)))
    x = from_matrix(matrix_exp(generator.unflatten(-1, (blocks, size, size))))
    rotor = take_last(x, device_table(_sources, n, x)) * device_table(_phases, n, x, x.dtype)
    return rotor if beta.is_complex() else rotor.real


def _mean(beta: Tensor, x: Tensor) -> Tensor:
    """Return the mean of exp(s B) X exp(-s B) over s in (0, 1), for bivectors B and X (..., P).

    It is computed from the exponential of one matrix of twice the size, [[2 K, X], [0, 2 K]], so it is differentiable
    any number of times.
    """
    turn, x = 2 * bivector_to_matrix(beta), bivector_to_matrix(x)
    upper, lower = torch.cat((turn, x), dim=-1), torch.cat((torch.zeros_like(turn), turn), dim=-1)
    both = matrix_exp(torch.cat((upper, lower), dim=-2))
    n = turn.shape[-1]
    return bivector_from_matrix(both[..., :n, n:] @ both[..., :n, :n].mT)


def _represented(beta: Tensor, generators: Tensor) -> Tensor:
    return matrix_exp((beta @ generators.flatten(1)).unflatten(-1, generators.shape[1:]))


class _Exp(torch.autograd.Function):
    """Map beta (..., P) to the rotor (..., V) or, with matrices (P, K, K) of the basis bivectors, to its matrix.

    The derivative needs only n x n matrices: d exp(B) = exp(B) Psi(dB), where Psi(X) is the mean of exp(-s B) X
    exp(s B) over s in (0, 1). The passes below consist of differentiable operations, so further derivatives exist.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(beta: Tensor, generators: Tensor | None) -> Tensor:
        return _by_matrices(beta) if generators is None else _represented(beta, generators)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        beta, generators, rotor = ctx.saved_tensors
        beta, rotor = beta.conj(), rotor.conj()
        if generators is None:
            divided = divided_bivector(rotor, grad)
        else:
            divided = (rotor.mT @ grad).flatten(-2) @ generators.conj().flatten(1).mT
        return _mean(beta, divided), None


class _ExpForward(_Exp):
    """Extend ``_Exp`` by a derivative in forward mode, which compilers cannot trace."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        beta, generators, rotor = ctx.saved_tensors
        turned = _mean(-beta, tangent)
        if generators is None:
            return geometric_product(rotor, embed_bivector(turned))
        return rotor @ (turned @ generators.flatten(1)).unflatten(-1, generators.shape[1:])


def _differentiable(beta: Tensor, generators: Tensor | None) -> Tensor:
    return (_Exp if torch.compiler.is_compiling() else _ExpForward).apply(beta, generators)


def represented_exp(beta: Tensor, table: Callable[[int, int], np.ndarray], side: int) -> Tensor:
    """Return the matrices (..., K, K) of rotors exp(beta); ``table(n, side)`` has those of the basis bivectors."""
    n = bivector_dimension(beta)
    generators = device_table(table, (n, side), beta, beta.dtype)
    entries = beta.shape[:-1].numel() * generators.shape[-1] ** 2
    if n < MIN_BY_HAND or entries < MIN_ENTRIES or not _has_gradient(beta):
        return _represented(beta, generators)
    return _differentiable(beta, generators)


def _has_gradient(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def exp(beta: Tensor) -> Tensor:
    """Return the exponential of a bivector: a rotor, exp(b) = cos|b| + sin|b| b / |b| for a simple b.

    It turns vectors by v -> r v r~, a rotation by twice the norm of each simple part.

    Args:
        beta: (..., P), any real or complex dtype.

    Returns:
        (..., V): an even multivector with r r~ = 1.

    Raises:
        ValueError: if the last dimension is not n(n-1)/2 for n from 1 to 12.

    Examples:
        >>> relinear.clifford.exp(torch.tensor([torch.pi / 4]))  # turns by a right angle
        tensor([0.7071, 0.0000, 0.0000, 0.7071])
    """
    n = bivector_dimension(beta)
    exact = beta.to(compute_dtype(beta.dtype))
    if n == 1 or (n <= 3 and not beta.is_complex()):
        rotor = _one_plane(exact, n)
    elif n == 4 and not beta.is_complex():
        rotor = _two_halves(exact)
    elif n < MIN_BY_HAND or not _has_gradient(exact):
        rotor = _by_matrices(exact)
    else:
        rotor = _differentiable(exact, None)
    return rotor.to(beta.dtype) if beta.dtype.is_floating_point or beta.is_complex() else rotor
