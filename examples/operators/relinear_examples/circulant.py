"""Block-circulant layers (Ding et al. 2017, "CirCNN", arXiv 1708.08917): every block is a circular convolution.

Block (p, q) holds c[(i - j) mod B] at (i, j), and so has B parameters in place of B^2; the Fourier transform makes B
products of it. The closest one is the mean along each of its wrapped diagonals. Other sizes are padded.
"""

# Legend: I in_features, O out_features, B size of a block, Q = ceil(I / B), P = ceil(O / B)

from __future__ import annotations

import math
from typing import Self

import torch
from torch import Tensor

from relinear import OperatorConfig, register
from relinear.contract import Count
from relinear_examples.structured import StructuredLinear

__all__ = ["Circulant", "CirculantLinear"]


class CirculantLinear(StructuredLinear):
    """y_p = sum_q ifft(fft(kernel_pq) fft(x_q)) + bias; parameter ``kernel`` (P, Q, B), the blocks' first columns."""

    def tensors(self):
        size = self.config.block
        return {"kernel": ((-(-self.out_features // size), -(-self.in_features // size), size), self.in_features**-0.5)}

    def product(self, x: Tensor) -> Tensor:
        """In single precision at least: there is no transform in half precision."""
        _, columns, size = self.kernel.shape
        if x.numel() == 0:  # the transform takes no empty batch
            return x.new_zeros(*x.shape[:-1], self.out_features)
        wide = torch.promote_types(x.dtype, torch.float32)
        padded = torch.nn.functional.pad(x.to(wide), (0, columns * size - self.in_features))
        spectrum = torch.fft.rfft(padded.unflatten(-1, (columns, size)))
        product = torch.einsum("...qf,pqf->...pf", spectrum, torch.fft.rfft(self.kernel.to(wide)))
        return torch.fft.irfft(product, n=size).flatten(-2)[..., : self.out_features].to(x.dtype)

    def to_dense(self) -> Tensor:
        rows, columns, size = self.kernel.shape
        at = torch.arange(size, device=self.kernel.device)
        blocks = self.kernel[..., (at[:, None] - at) % size]  # (P, Q, B, B)
        dense = blocks.transpose(1, 2).reshape(rows * size, columns * size)
        return dense[: self.out_features, : self.in_features]

    def fit(self, weight: Tensor) -> dict[str, Tensor]:
        rows, columns, size = self.kernel.shape
        padding = (0, columns * size - self.in_features, 0, rows * size - self.out_features)
        at = torch.arange(size, device=weight.device)

        def diagonals(matrix: Tensor) -> Tensor:  # (P, Q, B): sums over the wrapped diagonals of every block
            blocks = torch.nn.functional.pad(matrix, padding).view(rows, size, columns, size).transpose(1, 2)
            return blocks[..., at, (at - at[:, None]) % size].sum(-1)

        return {"kernel": diagonals(weight) / diagonals(torch.ones_like(weight)).clamp_min(1)}

    def param_roles(self):
        """The rows of W sum over all inputs, whatever the shape in which they are kept."""
        roles = super().param_roles()
        return roles | {"kernel": roles["kernel"]._replace(fan_in=self.in_features, fan_out=self.out_features)}

    def flops_per_token(self) -> int:
        """A complex multiply-add counts as eight, a real transform of B numbers as 2 B log2 B."""
        rows, columns, size = self.kernel.shape
        return 8 * rows * columns * (size // 2 + 1) + round(2 * (rows + columns) * size * math.log2(size))


@register
class Circulant(OperatorConfig):
    """A matrix of circulant blocks. O I / B parameters.

    Args:
        block: B, the size of a block; 1 is a dense matrix.
    """

    kind = "circulant"
    module_class = CirculantLinear

    block: Count = 8

    def check_shape(self, in_features: int, out_features: int) -> None:
        if self.block > max(in_features, out_features):
            raise ValueError(f"block={self.block} exceeds both sizes of a layer {in_features} -> {out_features}")

    def scaled(self, in_features: int, out_features: int, ratio: float) -> Self:
        return self.replace(block=max(1, min(round(self.block / ratio), max(in_features, out_features))))

    def candidates(self, in_features: int, out_features: int) -> list[OperatorConfig]:
        """Powers of two."""
        return [self.replace(block=2**power) for power in range(1, min(in_features, out_features).bit_length())]
