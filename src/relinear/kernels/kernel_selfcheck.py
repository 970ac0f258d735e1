"""Check a Triton kernel against torch at its first use on a GPU, before its results are used."""

import importlib
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch

#: largest allowed error of results and gradients, relative in the Frobenius norm; in some gradients terms cancel
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}

_known: dict[tuple[str, str, torch.dtype], str] = {}
_lock = threading.Lock()


def failed_check(kind: str, device: str, dtype: torch.dtype) -> str:
    """Return why an operator's kernel must not be used on a device; "" if it passes its check there.

    The first call runs the check and warns if it fails; later calls return the same. Compilers treat the result as a
    constant.

    Args:
        kind: the operator's kind, a key of ``triton.samples.SAMPLES``.
        device: ``str(tensor.device)``.
        dtype: the dtype in which the kernel would run.
    """
    key = kind, device, dtype
    if key not in _known:
        if torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "not checked on this GPU before a CUDA graph is recorded, which a check would break"
        with _lock:
            if key not in _known:
                _known[key] = _verdict(kind, torch.device(device), dtype)
    return _known[key]


# torch.compiler.assume_constant_result sets this; calling it would import the compiler and triton
failed_check._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _verdict(kind: str, device: torch.device, dtype: torch.dtype) -> str:
    """Check a kernel; warn and return what is wrong, or return ""."""
    reason = _on_a_thread(kind, device, dtype)
    if reason:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        warnings.warn(
            f"the Triton kernel of {kind} is not used in {dtype} on {name}: {reason}; torch's operations run instead. "
            "RELINEAR_TRITON=force uses it nevertheless, RELINEAR_TRITON=0 none",
            stacklevel=4,
        )
    return reason


def _on_a_thread(kind: str, device: torch.device, dtype: torch.dtype) -> str:
    """Run ``_check`` on a new thread, so that the caller's modes do not apply to it.

    They are its grad mode, autocast, saved-tensor hooks (such as those of checkpointing), dispatch modes and compilers.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_check, kind, device, dtype).result()


def _check(kind: str, device: torch.device, dtype: torch.dtype) -> str:
    """Compare results and gradients with torch's; return what is wrong, or ""."""
    try:
        # imported here by name, as the kernels import this module
        samples = importlib.import_module("relinear.kernels.triton.samples")
        sample = samples.SAMPLES[kind]
        errors = [samples.largest_error(sample, arguments, dtype, device) for arguments in sample.argument_lists]
    except Exception as error:  # any exception: compilers and drivers raise their own
        return f"it fails with {type(error).__name__}: {_first_line(error)}"
    worst = max(errors)
    if worst <= TOLERANCES[dtype]:
        return ""
    return f"its results or gradients are off by {worst:.2g} (relative; {TOLERANCES[dtype]:g} is allowed)"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:200]
