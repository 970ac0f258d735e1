"""Products of matrices whose result oneDNN gates before it leaves the cache, for bfloat16 on CPUs.

In single precision torch's products are MKL's, which are faster than oneDNN's by more than a pass over memory costs.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["FEWEST_GATED_ENTRIES", "has_bfloat16_products", "linear_product", "linear_sigmoid"]

#: entries of a result from which oneDNN's own overhead does not count
FEWEST_GATED_ENTRIES = 1 << 16


@functools.cache
def has_bfloat16_products() -> bool:
    """Return whether oneDNN multiplies bfloat16 on this processor, which the functions below need."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def linear_sigmoid(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """sigmoid(weight x + bias) (N, O), without a graph."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "sigmoid", [], "")


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor) -> Tensor:
    """(weight x + bias) times factor (N, O), without a graph."""
    return torch.ops.mkldnn._linear_pointwise.binary(x, factor, weight, bias, "mul")
