"""Square roots of second moments."""

# Legend: K size of a moment

import torch
from torch import Tensor


def moment_roots(moment: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """(S, S^+) with S S = ``moment`` + ``ridge`` times its mean diagonal, and the inverse of S, both (K, K), float64.

    By eigenvalues, so that singular moments work; a moment of zero counts as the identity.
    """
    moment = moment.double()
    scale = float(moment.diagonal().mean())
    if scale <= 0:
        identity = torch.eye(len(moment), dtype=torch.float64, device=moment.device)
        return identity, identity
    values, vectors = torch.linalg.eigh(moment)
    roots = (values.clamp_min(0) + ridge * scale).sqrt()
    return (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T
