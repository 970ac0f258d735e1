"""Matrices of low displacement rank, Toeplitz-like (Thomas et al. 2018, arXiv 1810.02309).

W = C(g_1) S(h_1) + ... + C(g_R) S(h_R), with C(g) circulant and S(h) skew-circulant; Toeplitz matrices and their
inverses have R = 2. With Z the shift that wraps around, and Z' the one that changes the sign as it does, Z W - W Z' has
rank R. Its truncated SVD gives every h (Pan 2001, section 4.4), and least squares every g, for which each frequency
stands alone. That is exact where W is of this kind.
"""

# Legend: I in_features, O out_features, N = max(I, O), R displacement rank

from __future__ import annotations

import math

import torch
from torch import Tensor

from relinear import register
from relinear.contract import Count
from relinear_examples.structured import RankedConfig, StructuredLinear

__all__ = ["Toeplitz", "ToeplitzLinear"]


def skew_circulant(kernels: Tensor, x: Tensor) -> Tensor:
    """S(h_r) x (..., R, N), with zeros behind x up to N, for every row of h (R, N): products modulo z^N + 1."""
    size = kernels.shape[1]
    product = torch.fft.rfft(x, 2 * size)[..., None, :] * torch.fft.rfft(kernels, 2 * size)
    low, high = torch.fft.irfft(product, 2 * size).split(size, -1)
    return low - high


class ToeplitzLinear(StructuredLinear):
    """y = sum_r C(g_r) S(h_r) x + bias, padded to N; parameters ``outer`` g (R, N), ``inner`` h (R, N)."""

    def tensors(self):
        rank, size = self.config.rank, max(self.in_features, self.out_features)
        return {"outer": ((rank, size), (rank * size) ** -0.5), "inner": ((rank, size), self.in_features**-0.5)}

    def product(self, x: Tensor) -> Tensor:
        """In single precision at least: there is no transform in half precision."""
        if x.numel() == 0:  # the transform takes no empty batch
            return x.new_zeros(*x.shape[:-1], self.out_features)
        size, wide = self.inner.shape[1], torch.promote_types(x.dtype, torch.float32)
        hidden = torch.fft.rfft(skew_circulant(self.inner.to(wide), x.to(wide)))
        summed = (hidden * torch.fft.rfft(self.outer.to(wide))).sum(-2)
        return torch.fft.irfft(summed, size)[..., : self.out_features].to(x.dtype)

    def to_dense(self) -> Tensor:
        eye = torch.eye(self.in_features, dtype=self.inner.dtype, device=self.inner.device)
        return self.product(eye).T

    def fit(self, weight: Tensor) -> dict[str, Tensor]:
        rank, size = self.inner.shape
        whole = torch.nn.functional.pad(weight, (0, size - self.in_features, 0, size - self.out_features))
        shifted = whole.roll(-1, 1)
        shifted[:, -1] *= -1
        _, s, vh = torch.linalg.svd(whole.roll(1, 0) - shifted)
        inner = s[:rank, None].sqrt() * vh[:rank].flip(1)
        skewed = skew_circulant(inner, torch.eye(size).to(whole)).permute(2, 1, 0)  # (N, R, N), the matrices S(h_r)
        spectrum = torch.fft.fft(whole, dim=0)[:, None] @ torch.linalg.pinv(torch.fft.fft(skewed, dim=0))  # (N, 1, R)
        outer = torch.fft.ifft(spectrum[:, 0], dim=0).real.T
        even = (outer.norm() / inner.norm().clamp_min(1e-30)).sqrt()
        return {"outer": outer / even, "inner": inner * even}

    def param_roles(self):
        """Both are matrices of size N, of which a row is kept."""
        roles = super().param_roles()
        return {name: role._replace(fan_out=role.fan_in) for name, role in roles.items()}

    def flops_per_token(self) -> int:
        """A complex multiply-add counts as eight, a real transform of N numbers as 2 N log2 N."""
        rank, size = self.inner.shape

        def transform(length: int) -> float:
            return 2 * length * math.log2(length)

        transforms = (1 + rank) * transform(2 * size) + (rank + 1) * transform(size)
        return round(transforms) + 8 * rank * (size + size // 2 + 2)


@register
class Toeplitz(RankedConfig):
    """A matrix of low displacement rank. 2 R max(I, O) parameters.

    Args:
        rank: R, the displacement rank; at most max(in_features, out_features). Toeplitz matrices have 2.
    """

    kind = "toeplitz"
    module_class = ToeplitzLinear

    rank: Count = 2

    def full_rank(self, in_features: int, out_features: int) -> int:
        return max(in_features, out_features)
