"""Which form of an operator's arithmetic is used: the reference where torch has to see every operation, dense matrices
on a CPU by a table, measured, Triton on GPUs."""

from __future__ import annotations

import importlib.util
import math
import os

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = [
    "LARGEST_DENSE",
    "dense_cost",
    "factored_cost",
    "is_transformed",
    "needs_reference",
    "prefers_dense",
    "prefers_triton",
]

#: kind -> dtype -> (tokens up to which, largest square layer, in features, that is faster dense), fewest tokens first.
#: Measured by results/speed/dense_or_structured.py on two AVX-512/AMX cores, at rank 64 and the default blocks; kinds
#: and dtypes without an entry are never made dense. Layers that are not square lose more, hence 1024 in bfloat16.
LARGEST_DENSE: dict[str, dict[torch.dtype, tuple[tuple[float, int], ...]]] = {
    "low_rank": {
        torch.float32: ((8, 512),),
        torch.bfloat16: ((8, 512), (math.inf, 256)),
    },
    "block_hadamard": {
        torch.float32: ((8, 1024), (math.inf, 256)),
        torch.bfloat16: ((128, 2048), (math.inf, 1024)),
    },
    "monarch": {
        torch.float32: ((8, 1024), (math.inf, 256)),
        torch.bfloat16: ((math.inf, 1024),),
    },
}


def prefers_dense(kind: str, in_features: int, out_features: int, dtype: torch.dtype, tokens: int) -> bool:
    """Whether an operator of this kind and size is faster through its dense matrix in inference on a CPU."""
    for most, limit in LARGEST_DENSE.get(kind, {}).get(dtype, ()):
        if tokens <= most:
            return in_features * out_features <= limit * limit
    return False


#: FLOPs a microsecond that a CPU multiplies at, without and with tiles for half precision
RATE, TILED_RATE = 4e5, 2e6


def dense_cost(in_features: int, out_features: int, tokens: int, itemsize: int, tiled: bool) -> float:
    """Of a dense product on a CPU, in microseconds: an estimate from rates measured on two AVX-512/AMX cores.

    Only the ratio to ``factored_cost`` matters. A large matrix has to be read for few tokens.

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
    """Of a sum of sandwiches, as ``dense_cost``.

    Small factors use a processor badly, and worse the faster it multiplies large ones.

    Args:
        factor: the smaller size of the factors.
        pairs: sandwiches.
        flops: of a token.
        blade: whether the basis is changed before and after.
    """
    waste = 1 + 400 / factor if tiled else 1 + 50 / factor + 500 / factor**2
    calls = 20 + 26 * (pairs - 1)
    basis = 40 + 0.01 * (in_features + out_features) * tokens if blade else 0
    return flops * waste * tokens / (TILED_RATE if tiled else RATE) + calls + basis


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether torch interprets operations rather than runs them: inside ``torch.func``'s transforms (``vmap``, ``jvp``,
    ``grad``, ...), with derivatives in forward mode, or where a gradient stands for many (``is_grads_batched``).

    A kernel that does not consist of torch's operations would not be seen there. Compilers ask the kernels themselves.
    """
    if torch.compiler.is_compiling():
        return False
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or any(t is not None and torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors)
    )


def needs_reference() -> bool:
    """Whether a kernel leaves the work to its reference: inside ``torch.compile``, which fuses torch's operations with
    their surroundings, and where ``is_transformed``."""
    return torch.compiler.is_compiling() or is_transformed()


#: the oldest GPU that the Triton kernels are compiled for: its tensor cores take bfloat16 and single precision
OLDEST_CAPABILITY = (8, 0)


#: whether there are Triton kernels to choose: settled once, as a compiler cannot look for packages
HAS_TRITON = (
    importlib.util.find_spec("triton") is not None
    and torch.version.hip is None
    and os.environ.get("RELINEAR_TRITON", "1") != "0"
)


def prefers_triton(x: Tensor, *others: Tensor | None) -> bool:
    """Whether an operator on x and its parameters runs as a Triton kernel rather than as torch operations.

    On NVIDIA GPUs alone, and in half precision: that of all tensors, or autocast's. ``RELINEAR_TRITON=0`` in the
    environment, read at import, turns the kernels off.
    """
    if not HAS_TRITON or x.device.type != "cuda" or not x.numel() or is_transformed():
        return False
    given = [t.dtype for t in (x, *others) if t is not None]
    if torch.is_autocast_enabled("cuda") and torch.float64 not in given:
        given = [torch.get_autocast_dtype("cuda")]
    if given[0] not in (torch.float16, torch.bfloat16) or any(dtype != given[0] for dtype in given):
        return False
    return torch.cuda.get_device_capability(x.device) >= OLDEST_CAPABILITY
