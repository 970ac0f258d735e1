"""Long chains of pointwise operations as one pass over memory, where torch's compiler can build one for this CPU.

Eager torch passes over memory once an operation. For large tensors a chain is compiled by ``torch.compile`` at its
first use (seconds; torch keeps what it built on disk). Without a C++ compiler, or with ``RELINEAR_COMPILE_KERNELS=0``
in the environment, read once, callers take their eager form.
"""

from __future__ import annotations

import functools
import os
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["compiled", "fuses_pointwise", "is_plain"]

#: entries from which a pass saved is worth the compiler's seconds: the chain takes milliseconds eagerly
MIN_ENTRIES = 1 << 20


@functools.cache
def _has_compiler() -> bool:
    # what inductor looks for: the compiler of CXX, or one of these
    wanted = os.environ.get("RELINEAR_COMPILE_KERNELS", "1") != "0"
    return wanted and any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))


def is_plain(x: Tensor) -> bool:
    """Whether x is a tensor on a CPU, outside of tracing, fake tensors and dispatch modes."""
    return (
        x.device.type == "cpu"
        and type(x) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
    )


def fuses_pointwise(x: Tensor) -> bool:
    """Whether a chain over tensors like x is compiled: large plain ones, where there is a compiler."""
    return x.numel() >= MIN_ENTRIES and is_plain(x) and not torch._dynamo.config.disable and _has_compiler()


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` compiled for any sizes; itself, with one warning, if the compiler fails.

    The function must be a chain of pointwise operations and reductions of tensors without a graph.
    """
    built = torch.compile(function, dynamic=True)
    failed = False

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        nonlocal failed
        if not failed:
            try:
                return built(*args)
            except (torch._dynamo.exc.TorchDynamoException, OSError) as error:
                failed = True
                warnings.warn(
                    f"{function.__name__} could not be compiled and runs eagerly, which is slower: {error}; "
                    "set RELINEAR_COMPILE_KERNELS=0 to skip the attempt",
                    stacklevel=2,
                )
        return function(*args)

    return run
