"""A Triton kernel is used on a GPU once it has been seen to be right there: at its first use it is compared with torch.

Whether it was is kept on disk, for the device, the versions of driver, Triton and torch, and the kernel's source.
"""

import contextlib
import functools
import hashlib
import importlib
import json
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from relinear.system.files import read_json, write_json
from relinear.system.private_cache import check_private, user_cache

#: largest relative error of results and gradients in the Frobenius norm; some gradients are sums that cancel
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}

_known: dict[tuple[str, str, torch.dtype], str] = {}
_lock = threading.Lock()


def check_folder() -> Path:
    """Return where verdicts are kept: ``kernels`` in RELINEAR_CACHE, by default ``~/.cache/relinear``."""
    return Path(os.environ.get("RELINEAR_CACHE") or user_cache() / "relinear") / "kernels"


def forget() -> None:
    """Forget what this process knows; the next use of a kernel reads its verdict, or checks it, again."""
    _known.clear()


def against_unseen(kind: str, device: str, dtype: torch.dtype) -> str:
    """Against the kernel of an operator on a device where it has not been seen right: "" once it has been.

    The first call checks it, and warns if it is wrong or fails; later ones, in later processes too, know the answer.
    Compilers take the answer for a constant.

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
    """Nothing, or what is wrong: read from disk, else found out and written there. Warns of what is wrong."""
    path = check_folder() / _file_name(kind, device, dtype)
    reason = _read(path)
    if reason is None:
        reason, lasting = _on_a_thread(kind, device, dtype)
        if lasting:
            _write(path, {"kind": kind, "dtype": str(dtype), "against": reason, **_environment(device)})
    if reason:
        warnings.warn(
            f"the Triton kernel of {kind} is not used in {dtype} on {_environment(device)['device']}: {reason}; "
            f"torch's operations run instead. RELINEAR_TRITON=force uses it nevertheless, RELINEAR_TRITON=0 none; "
            f"after a repair delete {path}",
            stacklevel=4,
        )
    return reason


def _on_a_thread(kind: str, device: torch.device, dtype: torch.dtype) -> tuple[str, bool]:
    """``_check`` where nothing that the caller has set holds: grad modes, autocast, hooks of saved tensors (those of
    checkpointing count), dispatch modes and compilers are all a thread's own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_check, kind, device, dtype).result()


def _check(kind: str, device: torch.device, dtype: torch.dtype) -> tuple[str, bool]:
    """("" or what is wrong, whether it would be so again)."""
    try:
        # by name: kernels ask for this module themselves
        samples = importlib.import_module("relinear.kernels.triton.samples")
        sample = samples.SAMPLES[kind]
        errors = [samples.largest_error(sample, arguments, dtype, device) for arguments in sample.given]
    except torch.OutOfMemoryError as error:
        return f"no memory to check it: {_first_line(error)}", False
    except Exception as error:  # of whatever kind: compilers and drivers raise their own
        return f"it fails with {type(error).__name__}: {_first_line(error)}", True
    worst = max(errors)
    if worst <= TOLERANCES[dtype]:
        return "", True
    return f"its results or gradients are off by {worst:.2g} (relative; {TOLERANCES[dtype]:g} is allowed)", True


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:200]


@functools.cache
def _driver() -> str:
    """The driver's version: the kernel module's where Linux tells it, and the newest CUDA it knows."""
    try:
        module = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        module = ""
    cuda = getattr(torch._C, "_cuda_getDriverVersion", int)() if torch.cuda.is_available() else 0  # of CUDA builds
    return f"{module} CUDA {cuda}".strip()


@functools.cache
def _sources() -> str:
    """A digest of the kernels and of what checks them."""
    files = [*sorted((Path(__file__).parent / "triton").glob("*.py")), Path(__file__)]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _environment(device: torch.device) -> dict[str, Any]:
    """All that a verdict depends on."""
    import triton

    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "capability": list(torch.cuda.get_device_capability(device)) if on_gpu else [],
        "driver": _driver(),
        "triton": triton.__version__,
        "torch": str(torch.__version__),
        "kernels": _sources(),
    }


def _file_name(kind: str, device: torch.device, dtype: torch.dtype) -> str:
    digest = hashlib.sha256(json.dumps(_environment(device), sort_keys=True).encode()).hexdigest()[:16]
    return f"{kind}-{str(dtype).removeprefix('torch.')}-{digest}.json"


def _read(path: Path) -> str | None:
    """The verdict on disk; None if there is none, or a file that is something else."""
    try:
        reason = read_json(check_private(path))["against"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return reason if isinstance(reason, str) else None


def _write(path: Path, verdict: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a folder that cannot be written to: the next process checks again
        write_json(path, verdict)
