"""Blades of Cl(n): their order, their grades, and tables of n that every other file here indexes with.

A multivector is a tensor (..., 2^n) of blade coordinates, ordered by grade and then lexicographically, as in the
``clifford`` package: 1, e1, ..., en, e12, e13, ..., e12...n. A bivector is (..., n(n-1)/2) in the same order.
"""

# Legend: n dimensions, V = 2^n blades, P = n(n-1)/2 planes

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

MAX_DIMENSION = 12


@functools.cache
def blade_masks(n: int) -> tuple[int, ...]:
    """Bit masks of the V blades in order; bit i stands for the basis vector e_{i+1}."""
    return tuple(
        sum(1 << i for i in chosen) for grade in range(n + 1) for chosen in itertools.combinations(range(n), grade)
    )


def grades(n: int) -> np.ndarray:
    """Grade of each blade, (V,)."""
    return np.array([mask.bit_count() for mask in blade_masks(n)])


def unit(size: int) -> np.ndarray:
    """Coordinates (size,) of the scalar 1."""
    return np.eye(1, size)[0]


def multivector_dimension(x: Tensor) -> int:
    """Return n of a multivector (..., 2^n).

    Args:
        x: (..., V).

    Raises:
        ValueError: if the last dimension is no power of two from 2 to 4096.

    Examples:
        >>> relinear.clifford.multivector_dimension(torch.randn(5, 8))
        3
    """
    size = x.shape[-1] if x.ndim else 0
    n = size.bit_length() - 1
    if size != 1 << max(n, 0) or not 1 <= n <= MAX_DIMENSION:
        raise ValueError(
            f"a multivector has 2^n coordinates in its last dimension, n from 1 to {MAX_DIMENSION}; got shape "
            f"{tuple(x.shape)}"
        )
    return n


def bivector_dimension(beta: Tensor) -> int:
    """Return n of a bivector (..., n(n-1)/2); no coordinates at all means n = 1.

    Args:
        beta: (..., P).

    Raises:
        ValueError: if the last dimension is no n(n-1)/2 for n from 1 to 12.

    Examples:
        >>> relinear.clifford.bivector_dimension(torch.randn(5, 6))
        4
    """
    size = beta.shape[-1] if beta.ndim else -1
    n = (1 + math.isqrt(max(1 + 8 * size, 0))) // 2
    if size < 0 or n * (n - 1) // 2 != size or n > MAX_DIMENSION:
        raise ValueError(
            f"a bivector has n(n-1)/2 coordinates in its last dimension, n from 1 to {MAX_DIMENSION}; got shape "
            f"{tuple(beta.shape)}"
        )
    return n


def bivector_slice(n: int) -> slice:
    """Return where the bivector coordinates lie among the 2^n."""
    return slice(1 + n, 1 + n + n * (n - 1) // 2)


def embed_bivector(beta: Tensor) -> Tensor:
    """Return the bivector (..., P) as a multivector (..., V).

    Args:
        beta: (..., P).

    Raises:
        ValueError: if the last dimension is no n(n-1)/2 for n from 1 to 12.

    Examples:
        >>> relinear.clifford.embed_bivector(torch.tensor([2.0]))
        tensor([0., 0., 0., 2.])
    """
    n = bivector_dimension(beta)
    where = bivector_slice(n)
    return torch.nn.functional.pad(beta, (where.start, 2**n - where.stop))


def take_bivector(x: Tensor) -> Tensor:
    """Return the grade-2 part (..., P) of a multivector (..., V).

    Args:
        x: (..., V) in blade coordinates.

    Raises:
        ValueError: if the last dimension is no power of two from 2 to 4096.

    Examples:
        >>> relinear.clifford.take_bivector(torch.arange(4.0))
        tensor([3.])
    """
    return x[..., bivector_slice(multivector_dimension(x))]


def take_last(x: Tensor, index: Tensor) -> Tensor:
    """``x.index_select(-1, index)``, by way of two dimensions: twenty times faster on a CPU.

    There rows of half precision go through single precision, which torch selects from five times faster.
    """
    rows = x.reshape(-1, x.shape[-1])
    if x.is_cpu and x.dtype in (torch.bfloat16, torch.float16) and len(rows) > 1:
        taken = rows.float().index_select(1, index).to(x.dtype)
    else:
        taken = rows.index_select(1, index)
    return taken.reshape(*x.shape[:-1], index.shape[0])


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to compute: half precision goes up to single, integers to torch's default."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    if dtype == torch.complex32:
        return torch.complex64
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.get_default_dtype()
    return dtype


@functools.cache
def _on_device(
    table: Callable[..., np.ndarray], sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype | None
) -> Tensor:
    # from_numpy ignores torch's default device, so that a table first asked for under "meta" still holds numbers.
    # Outside inference mode, or the cached tensor could not be saved for backward; outside of torch.func's transforms,
    # or it would belong to the one that runs.
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableFuncTorch():
        return torch.from_numpy(np.ascontiguousarray(table(*sizes))).to(device=device, dtype=dtype)


def _named(module: str, name: str) -> Callable[..., np.ndarray]:
    return getattr(importlib.import_module(module), name)


# An operator of its own, so that a compiler takes the table as it is instead of tracing how it is made. A copy, because
# a compiler may reuse the memory of what an operator returns.
@torch.library.custom_op("relinear::constant_table", mutates_args=())
def _opaque(module: str, name: str, sizes: Sequence[int], device: torch.device, dtype: torch.dtype | None) -> Tensor:
    return _on_device(_named(module, name), tuple(sizes), device, dtype).clone()


@_opaque.register_fake
def _(module, name, sizes, device, dtype):
    table = torch.from_numpy(_named(module, name)(*sizes))
    return torch.empty(table.shape, device=device, dtype=dtype or table.dtype)


def device_table(
    table: Callable[..., np.ndarray], sizes: int | tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """``table(*sizes)`` as a constant on the device of ``like``, made once; ``table`` is at the top of its module."""
    sizes = (sizes,) if isinstance(sizes, int) else sizes
    if torch.compiler.is_compiling():
        return _opaque(table.__module__, table.__name__, sizes, like.device, dtype)
    return _on_device(table, sizes, like.device, dtype)


def values_are_at_hand(x: Tensor) -> bool:
    """Return whether numbers may be looked at: not while a compiler or a map over a batch is at work."""
    if torch.compiler.is_compiling():
        return False
    transforms = torch._C._functorch
    while transforms.is_functorch_wrapped_tensor(x):
        if transforms.is_batchedtensor(x):
            return False
        x = transforms.get_unwrapped(x)
    return True
