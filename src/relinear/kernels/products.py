"""Multiply float32 matrices by oneDNN where torch's own product, MKL's, uses half of the processor's vectors."""

# Legend: N tokens, I in, O out

import torch
import torch.nn.functional as F
from torch import Tensor

from relinear.system.machine import has_narrow_products


def uses_onednn(x: Tensor) -> bool:
    """Return whether products of ``x`` are oneDNN's."""
    return x.dtype == torch.float32 and has_narrow_products() and bool(torch.backends.mkldnn.enabled)


def matrix_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias (N, O) for x (N, I) and weight (O, I), without a graph."""
    if not uses_onednn(x):
        return F.linear(x, weight, bias)
    # oneDNN takes a thousand times as long for other strides
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight if weight.is_contiguous() or weight.T.is_contiguous() else weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left^T right (I, O) for left (N, I) and right (N, O), without a graph."""
    return matrix_product(left.T, right.T)
