"""Say which calls the C++ kernels for CPUs (``calls``) support; they are built at their first use (``build``).

Torch's operations run instead if no C++ compiler is found, if building fails (one warning), or if
``RELINEAR_COMPILE_KERNELS=0`` is in the environment at the first use.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from relinear.kernels.implementations import PLAIN, Call
from relinear.kernels.native import build
from relinear.kernels.native import calls as calls

#: elements from which the kernels are used: below, starting threads costs more than they save
MIN_NATIVE_ENTRIES = 1 << 17
#: the same for networks of rotors, which take many of torch's operations
MIN_NETWORK_ENTRIES = 1 << 13
#: rows up to which the kernels of ``few_rows.cpp`` are faster than torch's matrix products
MAX_ROWS_FUSED = {torch.float32: 4, torch.bfloat16: 1}


def unsupported_reason(call: Call, fewest: int | None = None, may_build: bool = True, size: int | None = None) -> str:
    """Return why the kernels do not run: they take large plain tensors in float32 or bfloat16, and need a compiler.

    Args:
        call: the call; only its x is checked.
        fewest: elements needed; ``MIN_NATIVE_ENTRIES`` by default.
        may_build: whether the kernels may be built for this call.
        size: number of elements to compare with ``fewest``; that of x by default.
    """
    if (call.size if size is None else size) < (MIN_NATIVE_ENTRIES if fewest is None else fewest):
        return "too few entries"
    if call.dtype not in (torch.float32, torch.bfloat16):
        return "neither float32 nor bfloat16"
    if not call.plain:
        return "no plain tensor on a CPU"
    if call.transformed:
        return call.opaque
    return build.missing(may_build)


def few_rows_unsupported(x: Tensor, *parameters: Tensor | None) -> str:
    """Return why a kernel for a whole operator, which is for inference alone, does not run on a few rows x (..., I).

    A few rows are not worth a build: ``relinear.for_inference_`` builds the kernels.

    Args:
        x: inputs.
        parameters: matrices and biases, which must be plain, contiguous and of x's dtype.
    """
    reason = rows_unsupported(x) or build.missing(may_build=False)
    if reason:
        return reason
    dtype = x.dtype
    for p in parameters:  # a loop, not a generator: this runs for every token
        if p is not None and not (p.dtype == dtype and p.is_cpu and type(p) in PLAIN and p.is_contiguous()):
            return "no plain parameters of the inputs' dtype on a CPU"
    return ""


def rows_unsupported(x: Tensor) -> str:
    """Return why no kernel for a few rows runs on x (..., I), with any parameters.

    It is written without helper calls, as every layer runs it for every token.
    """
    if torch.is_grad_enabled():
        return "gradients are recorded"
    if torch.compiler.is_compiling() or type(x) not in PLAIN or torch._C._len_torch_dispatch_stack():
        return "operations are traced"  # a program that is traced for a few rows must also work for many
    if torch._C._get_tracing_state() is not None:
        return "operations are traced"
    if not 0 < x.numel() <= MAX_ROWS_FUSED.get(x.dtype, 0) * x.shape[-1]:
        return "too many rows, or none"
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "torch.func or a derivative in forward mode"
    if not x.is_cpu or torch._C._functorch.is_legacy_batchedtensor(x):
        return "no plain tensor on a CPU"
    return "autocast" if torch.is_autocast_enabled("cpu") else ""
