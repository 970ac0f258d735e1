"""Inference through a cached dense matrix, where that is the faster form of a linear operator.

A structured product has fewer FLOPs than a dense one and more operations. Below a certain size the operations cost
more than the FLOPs saved; in inference the weights do not change, so there the dense matrix can be kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from relinear.core.operator import Operator, dense_in_float32
from relinear.core.parameter_cache import ParameterCache

__all__ = ["dense_inference"]

_CACHE = "_dense_cache"


def dense_inference(
    operator: Operator, x: Tensor, prefers: Callable[[str, int, int, torch.dtype, int], bool]
) -> Tensor | None:
    """``operator(x)`` through its dense matrix, or None where the structured form is to be used.

    None in training, wherever gradients are recorded, off the CPU and inside ``torch.compile``. The matrix is built
    once, and again as soon as a parameter was replaced or changed in place; a change that goes around torch's version
    counters (``parameter.data.mul_(2)``) is seen after the next ``train()`` or ``eval()``.

    Args:
        operator: one with a context-free ``to_dense``.
        x: (..., in_features).
        prefers: says for a kind, in_features, out_features, dtype and number of tokens whether dense is faster.
    """
    if operator.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or x.device.type != "cpu":
        return None
    kind, size = operator.config.kind, operator.in_features
    if not prefers(kind, size, operator.out_features, x.dtype, x.numel() // size):
        return None
    cache = operator.__dict__.get(_CACHE)
    if cache is None:
        cache = operator.__dict__[_CACHE] = ParameterCache([m._parameters for m in operator.modules()])
    dense = cache.get("dense")
    weight, bias = cache.put("dense", dense_in_float32(operator)) if dense is None else dense
    return nn.functional.linear(x, weight, bias)
