"""Functions that torch's compiler makes faster than eager torch is, for large tensors on CPUs.

``torch.compile`` builds one at its first use (seconds; torch keeps the result on disk). Without a C++ compiler, or with
``RELINEAR_COMPILE_KERNELS=0`` in the environment, read once, callers take their eager form
(``choice.against_compiling``).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["FEWEST_COMPILED_ENTRIES", "compiled"]

#: entries from which what is gained is worth the compiler's seconds: the function takes milliseconds eagerly
FEWEST_COMPILED_ENTRIES = 1 << 20


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` compiled for any sizes; itself, with one warning, if the compiler fails.

    The function must be one of tensors without a graph, without side effects.
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
