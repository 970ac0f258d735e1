"""Multiply by integers of few bits: for a few rows from the packed integers, for many rows after unpacking them."""

# Legend: I in_features, O out_features, B bits, K groups of a row

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from relinear.functional import quantized as reference
from relinear.functional.rounding import change_codes
from relinear.kernels import native
from relinear.kernels.implementations import PLAIN, Call, Implementation, dispatch, log_choice, shape_of

#: the number of inputs in a group must be a multiple of this
_HALF = reference.BLOCK // 2


def unsupported_reason(call: Call) -> str:
    """Return why C++ does not run a call of ``quantized``; "" if it does."""
    x, packed, scales, zeros, bits, group, bias = call.arguments
    if bits not in native.calls.SUPPORTED_BITS:
        return f"{bits} bits"
    if x.shape[-1] % reference.BLOCK or group % _HALF:
        return f"inputs are not a multiple of {reference.BLOCK}, or a group's of {_HALF}"
    if call.grad and any(t is not None and t.requires_grad for t in (x, scales, bias)):
        return "gradients are wanted"
    if call.autocast or any(t is not None and t.dtype != x.dtype for t in (scales, bias)):
        return "numbers of several dtypes"
    for t in (packed, scales, zeros, bias):
        if t is not None and not (type(t) in PLAIN and t.is_cpu and t.is_contiguous()):
            return "no plain parameters on a CPU"
    return native.unsupported_reason(call, fewest=1, may_build=packed.numel() >= native.MIN_NATIVE_ENTRIES)


def _compiled(x: Tensor, *arguments) -> Tensor:
    return native.calls.quantized_layer(x.shape[-1], *arguments)(x)


quantized = dispatch(Implementation("C++", unsupported_reason, _compiled), otherwise="reference")(reference.quantized)


def prepare_few_rows(rounded: bool, x: Tensor, *parameters) -> Callable[[Tensor], Tensor] | None:
    """Return ``quantized`` as a function of a few rows like x; None if C++ does not support it.

    Parameters are checked once, here, and must not change. The caller checks ``native.rows_unsupported`` on every call.

    Args:
        rounded: whether to round x to 8 bits.
        x: (..., I).
        parameters: the arguments of ``quantized`` after x.
    """
    if unsupported_reason(Call(x, *parameters)):
        return None
    log_choice("quantized", "C++ for a few rows, prepared", shape_of(x), {})
    return native.calls.quantized_layer(x.shape[-1], *parameters, rounded=rounded)


def code_changer(weight: Tensor) -> Callable[..., None]:
    """Return ``functional.rounding.change_codes``, in C++ if ``weight`` (O, I) is in float32 and it can be built."""
    if weight.dtype != torch.float32 or native.unsupported_reason(Call(weight), fewest=1):
        return change_codes
    return native.calls.change_codes
