"""A dense matrix in place of a structured product, where that is the faster form of a linear operator.

A structured product has fewer FLOPs than a dense one and more operations. Below a certain size the operations cost
more than the FLOPs saved: in inference with weights that stay (``relinear.for_inference_``) the matrix is cached.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from relinear.core.inference import ParameterCache
from relinear.core.operator import Operator, dense_in_float32


def dense_inference(
    operator: Operator, x: Tensor, prefers: Callable[[int, int, torch.dtype, int], bool]
) -> Tensor | None:
    """``operator(x)`` through its dense matrix, or None where the structured form is to be used.

    None outside of ``relinear.for_inference_``, in training, wherever gradients are recorded, off the CPU and inside
    ``torch.compile``.

    Args:
        operator: one with a context-free ``to_dense``.
        x: (..., in_features).
        prefers: says for in_features, out_features, dtype and number of tokens whether dense is faster.
    """
    cache = operator.parameter_cache
    if cache is None or operator.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or not x.is_cpu:
        return None
    # sizes up to a power of two, so that one decision serves many; a single token has a power of its own
    key = x.numel().bit_length(), x.dtype
    run = cache.get(key, lambda: _form(operator, cache, x, prefers))
    return None if run is None else run(x)


def _form(operator: Operator, cache: ParameterCache, x: Tensor, prefers) -> Callable[[Tensor], Tensor] | None:
    """How inputs of the size and dtype of x are multiplied."""
    inputs, outputs = operator.in_features, operator.out_features
    tokens = ((1 << x.numel().bit_length()) - 1) // inputs
    if not prefers(inputs, outputs, x.dtype, tokens):
        return None
    weight, bias = cache.get("dense", lambda: dense_in_float32(operator))
    return lambda x: linear(x, weight, bias)
