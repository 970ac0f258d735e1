"""Invariant decomposition: split a bivector into commuting simple bivectors.

A bivector B of Cl(n, 0) is the antisymmetric matrix K with K_ij = beta_ij. In a suitable orthonormal basis K is
block-diagonal, sum_j sigma_j (p_j q_j^T - q_j p_j^T). The simple parts b_j = sigma_j p_j q_j commute, so exp(B) is the
product of the exp(b_j). A rotor exp(B) turns vectors by the matrix exp(2 K).
"""

# Legend: n dimensions, V = 2^n blades, P planes, J = floor(n/2) simple parts

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from relinear.clifford.bivectors import bivector_from_matrix, bivector_to_matrix
from relinear.clifford.blades import bivector_dimension
from relinear.clifford.tables import compute_dtype


def plane_basis(columns: Tensor) -> Tensor:
    """Return an orthonormal basis (..., n, n) of the planes that pairs of columns (..., n, n) span.

    Householder QR returns a basis even if columns vanish or repeat. The vectors that it then adds lie in the complement
    of the previous planes, as the missing planes do.
    """
    return torch.linalg.qr(columns).Q


def spectral_basis(basis: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvectors U (..., n, n) and eigenvalues (..., n) of the Hermitian matrix i K, planes first.

    Columns are (p_j - i q_j)/sqrt(2) for the J planes, then their conjugates, then the remaining vector (odd n).
    """
    count = angles.shape[-1]
    p, q = basis[..., 0 : 2 * count : 2], basis[..., 1 : 2 * count : 2]
    u = torch.complex(p, -q) / math.sqrt(2)
    rest = basis[..., 2 * count :].to(u.dtype)
    return torch.cat((u, u.conj(), rest), dim=-1), torch.cat(
        (angles, -angles, angles.new_zeros(rest[..., 0, :].shape)), -1
    )


class _FirstOrder(torch.autograd.Function):
    """Return a gradient unchanged; a further derivative raises an error. ``sources`` are the tensors it depends on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("the invariant decomposition and the logarithm of rotors have first derivatives only")


def first_order(backward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate a backward pass of a function that saved its argument first: further derivatives raise an error.

    torch's ``once_differentiable`` raises none if the incoming gradient is constant.
    """

    @functools.wraps(backward)
    def run(ctx: Any, grad: Tensor, *_: None) -> Tensor:
        if torch.compiler.is_compiling():  # compilers take no further derivatives themselves
            return backward(ctx, grad)
        with torch.no_grad():
            gradient = backward(ctx, grad)
        return _FirstOrder.apply(gradient, ctx.saved_tensors[0], grad) if torch.is_grad_enabled() else gradient

    return run


class SpectralFunction(torch.autograd.Function):
    """Base of functions that also return a basis of planes and the angles in it, for the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, basis, angles = output
        ctx.save_for_backward(*inputs, basis, angles)
        ctx.mark_non_differentiable(basis, angles)


class _Decompose(SpectralFunction):
    """Map K (..., n, n) to its simple parts (..., J, n, n) by descending norm, their basis and their angles.

    b_j is a spectral function of the Hermitian matrix i K: it equals the eigenvalue on plane j and 0 elsewhere. Its
    derivative between eigenvectors of planes j and k has the weight lambda_j / (lambda_j - lambda_k). For all planes
    together, sum_j G_j b_j has the derivative

        (G_j + G_k)/2 + (G_j - G_k)/2 (lambda_j + lambda_k) / (lambda_j - lambda_k).

    The second term is infinite at a repeated plane. It vanishes for functions of the sum alone, such as the
    exponential. At an exact repeat, where the single parts are undefined, it is omitted.
    """

    @staticmethod
    def forward(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = matrix.shape[-1]
        count = n // 2
        vectors = torch.linalg.eigh(1j * matrix).eigenvectors[..., n - count :].flip(-1)
        columns = torch.stack((vectors.real, vectors.imag), dim=-1).flatten(-2)
        rest = matrix.new_zeros(*matrix.shape[:-1], n - 2 * count)
        basis = plane_basis(torch.cat((columns, rest), dim=-1))
        p, q = basis[..., 0 : 2 * count : 2], basis[..., 1 : 2 * count : 2]
        angles = (p * (matrix @ q)).sum(-2)
        plane = torch.einsum("...ij,...kj->...jik", p, q)
        return angles[..., None, None] * (plane - plane.mT), basis, angles

    @staticmethod
    @first_order
    def backward(ctx, grad: Tensor) -> Tensor:
        _, basis, angles = ctx.saved_tensors
        count = angles.shape[-1]
        u, eigenvalues = spectral_basis(basis, angles)
        antisymmetric = (grad - grad.mT) / 2
        local = u.mH.unsqueeze(-3) @ antisymmetric.to(u.dtype) @ u.unsqueeze(-3)
        n = u.shape[-1]
        owner = torch.arange(n, device=grad.device) % max(count, 1)
        index = owner.view(n, 1).expand(n, n).expand(*local.shape[:-3], 1, n, n)
        by_row = local.gather(-3, index).squeeze(-3)
        by_column = local.gather(-3, index.mT).squeeze(-3)
        row, column = eigenvalues.unsqueeze(-1), eigenvalues.unsqueeze(-2)
        gap = row - column
        scale = angles.abs().amax(-1)[..., None, None].clamp_min(torch.finfo(angles.dtype).tiny)
        repeated = gap.abs() <= 8 * torch.finfo(angles.dtype).eps * scale
        ratio = torch.where(repeated, 0.0, (row + column) / torch.where(repeated, 1.0, gap))
        same = owner.view(n, 1) == owner.view(1, n)
        combined = (by_row + by_column) / 2 + torch.where(same, 0.0, (by_row - by_column) / 2 * ratio)
        if n > 2 * count:  # the remaining vector belongs to no plane: the weight is lambda_j / (lambda_j - 0) = 1
            combined = torch.cat((combined[..., :-1, :], by_column[..., -1:, :]), dim=-2)
            combined = torch.cat((combined[..., :, :-1], by_row[..., :, -1:]), dim=-1)
            keep = torch.ones(n, n, dtype=torch.bool, device=grad.device)
            keep[-1, -1] = False
            combined = combined * keep
        result = (u @ combined @ u.mH).real
        return (result - result.mT) / 2


def power_step(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return one step of Algorithm 2 of the paper: v <- B _| (B _| v), normalised; v itself if that is zero.

    It turns v towards the largest plane.

    Args:
        matrix: (..., n, n), of the bivector B.
        vector: (..., n).
    """
    step = (matrix @ (matrix @ vector.unsqueeze(-1))).squeeze(-1)
    norm = torch.linalg.vector_norm(step, dim=-1, keepdim=True)
    moves = norm > torch.finfo(norm.dtype).tiny
    return torch.where(moves, step / torch.where(moves, norm, 1.0), vector)


def largest_part(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return the simple part v ^ (v _| B) of B, as a matrix; it is the largest part if v lies in the largest plane."""
    image = (matrix @ vector.unsqueeze(-1)).squeeze(-1)
    outer = image.unsqueeze(-1) * vector.unsqueeze(-2)
    return outer - outer.mT


def _power_iteration(matrix: Tensor, iterations: int, tolerance: float) -> Tensor:
    """Apply Algorithm 1: subtract the largest simple part, found by Algorithm 2, and repeat with the remainder."""
    n = matrix.shape[-1]
    initial = torch.cos(torch.arange(1, n + 1, device=matrix.device, dtype=matrix.dtype) ** 2)
    parts = []
    for _ in range(n // 2):
        vector = (initial / initial.norm()).expand(matrix.shape[:-1])
        with torch.no_grad():
            for _ in range(iterations):
                before, vector = vector, power_step(matrix, vector)
                if torch.minimum((vector - before).norm(dim=-1), (vector + before).norm(dim=-1)).max() < tolerance:
                    break
        parts.append(largest_part(matrix, power_step(matrix, vector)))  # the one step that is differentiated
        matrix = matrix - parts[-1]
    return torch.stack(parts, dim=-3)


def decompose(beta: Tensor, *, method: str = "spectral", iterations: int = 1000, tolerance: float = 1e-12) -> Tensor:
    """Split a bivector into J = floor(n/2) commuting simple bivectors (the invariant decomposition).

    Args:
        beta: (..., P).
        method: "spectral" (default): by eigenvectors, with value and gradient exact up to rounding, also if planes
            nearly repeat; or "power_iteration", Algorithms 1 and 2 of arXiv 2507.11688: the plane is found without
            gradient, then one iteration is differentiated. Its gradient is biased, because it ignores how the planes
            turn with beta (the documentation states the bias); it is for reproduction.
        iterations, tolerance: of the power iteration; it stops when a step moves the unit vector by less.

    Returns:
        (..., J, P) by descending norm; they sum to ``beta``. If two norms are equal, the single parts are not unique:
        any valid split is returned, and the gradient is correct for functions of the sum (such as its exponential). The
        spectral method is differentiable once. A bivector with an entry that is not finite gives NaN, without a
        gradient; it does not affect the others of its batch.

    Raises:
        ValueError: on a size that is not n(n-1)/2, an unknown method, or a complex bivector, which may have no
            decomposition.

    Examples:
        >>> beta = torch.randn(6, dtype=torch.float64)
        >>> parts = relinear.clifford.decompose(beta)
        >>> parts.shape, torch.allclose(parts.sum(0), beta)
        (torch.Size([2, 6]), True)
    """
    n = bivector_dimension(beta)
    if method not in ("spectral", "power_iteration"):
        raise ValueError(f"method must be 'spectral' or 'power_iteration', got {method!r}")
    if beta.is_complex():
        raise ValueError("decompose needs a real bivector: a complex one may have no decomposition")
    if n == 1:
        return beta.new_zeros(*beta.shape[:-1], 0, 0)
    matrix = bivector_to_matrix(beta.to(compute_dtype(beta.dtype)))
    # Eigensolvers raise an error for a whole batch if one entry is not finite.
    finite = matrix.isfinite().all(-1).all(-1)
    matrix = torch.where(finite[..., None, None], matrix, 0.0)
    if method == "power_iteration":
        parts = _power_iteration(matrix, iterations, tolerance)
    else:
        parts, _, _ = _Decompose.apply(matrix)
    parts = torch.where(finite[..., None, None, None], parts, math.nan)
    return bivector_from_matrix(parts).to(beta.dtype)
