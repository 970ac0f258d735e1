"""The logarithm of rotors.

A rotor exp(B) turns vectors by O = exp(2 K), which has the cosines of twice the angles in its symmetric part C and the
sines in its antisymmetric part A. Near 1 the sines determine everything, with a precision relative to the largest
angle. If planes are turned by a quarter turn or more, sines are ambiguous. So these planes are first separated from the
others by their cosines, at the widest gap between cosines (with at most six planes there is always a wide one), and
turned back by half a turn. Then twice the angles are all below 135 degrees, and the planes are those of the tangent of
K, which is well-conditioned.
"""

# Legend: n dimensions, V = 2^n blades, P planes, J = floor(n/2) simple parts

import math
from typing import Any

import torch
from torch import Tensor

from relinear.clifford.bivectors import bivector_from_matrix, rotation_matrix
from relinear.clifford.blades import embed_bivector, multivector_dimension, parities, scalar_one
from relinear.clifford.decomposition import SpectralFunction, first_order, plane_basis, spectral_basis
from relinear.clifford.exponential import exp
from relinear.clifford.products import geometric_product
from relinear.clifford.tables import compute_dtype, device_table, is_concrete

WIDEST = 0.7  # the two kinds of planes are separated at a cosine within +-0.7


def _far_planes(cosines: Tensor) -> Tensor:
    """Return which coordinates (..., n) lie in planes turned far, for ascending cosines (..., n), two per plane."""
    count = cosines.shape[-1] // 2
    of_planes = cosines[..., : 2 * count].unflatten(-1, (-1, 2)).mean(-1)
    edge = torch.full_like(cosines[..., :1], WIDEST)
    bounds = torch.cat((-edge, of_planes.clamp(-WIDEST, WIDEST), edge), dim=-1)
    below, above = bounds[..., :-1], bounds[..., 1:]
    widest = (above - below).argmax(-1, keepdim=True)
    threshold = ((below + above) / 2).gather(-1, widest)
    far = (of_planes < threshold).repeat_interleave(2, dim=-1)
    return torch.cat((far, torch.zeros_like(cosines[..., 2 * count :], dtype=torch.bool)), dim=-1)


def _planes(turn: Tensor) -> Tensor:
    """Return an orthonormal basis (..., n, n) of the planes of a rotation (..., n, n), two columns per plane."""
    n = turn.shape[-1]
    count = n // 2
    cosines, frame = torch.linalg.eigh((turn + turn.mT) / 2)
    far = _far_planes(cosines)
    sign = torch.where(far, -1.0, 1.0).to(turn.dtype)
    cosines = sign * cosines
    # in this frame the two kinds of planes are blocks; entries between the blocks are set to zero at every step
    sines = sign.unsqueeze(-1) * (frame.mT @ ((turn - turn.mT) / 2) @ frame)
    same_kind = far.unsqueeze(-1) == far.unsqueeze(-2)
    tangent = torch.where(same_kind, sines / (1 + (cosines.unsqueeze(-1) + cosines.unsqueeze(-2)) / 2), 0.0)
    # tangents reach 2.4, so a shift by 6 separates the eigenvalues of the two blocks
    shift = torch.diag_embed(torch.where(far, 6.0, 0.0).to(turn.dtype))
    vectors = torch.linalg.eigh(torch.complex(shift, (tangent - tangent.mT) / 2)).eigenvectors.flip(-1)
    # of the d vectors of far planes the first d/2 have positive angles, and of the n - d others the first half
    turned_far = far.sum(-1, keepdim=True) // 2
    index = torch.arange(count, device=turn.device).expand(*turn.shape[:-2], count)
    index = torch.where(index < turned_far, index, index + turned_far)
    vectors = vectors.gather(-1, index.unsqueeze(-2).expand(*turn.shape[:-1], count))
    columns = torch.stack((vectors.real, vectors.imag), dim=-1).flatten(-2)
    columns = torch.nn.functional.pad(columns, (0, n - 2 * count))
    # coordinates and columns have the same order, far planes first
    return frame @ plane_basis(torch.where(same_kind, columns, 0.0))


class _Log(SpectralFunction):
    """Map a rotor (..., V) to the matrix K (..., n, n) of its logarithm; the gradient is on the manifold of rotors.

    d exp(B) = exp(B) Psi(dB) with Psi = (1 - exp(-ad_B)) / ad_B, so dB = Psi^-1 of the bivector part of r~ dr. In the
    eigenbasis of i K, ad_B is multiplication by differences of eigenvalues.
    """

    @staticmethod
    def forward(rotor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        turn = rotation_matrix(rotor)
        count = turn.shape[-1] // 2
        basis = _planes(turn)
        p, q = basis[..., 0 : 2 * count : 2], basis[..., 1 : 2 * count : 2]
        sine = (p * ((turn - turn.mT) / 2 @ q)).sum(-2)
        cosine = ((p * (turn @ p)).sum(-2) + (q * (turn @ q)).sum(-2)) / 2
        angles = torch.atan2(sine, cosine) / 2
        plane = torch.einsum("...ij,...kj->...jik", p, q)
        plane = plane - plane.mT
        # r and -r turn vectors in the same way: if the sign is wrong, the largest plane is turned the other way round
        reconstructed = exp(bivector_from_matrix((angles[..., None, None] * plane).sum(-3)))
        wrong = (reconstructed * rotor).sum(-1, keepdim=True) < 0
        first = torch.arange(count, device=rotor.device) == angles.abs().argmax(-1, keepdim=True)
        other_way = angles + math.pi * (1 - 2 * (angles > 0).to(angles.dtype))
        angles = torch.where(wrong & first, other_way, angles)
        return (angles[..., None, None] * plane).sum(-3), basis, angles

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        rotor, basis, angles = ctx.saved_tensors
        u, eigenvalues = spectral_basis(basis, angles)
        # exp(2 K) turns vectors: ad_B on matrices is the commutator with 2 K = -2 i (i K)
        z = -2j * (eigenvalues.unsqueeze(-1) - eigenvalues.unsqueeze(-2))
        small = z.abs() < 1e-4
        safe = torch.where(small, 1.0 + 0j, z)
        inverse = torch.where(small, 1 + z / 2 + z * z / 12, safe / (1 - torch.exp(-safe)))
        antisymmetric = (grad - grad.mT) / 2
        local = u.mH @ antisymmetric.to(u.dtype) @ u
        pulled = (u @ (local * inverse.conj()) @ u.mH).real
        # K_ij = beta_ij and K_ji = -beta_ij each have half of the gradient of beta_ij
        bivector = 2 * bivector_from_matrix(pulled)
        # the transpose of dr -> <r~ dr>_2
        return geometric_product(rotor, embed_bivector(bivector))


def log(rotor: Tensor) -> Tensor:
    """Return the bivector of a rotor: exp(log(r)) = r.

    Every simple part has a norm of at most pi/2, except that the largest may have up to pi if r is minus such an
    exponential. Near 1 the error is relative to the bivector. The gradient is that on the manifold of rotors. The
    logarithm is differentiable once, but not where it jumps: if vectors are turned by half a turn in two planes, or
    r = -1.

    Args:
        rotor: (..., V), real, even, r r~ = 1.

    Returns:
        (..., P). Inside ``torch.vmap`` and ``torch.compile``, which allow no errors, NaN for input that is not a rotor.

    Raises:
        ValueError: if the rotor is complex, not even or not normalised, or is -1 in Cl(1).

    Examples:
        >>> relinear.clifford.log(relinear.clifford.exp(torch.tensor([0.5])))
        tensor([0.5000])
    """
    n = multivector_dimension(rotor)
    if rotor.is_complex():
        raise ValueError(
            "log needs a real rotor: a complex one may have no logarithm (its rotation may not be diagonalisable)"
        )
    exact = rotor.to(compute_dtype(rotor.dtype))
    even = exact * (1 - device_table(parities, n, rotor, exact.dtype))
    error = torch.maximum((exact - even).norm(dim=-1), (even.norm(dim=-1) - 1).abs()).detach()
    valid = error < torch.finfo(exact.dtype).eps ** 0.25
    if is_concrete(rotor) and not bool(valid.all()):
        raise ValueError(f"log needs rotors (even, r r~ = 1); the largest deviation here is {float(error.max()):.3g}")
    if n == 1:
        if is_concrete(rotor) and bool((exact[..., 0] < 0).any()):
            raise ValueError("-1 has no logarithm in Cl(1), which has no bivectors")
        return rotor[..., :0]
    # eigensolvers raise an error for a whole batch if one entry is not finite
    one = device_table(scalar_one, 2**n, rotor, exact.dtype)
    matrix, _, _ = _Log.apply(torch.where(valid.unsqueeze(-1), even, one))
    return bivector_from_matrix(torch.where(valid[..., None, None], matrix, math.nan)).to(rotor.dtype)
