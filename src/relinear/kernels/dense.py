"""Use a dense matrix instead of a structured product if that is faster for a linear operator on a CPU.

A structured product has fewer FLOPs than a dense one but more calls. Below a certain size the calls cost more than the
FLOPs saved. After ``relinear.for_inference_`` weights do not change, so the matrix is cached.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from relinear.kernels.implementations import log_choice
from relinear.system.machine import tiled

#: dtype -> pairs of (tokens, features of the largest square layer that is faster dense)
Sizes = Mapping[torch.dtype, tuple[tuple[float, float], ...]]


@dataclasses.dataclass(frozen=True)
class DenseLimits:
    """The sizes up to which an operator is faster as a dense matrix; dtypes without an entry are never made dense.

    Measured by results/speed/dense_or_structured.py, at rank 64 and the default blocks.

    Attributes:
        limits: (tokens, size limit for up to so many tokens), fewest tokens first. The limits of bfloat16 are for
            processors with tiles (AMX); others use those of float32.
    """

    limits: Sizes

    def prefers(self, in_features: int, out_features: int, dtype: torch.dtype, tokens: int) -> bool:
        """Return whether the cached matrix is faster."""
        largest = next((size for most, size in self._of(dtype) if tokens <= most), 0)
        return in_features * out_features <= largest**2

    def _of(self, dtype: torch.dtype) -> tuple[tuple[float, float], ...]:
        return self.limits.get(torch.float32 if dtype == torch.bfloat16 and not tiled(dtype) else dtype, ())

    def product(self, operator: Any, x: Tensor) -> Tensor | None:
        """Return ``operator(x)`` by its dense matrix, or None if the structured product is to be used.

        An operator that is too large to be dense for any number of tokens looks nothing up in its cache.
        """
        if not _may_be_dense(operator, x):
            return None
        sizes = self._of(x.dtype)
        if not sizes or operator.in_features * operator.out_features > sizes[0][1] ** 2:
            return None
        return _cached_product(operator, x, self.prefers)


def dense_product(operator: Any, x: Tensor, prefers: Callable[[int, int, torch.dtype, int], bool]) -> Tensor | None:
    """Return ``operator(x)`` by its dense matrix, or None if the structured product is to be used.

    Returns None outside of ``relinear.for_inference_``, in training, if gradients are recorded, on other devices than a
    CPU and inside ``torch.compile``.

    Args:
        operator: an operator whose ``to_dense`` needs no context.
        x: (..., in_features).
        prefers: returns for in_features, out_features, dtype and number of tokens whether dense is faster.
    """
    return _cached_product(operator, x, prefers) if _may_be_dense(operator, x) else None


def _may_be_dense(operator: Any, x: Tensor) -> bool:
    """Return whether a cached matrix may be used; called before the processor is checked, which cannot be traced."""
    unused = operator.parameter_cache is None or operator.training or torch.is_grad_enabled()
    return not unused and not torch.compiler.is_compiling() and x.is_cpu


def _cached_product(operator: Any, x: Tensor, prefers: Callable[[int, int, torch.dtype, int], bool]) -> Tensor | None:
    cache = operator.parameter_cache
    # the number of elements up to a power of two, so that few decisions are made
    key = x.numel().bit_length(), x.dtype

    def product() -> Callable[[Tensor], Tensor] | None:
        inputs, outputs = operator.in_features, operator.out_features
        tokens = ((1 << key[0]) - 1) // inputs
        dense = prefers(inputs, outputs, x.dtype, tokens)
        chosen, other = ("dense matrix", "structured") if dense else ("structured", "dense matrix")
        layer = f"{inputs} -> {outputs}, some {tokens} tokens, {str(x.dtype).removeprefix('torch.')}"
        log_choice(f"{operator.config.kind} in inference", chosen, layer, {other: "slower by what was measured"})
        if not dense:
            return None
        weight, bias = cache.get("dense", operator.dense_weight_and_bias)
        return lambda x: linear(x, weight, bias)

    run = cache.get(key, product)
    return None if run is None else run(x)


#: FLOPs per microsecond of a CPU's products, without and with tiles for half precision
RATE, TILED_RATE = 4e5, 2e6


def dense_cost(in_features: int, out_features: int, tokens: int, itemsize: int, tiled: bool) -> float:
    """Estimate the time of a dense product on a CPU, in microseconds.

    Rates are measured on two AVX-512/AMX cores; only the ratio to ``factored_cost`` matters. For few tokens, reading a
    large matrix takes the time.

    Args:
        itemsize: bytes of a number.
        tiled: whether the processor multiplies these numbers on tiles (bfloat16 with AMX).
    """
    stored = in_features * out_features * itemsize
    single = tokens == 1 and stored >= 1 << 19
    read = stored / ((4e4 if single else 2.8e4) if tiled else 9e4 if stored < 1 << 23 else 5e4)
    return max(2 * in_features * out_features * tokens / (TILED_RATE if tiled else RATE), read)


def factored_cost(
    in_features: int, out_features: int, factor: int, pairs: int, flops: int, blade: bool, tokens: int, tiled: bool
) -> float:
    """Estimate the time of a sum of sandwiches in microseconds, like ``dense_cost``.

    Products of small factors are far below the processor's peak, the more so the higher that is.

    Args:
        factor: the smaller size of the factors.
        pairs: sandwiches.
        flops: FLOPs per token.
        blade: whether the basis is changed before and after.
    """
    waste = 1 + 400 / factor if tiled else 1 + 50 / factor + 500 / factor**2
    calls = 20 + 26 * (pairs - 1)
    basis = 40 + 0.01 * (in_features + out_features) * tokens if blade else 0
    return flops * waste * tokens / (TILED_RATE if tiled else RATE) + calls + basis
