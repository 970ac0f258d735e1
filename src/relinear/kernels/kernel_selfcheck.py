"""Check a Triton kernel against torch at its first use on a GPU, before its results are used."""

import importlib
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch

#: largest relative error of results and gradients in the Frobenius norm; some gradients are sums that cancel
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}

_known: dict[tuple[str, str, torch.dtype], str] = {}
_lock = threading.Lock()


def forget() -> None:
    """Forget what this process knows; the next use of a kernel checks it again."""
    _known.clear()


def against_unseen(kind: str, device: str, dtype: torch.dtype) -> str:
    """Against the kernel of an operator on a device where it has not been seen right: "" once it has been.

    The first call checks it, and warns if it is wrong or fails; later ones know the answer. Compilers take it for a
    constant.

    Args:
        kind: of the operator, a key of ``triton.samples.SAMPLES``.
        device: as ``str(tensor.device)``.
        dtype: in which the kernel is going to run.
    """
    key = kind, device, dtype
    if key not in _known:
        if torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "not seen right on this GPU before a CUDA graph is recorded, which a check would break"
        with _lock:
            if key not in _known:
                _known[key] = _verdict(kind, torch.device(device), dtype)
    return _known[key]


# what torch.compiler.assume_constant_result sets: to call it would import the compiler, and triton with it
against_unseen._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _verdict(kind: str, device: torch.device, dtype: torch.dtype) -> str:
    """Nothing, or what is wrong; warns of it."""
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
    """``_check`` where nothing that the caller has set holds: grad modes, autocast, hooks of saved tensors (those of
    checkpointing count), dispatch modes and compilers are all a thread's own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_check, kind, device, dtype).result()


def _check(kind: str, device: torch.device, dtype: torch.dtype) -> str:
    """Compare results and gradients with torch's: "" or what is wrong."""
    try:
        # by name: kernels ask for this module themselves
        samples = importlib.import_module("relinear.kernels.triton.samples")
        sample = samples.SAMPLES[kind]
        errors = [samples.largest_error(sample, arguments, dtype, device) for arguments in sample.given]
    except Exception as error:  # of whatever kind: compilers and drivers raise their own
        return f"it fails with {type(error).__name__}: {_first_line(error)}"
    worst = max(errors)
    if worst <= TOLERANCES[dtype]:
        return ""
    return f"its results or gradients are off by {worst:.2g} (relative; {TOLERANCES[dtype]:g} is allowed)"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:200]
