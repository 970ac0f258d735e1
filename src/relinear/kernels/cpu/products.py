"""Float32 products of matrices in ``products.cpp``, where torch's library leaves half of the processor unused."""

# Legend: N rows, I inputs, O outputs

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from relinear.kernels.native import kernels
from relinear.system.machine import has_narrow_products

__all__ = ["deepest", "product", "product_gradient"]

#: entries of a gradient up to which its sums, which are added to some rows at a time, stay in the second cache
LARGEST_GRADIENT = 1 << 19


@functools.cache
def _narrow() -> bool:
    return has_narrow_products()


def deepest(bound: int) -> float:
    """Inputs of an output up to which the kernels of ``products.cpp`` are faster, of which ``bound`` holds beside a
    library that uses the whole processor."""
    return math.inf if _narrow() else bound


def product(x: Tensor, weight: Tensor, bias: Tensor | None, native: bool) -> Tensor:
    """x weight^T + bias (N, O), without a graph, of x (N, I) and weight (O, I), in C++ where that is wanted."""
    if not native:
        return torch.mm(x, weight.T) if bias is None else torch.addmm(bias, x, weight.T)
    y, rows = x.new_empty(x.shape[0], weight.shape[0]), x.contiguous()
    nothing = x.new_empty(x.shape[0], 0), weight.new_empty(weight.shape[0], 0)
    kernels().block_low_rank(y, rows, weight[None], *nothing, None if bias is None else bias.contiguous())
    return y


def product_gradient(grad: Tensor, x: Tensor, native: bool) -> Tensor:
    """grad^T x (O, I) of grad (N, O) and x (N, I), in C++ where that is wanted and small enough for it."""
    outputs, inputs = grad.shape[1], x.shape[1]
    if not native or outputs * inputs > LARGEST_GRADIENT:
        return grad.T @ x
    total, nothing = x.new_empty(1, outputs, inputs), x.new_empty(outputs, 0)
    kernels().block_low_rank_gradient(total, nothing, grad.contiguous(), x.contiguous(), x.new_empty(x.shape[0], 0))
    return total[0]
