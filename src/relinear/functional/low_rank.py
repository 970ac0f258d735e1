"""Low-rank linear maps (reference), and their best fits to a weight."""

# Legend: I in_features, O out_features, R rank, K = min(I, O); A, G moments of inputs and output gradients

from typing import NamedTuple

import torch
from torch import Tensor


def low_rank(x: Tensor, down: Tensor, up: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return y = (x down^T) up^T + bias.

    Args:
        x: (..., I).
        down: (R, I), maps into the subspace.
        up: (O, R), maps out of it.
        bias: (O,) or None.
    """
    y = torch.nn.functional.linear(torch.nn.functional.linear(x, down), up)
    return y if bias is None else y + bias.to(y.dtype)  # autocast gives products half precision


def low_rank_factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the best rank-R factors of ``weight`` in the Frobenius norm (Eckart-Young), of equal norms.

    Args:
        weight: (O, I).
        rank: R, at most min(O, I).

    Returns:
        down (R, I) and up (O, R) in float64 (float32 where the device has no float64); up @ down is the fit.
    """
    u, s, vh = torch.linalg.svd(weight.detach().double(), full_matrices=False)
    root = s[:rank].sqrt()
    return root[:, None] * vh[:rank], u[:, :rank] * root


def moment_roots(moment: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Return S, with S S = ``moment`` + ``ridge`` times its mean diagonal, and its pseudo-inverse; (K, K), float64.

    They are computed from eigenvalues, so the moment may be singular; a moment of zero is replaced by the identity.
    """
    moment = moment.double()
    scale = float(moment.diagonal().mean())
    if scale <= 0:
        identity = torch.eye(len(moment), dtype=torch.float64, device=moment.device)
        return identity, identity
    values, vectors = torch.linalg.eigh(moment)
    roots = (values.clamp_min(0) + ridge * scale).sqrt()
    return (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T


class WeightedSpectrum(NamedTuple):
    """Singular values of M = G^(1/2) W A^(1/2), and its singular vectors on the smaller side.

    Attributes:
        energies: (K,), the squared singular values, falling; the error of the best fit of rank R is the sum from R on.
        vectors: (K, K), the singular vectors of the smaller side.
        root: (K, K), the square root of that side's moment.
        inverse: (K, K), the inverse of ``root``.
        on_inputs: whether the smaller side is that of the inputs.
    """

    energies: Tensor
    vectors: Tensor
    root: Tensor
    inverse: Tensor
    on_inputs: bool

    def factors(self, weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return down (R, I) and up (O, R), in float64: the best fit of rank R to the decomposed ``weight`` (O, I)."""
        leading = self.vectors[:, :rank]
        if self.on_inputs:
            down, up = leading.T @ self.inverse, weight.double() @ self.root @ leading
        else:
            down, up = leading.T @ self.root @ weight.double(), self.inverse @ leading
        # both factors get equal norms, as in ``low_rank_factors``
        balance = (down.norm() / up.norm().clamp_min(1e-300)).sqrt().clamp_min(1e-150)
        return down / balance, up * balance


def weighted_spectrum(
    weight: Tensor, inputs: Tensor, outputs: Tensor | None = None, ridge: float = 1e-6
) -> WeightedSpectrum:
    """Decompose ``weight`` under the moments A and G, which gives its best fits of all ranks and their errors.

    With M = G^(1/2) W A^(1/2), the best rank-R fit is G^(-1/2) [M]_R A^(-1/2) (Eckart-Young). Only the smaller side's
    moment needs a root: for I <= O, [M]_R = M V V^T with the leading eigenvectors V of A^(1/2) W^T G W A^(1/2), so the
    fit is W A^(1/2) V V^T A^(-1/2) and G^(1/2) cancels; likewise for O < I.

    Args:
        weight: W (O, I).
        inputs: A (I, I), second moments of the inputs.
        outputs: G (O, O), second moments of the output gradients, or its diagonal (O,); None for the identity.
        ridge: added to the moment whose root is taken, as a share of its mean diagonal. Directions that do not occur in
            the data get this small weight, and singular moments can be inverted.
    """
    weight = weight.detach().double()
    a = inputs.to(weight)
    g = None if outputs is None else outputs.to(weight)
    g = g.diag() if g is not None and g.ndim == 1 else g
    on_inputs = weight.shape[1] <= weight.shape[0]
    if on_inputs:
        inner = weight.T @ (weight if g is None else g @ weight)
        root, inverse = moment_roots(a, ridge)
    else:
        inner = weight @ a @ weight.T
        eye = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        root, inverse = (eye, eye) if g is None else moment_roots(g, ridge)
    values, vectors = torch.linalg.eigh(root @ ((inner + inner.T) / 2) @ root)
    return WeightedSpectrum(values.flip(0).clamp_min(0), vectors.flip(1), root, inverse, on_inputs)
