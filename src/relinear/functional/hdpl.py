"""The Hybrid Dual-Path Linear map (Khasia 2026, arXiv 2602.07070) and the divergences that regularise its latent."""

# Legend: I in, O out, K blocks, R latent size

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu, softplus

from relinear.functional.block_diagonal import block_diagonal, block_diagonal_of, block_diagonal_to_dense
from relinear.functional.low_rank import low_rank_factors


class HDPLOutput(NamedTuple):
    """Result of ``hdpl``.

    Attributes:
        y: (..., O).
        z: (..., R).
        mu: (..., R).
        logvar: (..., R); None if nothing was sampled.
    """

    y: Tensor
    z: Tensor
    mu: Tensor
    logvar: Tensor | None


def hdpl(
    x: Tensor,
    blocks: Tensor,
    mu_weight: Tensor,
    mu_bias: Tensor,
    logvar_weight: Tensor | None,
    logvar_bias: Tensor | None,
    decoder: Tensor,
    bias: Tensor | None = None,
    noise: Tensor | None = None,
) -> HDPLOutput:
    """Return y = diag(W_1 .. W_K) x + D silu(z) + bias, z ~ N(mu(x), sigma(x)^2), or mu(x) without noise (Eq. 1-7).

    Args:
        x: (..., I).
        blocks: (K, O/K, I/K).
        mu_weight, mu_bias: (R, I) and (R,), the encoder of the mean.
        logvar_weight, logvar_bias: (R, I) and (R,), the encoder of log sigma^2; unused without noise, and may be None.
        decoder: D (O, R).
        bias: (O,) or None.
        noise: standard normal (..., R), or None for the deterministic z = mu.
    """
    mu = linear(x, mu_weight, mu_bias)
    if noise is None:
        return HDPLOutput(hdpl_decode(x, mu, blocks, decoder, bias), mu, mu, None)
    assert logvar_weight is not None, "noise needs an encoder of the variance"
    logvar = linear(x, logvar_weight, logvar_bias)
    z = hdpl_sample(mu, logvar, noise)
    return HDPLOutput(hdpl_decode(x, z, blocks, decoder, bias), z, mu, logvar)


def hdpl_results(*arguments: Tensor | None) -> tuple[Tensor, ...]:
    """Return the different tensors of ``hdpl``: (y, z, mu, logvar), or (y, mu) without noise, where z is mu."""
    y, z, mu, logvar = hdpl(*arguments)  # type: ignore[arg-type]
    return (y, mu) if logvar is None else (y, z, mu, logvar)


def hdpl_sample(mu: Tensor, logvar: Tensor, noise: Tensor) -> Tensor:
    """Return z = mu + exp(logvar / 2) * noise (Eq. 6), computed in at least float32, in mu's dtype; all (..., R)."""
    wide = torch.promote_types(mu.dtype, torch.float32)
    return torch.addcmul(mu.to(wide), torch.exp(0.5 * logvar.to(wide)), noise).to(mu.dtype)


def hdpl_decode(x: Tensor, z: Tensor, blocks: Tensor, decoder: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the detail path of x (..., I) plus the context path of a given latent z (..., R); see ``hdpl``."""
    return block_diagonal(x, blocks) + linear(silu(z), decoder, bias)


def gaussian_kl(mu: Tensor, logvar: Tensor) -> Tensor:
    """Return KL(N(mu, sigma^2) || N(0, 1)) per dimension (..., R), in nats (a summand of Eq. 8), at least float32."""
    wide = torch.promote_types(mu.dtype, torch.float32)  # four calls of Python fewer a step than ``upcast``
    mu, logvar = mu.to(wide), logvar.to(wide)
    return 0.5 * (mu.square() + torch.expm1(logvar) - logvar)


def bounded_kl(kl: Tensor, bound: float = math.log(2)) -> tuple[Tensor, Tensor]:
    """Return the paper's regulariser (Eq. 9): the KL of a token, clamped at ln 2. Clamped tokens have no gradient.

    Args:
        kl: (...,), of each token (``gaussian_kl`` summed over dimensions).
        bound: largest KL of a token, in nats.

    Returns:
        the loss of each token (...,), and whether it is clamped (...,).
    """
    return kl.clamp(max=bound), kl.detach() >= bound


def free_bits_kl(kl: Tensor, free: float) -> tuple[Tensor, Tensor]:
    """Return the KL with free bits in each dimension (Kingma et al. 2016, arXiv 1606.04934): sum_j max(free, KL_j).

    The threshold applies to each token, not to the mean over a batch, so that accumulated batches give the gradient of
    one large batch. The gradient vanishes below the threshold; with the paper's bound it vanishes above.

    Args:
        kl: (..., R), from ``gaussian_kl``.
        free: nats that a dimension may use without loss.

    Returns:
        the loss of each token (...,), and the share of its dimensions without gradient (...,).
    """
    return kl.clamp(min=free).sum(-1), (kl.detach() <= free).to(kl.dtype).mean(-1)


def geometric_jsd(mu: Tensor, logvar: Tensor) -> Tensor:
    """Return the geometric Jensen-Shannon divergence of N(mu, sigma^2) and N(0, 1), in nats, summed over dimensions.

    JS_G(p, q) = (KL(p || g) + KL(q || g)) / 2 with g the normalised geometric mean sqrt(p q) (Nielsen 2019,
    arXiv 1904.04017; Deasy et al. 2020, arXiv 2006.10599). For Gaussians g is the Gaussian with the mean precision:
    with v = sigma^2, l = log v, g = N(mu / (1 + v), 2 v / (1 + v)), and a dimension's divergence is

        (sinh(l / 2)^2 - log cosh(l / 2)) / 2 + mu^2 cosh(l) / (4 (1 + v)),

    which has a gradient everywhere and, unlike the plain Jensen-Shannon divergence, no upper bound.

    Args:
        mu, logvar: (..., R).

    Returns:
        (...,) in float32 or better.
    """
    wide = torch.promote_types(mu.dtype, torch.float32)
    mu, logvar = mu.to(wide), logvar.to(wide)
    half = 0.5 * logvar
    # Written so that nothing overflows before v does: log cosh a = |a| + log((1 + exp(-2 |a|)) / 2), and
    # cosh(l) / (1 + v) = (v + 1/v) / (2 (1 + v)).
    log_cosh = half.abs() + softplus(-2 * half.abs()) - math.log(2)
    shape = 0.5 * (torch.sinh(half).square() - log_cosh)
    mean = mu.square() * (torch.sigmoid(logvar) + torch.exp(-logvar) * torch.sigmoid(-logvar)) / 8
    return (shape + mean).sum(-1)


def regularizer(mu: Tensor, logvar: Tensor, kind: str, free_nats: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's loss, whether it (or the share of its dimensions that) is clamped, and divergence; (...,).

    Args:
        mu, logvar: (..., R).
        kind: "clamp" (``bounded_kl``), "free_bits" (``free_bits_kl``) or "geometric_jsd".
        free_nats: per dimension, with "free_bits"; None divides the paper's ln 2 by R.
    """
    if kind == "geometric_jsd":
        loss = geometric_jsd(mu, logvar)
        return loss, torch.zeros_like(loss), loss
    kl = gaussian_kl(mu, logvar)
    divergence = kl.sum(-1)
    if kind == "free_bits":
        return *free_bits_kl(kl, math.log(2) / mu.shape[-1] if free_nats is None else free_nats), divergence
    return *bounded_kl(divergence), divergence


def hdpl_fit(weight: Tensor, blocks: int, rank: int, sweeps: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Fit diag(B_1 .. B_K) + up down to a weight by alternating least squares.

    The initial values are the diagonal blocks of the weight and a truncated SVD of the remainder. Then blocks, ``up``
    and ``down`` are solved for in turn; the error never rises.

    Args:
        weight: (O, I).
        blocks: K.
        rank: rank of the low-rank part, at most min(O, I); may be 0.

    Returns:
        blocks (K, O/K, I/K), down (rank, I) with orthonormal rows, up (O, rank); in float64.
    """
    weight = weight.detach().double()
    local = block_diagonal_of(weight, blocks)
    down, up = low_rank_factors(weight - block_diagonal_to_dense(local), rank)
    for _ in range(sweeps if rank else 0):
        local = block_diagonal_of(weight - up @ down, blocks)
        remainder = weight - block_diagonal_to_dense(local)
        up, _ = torch.linalg.qr(remainder @ down.T)
        down = up.T @ remainder
    local = block_diagonal_of(weight - up @ down, blocks)
    u, s, down = torch.linalg.svd(down, full_matrices=False)
    return local, down, up @ (u * s)
