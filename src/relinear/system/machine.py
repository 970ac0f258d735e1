"""Describe the machine (processor, bf16 units, versions) and control or measure threads, ranks and peak memory."""

import contextlib
import datetime
import functools
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from relinear.system.version import __version__


def available_cores() -> int:
    """Return how many cores this process may use; a scheduler or ``taskset`` may allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_first_rank() -> bool:
    """Return whether this process writes files and messages: it is the only one, or the first rank of several.

    Raises:
        ValueError: for a RANK without WORLD_SIZE, as the process would train alone and write nothing.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0" and "WORLD_SIZE" not in os.environ:
        raise ValueError(f"RANK={rank} is set without WORLD_SIZE; start by torchrun or accelerate launch, or unset it")
    return rank == "0"


@contextlib.contextmanager
def on_threads(count: int | None) -> Iterator[None]:
    """Compute on ``count`` CPU threads within the block, and restore the number afterwards; None changes nothing."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def _cpu_facts() -> dict[str, str]:
    """Return what Linux reports about the first processor, by name; empty on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.strip().partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def cpu_features() -> frozenset[str]:
    """Return the processor's instruction sets by their Linux names (``avx2``, ``amx_bf16``); empty on other systems."""
    facts = _cpu_facts()
    return frozenset((facts.get("flags") or facts.get("Features") or "").split())


@functools.cache
def has_narrow_products() -> bool:
    """Return whether torch's float32 products use half of the vectors: MKL's, on an AMD processor with AVX-512.

    MKL takes AVX2 on processors that are not Intel's; oneDNN takes what there is.
    """
    is_wide_amd = _cpu_facts().get("vendor_id") == "AuthenticAMD" and "avx512f" in cpu_features()
    return is_wide_amd and torch.backends.mkl.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@functools.cache
def fast_bfloat16(device: torch.device | str = "cpu") -> bool:
    """Return whether ``device`` multiplies bfloat16 matrices in hardware (AMX or AVX-512 on a CPU)."""
    device_type = torch.device(device).type
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type == "cpu":
        return bool(cpu_features() & {"amx_bf16", "avx512_bf16"}) or platform.machine() == "arm64"
    return False


def tiled(dtype: torch.dtype) -> bool:
    """Return whether the CPU multiplies matrices of this dtype in AMX tiles, which is several times as fast."""
    return dtype in (torch.bfloat16, torch.float16) and "amx_bf16" in cpu_features()


def command_line() -> str:
    """Return the command line that started this process; for a worker, that of its parent."""
    arguments = sys.argv[1:] if sys.argv[:1] == ["-c"] else sys.argv  # a worker has -c before its parent's arguments
    return shlex.join([Path(arguments[0]).name, *arguments[1:]]) if arguments else ""


def provenance() -> dict[str, Any]:
    """Return the provenance of a result: the command, today's date (UTC) and the machine."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"command": command_line(), "date": date, "machine": describe_machine()}


def describe_machine() -> dict[str, Any]:
    """Return processor, memory, threads and versions as JSON values."""
    import psutil
    import transformers

    extensions = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    onednn_limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    return {
        "processor": _cpu_facts().get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "extensions": [flag for flag in extensions if flag in cpu_features()],
        # it limits the instruction sets of torch's products
        **({"onednn_max_cpu_isa": onednn_limit} if onednn_limit else {}),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # torch's subclass of str, which YAML cannot write
        "transformers": transformers.__version__,
        "relinear": __version__,
        **({"commit": commit} if (commit := _commit()) else {}),
    }


@functools.cache
def _commit() -> str:
    """Return the commit of the checkout that this code runs from, with "-dirty" if files differ; else an empty text."""
    root = Path(__file__).parents[3]
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    if not (root / ".git").exists():  # an installed package may be inside its user's repository
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    return ""


class PeakMemory:
    """Measure peak memory in bytes since ``reset()``: of the device if it is a GPU, else of the process.

    On Linux ``reset`` resets the kernel's high-water mark; elsewhere the peak is that of the process's whole life.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def reset(self) -> None:
        """Start a new measurement."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return  # not Linux, or no permission: the peak is then that of the process's whole life

    def read(self) -> int:
        """Return the peak in bytes."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        try:
            lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        except (OSError, StopIteration):
            import resource

            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else peak * 1024
