"""What the machine can do and what a run used of it: bf16 units, threads, peak memory, versions."""

import contextlib
import datetime
import functools
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from relinear.system import processor
from relinear.system.version import __version__


def is_first_rank() -> bool:
    """Return whether this is the process that writes and tells: the only one, or the first rank of several."""
    return int(os.environ.get("RANK", "0")) == 0


@contextlib.contextmanager
def on_threads(count: int | None) -> Iterator[None]:
    """Within the block torch computes on ``count`` CPU threads, then on as many as before; None changes nothing."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def has_narrow_products() -> bool:
    """Whether torch's float32 products use half of the processor's vectors: MKL's on an AMD processor with AVX-512.

    MKL takes AVX2 on processors of others than Intel, whatever they have.
    """
    others = processor.cpu_facts().get("vendor_id") == "AuthenticAMD"
    return others and "avx512f" in processor.cpu_features() and torch.backends.mkl.is_available()


@functools.cache
def fast_bfloat16(device: torch.device | str = "cpu") -> bool:
    """Whether ``device`` multiplies bfloat16 matrices in hardware, not by emulation."""
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return kind == "cpu" and processor.multiplies_bfloat16()


def command_line() -> str:
    """Return the command that this process was started by, as it is typed; of a worker that of whoever started it."""
    typed = sys.argv[1:] if sys.argv[:1] == ["-c"] else sys.argv  # behind -c stands what a worker is told
    return shlex.join([Path(typed[0]).name, *typed[1:]]) if typed else ""


def circumstances() -> dict[str, Any]:
    """Return what is recorded beside every result: the command, today's date (UTC) and the machine."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"command": command_line(), "date": date, "machine": describe_machine()}


def describe_machine() -> dict[str, Any]:
    """Processor, memory, threads and versions as JSON values: what a figure needs beside it."""
    import transformers

    held = os.environ.get("ONEDNN_MAX_CPU_ISA")
    return {
        **processor.describe_processor(),
        "threads": torch.get_num_threads(),
        **({"onednn_max_cpu_isa": held} if held else {}),  # what torch's products were kept from using
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a str of its own class, which YAML does not write
        "transformers": transformers.__version__,
        "relinear": __version__,
    }


class PeakMemory:
    """The most memory in use since ``start()``, in bytes: of the GPU where there is one, else of the process.

    On Linux the kernel's high-water mark is reset at the start; elsewhere the mark of the whole process is reported.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def start(self) -> None:
        """Reset the mark."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return  # not Linux, or not allowed to: the mark then covers the process from its beginning

    def read(self) -> int:
        """Return the mark."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        try:
            lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        except (OSError, StopIteration):
            import resource

            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else peak * 1024
