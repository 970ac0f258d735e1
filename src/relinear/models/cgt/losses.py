"""The regularisers of the CGT paper, which keep a context slow, spread out and informative; one function per equation.

Sums that the paper writes with a proportionality sign are averages here, so that a weight means the same for every
length and batch size. Only positions marked in ``real`` (B, T) count, by default all. ``shares`` (B,) are weights of
the samples, by default equal. If they are numbers of target tokens, accumulated batches give the gradient of one large
batch, except for statistics of a batch (``decorrelation``, ``gaussian_process_matching``, ``moment_matching``).
"""

# Legend: B batch, T positions, E width of y

import torch
from torch import Tensor
from torch.nn import functional as F

from relinear.contract.config import check_choice


def _weights(weights: Tensor | None, length: int, like: Tensor) -> Tensor:
    """Return zeta scaled to a mean of one over the positions; ones for None."""
    if weights is None:
        return like.new_ones(length)
    if weights.shape != (length,):
        raise ValueError(f"a weight profile of {length} values is needed, got shape {tuple(weights.shape)}")
    return (weights / weights.mean()).to(like)


def _real(real: Tensor | None, y: Tensor) -> Tensor:
    """Return ``real``, by default True everywhere."""
    return torch.ones(y.shape[:2], dtype=torch.bool, device=y.device) if real is None else real


def _average(values: Tensor, shares: Tensor | None) -> Tensor:
    """Return the mean over samples of values (B,) with weights (B,)."""
    if shares is None:
        return values.mean()
    weights = shares.to(values)
    return (values * weights).sum() / weights.sum().clamp(min=torch.finfo(values.dtype).tiny)


def _masked_mean(values: Tensor, weights: Tensor, real: Tensor, dim: int) -> Tensor:
    """Average the real entries of ``values`` along ``dim``, with ``weights`` scaled to a mean of one over them."""
    weights = torch.where(real, weights, 0.0)
    total = torch.where(real, values, 0.0) * weights
    return total.sum(dim) / weights.sum(dim).clamp(min=torch.finfo(values.dtype).tiny)


def continuity(
    y: Tensor, weights: Tensor | None = None, *, real: Tensor | None = None, shares: Tensor | None = None
) -> Tensor:
    """Return R_C: mean over s >= 2 of zeta(s) ||n_s - n_{s-1}||^2 with n = y / ||y|| (CGT, Section 3.4).

    Args:
        y: (B, T, E) with T >= 2.
        weights: zeta(s) for all T positions (the first is not used), scaled to a mean of one over those used; None: 1.
        real, shares: see the head of this file; a step counts if both of its ends are real.
    """
    n = F.normalize(y, dim=-1)
    steps = (n[:, 1:] - n[:, :-1]).square().sum(-1)
    zeta = _weights(None if weights is None else weights[1:], steps.shape[1], y)
    real = _real(real, y)
    return _average(_masked_mean(steps, zeta.expand_as(steps), real[:, 1:] & real[:, :-1], 1), shares)


def decorrelation(y: Tensor, weights: Tensor | None = None, *, real: Tensor | None = None) -> Tensor:
    """Return R_D: mean over s and over pairs of different samples of zeta(s) (n_s^a . n_s^b)^2 (CGT, Section 3.4).

    The diagonal pairs of the paper's sum are zero by normalisation. 0 for a batch of one.

    Args:
        y: (B, T, E).
        weights: zeta(s), (T,), scaled to mean one; None for 1.
        real: see the head of this file; a pair counts at positions that are real in both.
    """
    n = F.normalize(y, dim=-1).transpose(0, 1)
    zeta, is_real = _weights(weights, y.shape[1], y), _real(real, y).T
    both = is_real.unsqueeze(-1) & is_real.unsqueeze(-2) & ~torch.eye(len(y), dtype=torch.bool, device=y.device)
    products = (n @ n.mT).square()
    return _masked_mean(products.flatten(), zeta[:, None, None].expand_as(products).flatten(), both.flatten(), 0)


def profile(kind: str, length: int) -> Tensor:
    """Return zeta(s) for s = 1 .. length, with a mean of one: constant, linear (s), quadratic (s^2) or second half."""
    check_choice("profile", kind, ("constant", "linear", "quadratic", "second_half"))
    s = torch.arange(1, length + 1, dtype=torch.float32)
    shapes = {"constant": s**0, "linear": s, "quadratic": s**2, "second_half": (s > length / 2).float()}
    return shapes[kind] / shapes[kind].mean()


def kernel_profile(kernel: Tensor) -> Tensor:
    """Return zeta = -kappa_2 of a prior (CGT, Appendix A.3), (T,) with a mean of one: the cost of steps by position.

    With tau = (s + t) / 2 and delta = s - t, kappa_2(tau) = sum_delta K^-1[tau + delta/2, tau - delta/2] delta^2 sums
    over an anti-diagonal of K^-1. The step from s - 1 to s has tau = s - 1/2. An anti-diagonal whose tau is a whole
    number contributes one half to each of the two adjacent steps. The first position, to which no step leads, has the
    weight of the first step; only decorrelation uses it.

    A stationary kernel has constant weights. The paper ignores the ends of the sequence, so that K^-1 is that of the
    whole line and stationary as well, with -kappa_2 = sum_delta K(delta) delta^2 / (sum_delta K(delta))^2. The inverse
    of the finite matrix cannot be used: for the RBF kernel it oscillates near the ends, with weights of both signs that
    are hundreds of times their mean.

    Args:
        kernel: (T, T) with T >= 2, the prior covariance of y.

    Raises:
        ValueError: if a weight is negative, as large steps would then be rewarded.
    """
    wide = kernel.double()
    length = len(wide)
    if length < 2:
        raise ValueError(f"a profile weighs steps between positions; the kernel has {length} position")
    distances = _distances(length).to(wide)
    if torch.allclose(wide[1:, 1:], wide[:-1, :-1], rtol=1e-9, atol=1e-12):
        steps = (wide[0] * distances[0].square()).sum().expand(length - 1)
    else:
        terms = -torch.linalg.inv(wide) * distances.square()
        sums = (torch.arange(length)[:, None] + torch.arange(length)).to(wide.device)
        taus = wide.new_zeros(2 * length - 1).index_add(0, sums.flatten(), terms.flatten())
        steps = taus[1::2] + (taus[:-2:2] + taus[2::2]) / 2
    if steps.min() < 0:
        raise ValueError(
            f"-kappa_2 of this kernel falls to {steps.min() / steps.abs().mean():.3g} times its mean size, which would "
            "reward jumps there; choose a kernel whose correlation falls with distance, or a profile by name"
        )
    zeta = torch.cat([steps[:1], steps])
    return (zeta / zeta.mean()).float()


def _distances(length: int) -> Tensor:
    s = torch.arange(length, dtype=torch.float64)
    return (s[:, None] - s).abs()


def rbf_kernel(length: int, scale: float = 0.1, nu: float = 0.03) -> Tensor:
    """Return nu I + (1 - nu) exp(-|s - t|^2 / 2 lambda^2), (T, T), lambda = ``scale`` * length (Appendix B.2.3)."""
    smooth = torch.exp(-_distances(length).square() / (2 * (scale * length) ** 2))
    return nu * torch.eye(length, dtype=torch.float64) + (1 - nu) * smooth


def exponential_kernel(length: int, scale: float = 0.1) -> Tensor:
    """Return exp(-|s - t| / lambda), (T, T), lambda = ``scale`` * length (Appendix A.1)."""
    return torch.exp(-_distances(length) / (scale * length))


def estimation_kernel(length: int, noise: float = 1.0) -> Tensor:
    """Return 1 + eps^2 min(s, t) / (s t) = 1 + eps^2 / max(s, t), (T, T): estimating a mean from s samples (Eq. 1).

    Its smallest eigenvalues fall as eps^2 / T^2, so that it must be inverted in float64.
    """
    s = torch.arange(1, length + 1, dtype=torch.float64)
    return 1 + noise**2 / torch.maximum(s[:, None], s)


def gaussian_process_kl(
    mean: Tensor,
    log_variance: Tensor,
    kernel: Tensor,
    *,
    constants: bool = False,
    reduction: str = "mean",
    real: Tensor | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """Return the KL terms of the VAE loss (CGT, Eq. 2 and 7) for beta_y = 1, averaged over samples.

    1/2 sum_is [-log sigma + K^-1_ss sigma] + 1/2 sum_ist K^-1_st mu_is mu_it, where sigma is the **variance** of q.
    Read in this way it is, up to constants, the divergence between q = N(mu, diag sigma) and the Gaussian process
    N(0, K). (Eq. 6 writes sigma^2 for the variance.)

    Args:
        mean, log_variance: (B, T, E).
        kernel: (T, T).
        constants: add log det K - T, so that the value is the divergence itself.
        reduction: ``sum`` over positions and components, as in Eq. 2; ``components``: that sum divided by the number of
            positions, the term of the evidence bound that goes with a loss per token; ``mean``: divided by the number
            of components too.
        real, shares: see the head of this file; the prior of a sample is that of its real positions alone.
    """
    check_choice("reduction", reduction, ("mean", "components", "sum"))
    length = mean.shape[1]
    if kernel.shape != (length, length):
        raise ValueError(f"the kernel must be {length} by {length} for {length} positions, got {tuple(kernel.shape)}")
    wide, counts = kernel.double(), mean.new_full((1,), length)
    if real is not None:
        # Ones on the diagonal at padding: the inverse then contains that of the real positions' covariance.
        real_pairs = real.unsqueeze(-1) & real.unsqueeze(-2)
        wide = torch.where(real_pairs, wide, torch.eye(length, dtype=wide.dtype, device=wide.device))
        mean = torch.where(real.unsqueeze(-1), mean, 0.0)
        counts = real.sum(-1).to(mean).clamp(min=1)
    inverse = torch.linalg.inv(wide).to(mean)
    quadratic = ((inverse @ mean) * mean).sum((-1, -2))
    diagonal = inverse.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * log_variance.exp() - log_variance
    diagonal = (diagonal if real is None else torch.where(real.unsqueeze(-1), diagonal, 0.0)).sum((-1, -2))
    total = quadratic + diagonal
    if constants:
        total = total + mean.shape[2] * (torch.logdet(wide).to(mean) - counts)
    divisors = {"sum": 1, "components": counts, "mean": counts * mean.shape[2]}
    return 0.5 * _average(total / divisors[reduction], shares)


def _moments(y: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each position the mean (T, E), the deviations (B, T, E), 0 at padding, and the samples (T,)."""
    is_real, counts = real.unsqueeze(-1), real.sum(0)
    mean = torch.where(is_real, y, 0.0).sum(0) / counts.clamp(min=1).unsqueeze(-1)
    return mean, torch.where(is_real, y - mean, 0.0), counts


def gaussian_process_matching(
    y: Tensor, kernel: Tensor, positions: Tensor | None = None, *, real: Tensor | None = None
) -> Tensor:
    """Return R_P: 1/N sum_s ||mu_s||^2 + 1/N^2 sum_stij (<dy_si dy_tj> - K_st delta_ij)^2 (CGT, Appendix A.2).

    Averages <.> run over the batch; dy is y minus its batch mean mu.

    Args:
        y: (B, T, E).
        kernel: (T, T).
        positions: indices of the positions to estimate on, which saves time; None for all T.
        real: see the head of this file; <dy_s dy_t> is over the samples that are real at both positions; pairs of
            positions without samples are omitted.
    """
    real = _real(real, y)
    if positions is not None:
        y, kernel, real = y[:, positions], kernel[positions][:, positions], real[:, positions]
    batch, length, width = y.shape
    mean, deviations, counts = _moments(y, real)
    flat = deviations.reshape(batch, length * width)
    covariance = (flat.T @ flat).view(length, width, length, width)
    target = kernel.to(y)[:, None, :, None] * torch.eye(width, dtype=y.dtype, device=y.device)[None, :, None, :]
    pairs = real.to(y).T @ real.to(y)
    errors = (covariance / pairs.clamp(min=1)[:, None, :, None] - target).square().sum((1, 3))
    n_pairs = (pairs > 0).sum().clamp(min=1)
    return mean.square().sum() / (counts > 0).sum().clamp(min=1) + torch.where(pairs > 0, errors, 0.0).sum() / n_pairs


def moment_matching(y: Tensor, *, real: Tensor | None = None) -> Tensor:
    """Return R'_D: mean over s of ||<y_s>||^2 + sum_ij (<dy_si dy_sj> - delta_ij)^2 (CGT, Appendix A.2, simplified).

    Args:
        y: (B, T, E); <.> is the mean over the batch and dy = y - <y>.
        real: see the head of this file; positions that are padding in every sample are omitted.
    """
    mean, deviations, samples = _moments(y, _real(real, y))
    deviations = deviations.transpose(0, 1)
    covariance = deviations.mT @ deviations / samples.clamp(min=1)[:, None, None]
    eye = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
    values = mean.square().sum(-1) + (covariance - eye).square().sum((-1, -2))
    return torch.where(samples > 0, values, 0.0).sum() / (samples > 0).sum().clamp(min=1)
