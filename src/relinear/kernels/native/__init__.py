"""Kernels in C++ for CPUs, compiled by torch's extension loader at their first use and kept on disk.

Where no C++ compiler is found, or building fails (one warning), or ``RELINEAR_COMPILE_KERNELS=0`` is in the environment
when they are first wanted, callers take their torch form.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relinear.system.machine import cpu_features

__all__ = ["MAX_RANK", "MIN_ENTRIES", "has_compiler", "is_plain", "kernels", "runs_native"]

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADER = Path(__file__).with_name("vectors.h")
#: Apple's compiler has no OpenMP of its own, without which torch's headers run the kernels on one thread
OPENMP = [] if sys.platform == "darwin" else ["-fopenmp"]
NATIVE = "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"
FLAGS = ["-O3", NATIVE, "-fno-math-errno", "-fno-trapping-math", *OPENMP]
#: entries from which the kernels are used: below, an eager chain takes less time than a thread's start saves
MIN_ENTRIES = 1 << 17
#: the largest rank of gates that ``modulate`` takes
MAX_RANK = 16


@functools.cache
def has_compiler() -> bool:
    """Whether compiled kernels are wanted and there is a C++ compiler for them: that of CXX, or g++, or clang++."""
    wanted = os.environ.get("RELINEAR_COMPILE_KERNELS", "1") != "0" and os.name == "posix"
    return wanted and any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))


def is_plain(x: Tensor) -> bool:
    """Whether x is a tensor on a CPU, outside of tracing, fake tensors and dispatch modes."""
    return (
        x.device.type == "cpu"
        and type(x) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
    )


def runs_native(x: Tensor, entries: int | None = None, build: bool = True) -> bool:
    """Whether the kernels take tensors like x: plain ones in float32 or bfloat16, where they can be built.

    Args:
        x: any tensor.
        entries: fewest entries of x; ``MIN_ENTRIES`` by default.
        build: also where the kernels are not there yet.
    """
    return (
        x.numel() >= (MIN_ENTRIES if entries is None else entries)
        and x.dtype in (torch.float32, torch.bfloat16)
        and is_plain(x)
        and has_compiler()
        and (build or _is_loaded.cache_info().currsize > 0 or _was_built())
        and _is_loaded()
    )


def kernels() -> Any:
    """The kernels, as ``torch.ops`` (their C++ source says what each does); only where ``runs_native``."""
    return torch.ops.relinear_cpu


@functools.cache
def _was_built() -> bool:
    """Whether there were kernels on disk when this was first asked."""
    return _library_path().exists()


@functools.cache
def _is_loaded() -> bool:
    try:
        path = _library_path()
        if path.exists():
            torch.ops.load_library(path)
        else:
            _build(path)
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"the C++ kernels could not be built and torch's operations run instead, which are slower: {error}; "
            "set RELINEAR_COMPILE_KERNELS=0 to skip the attempt",
            stacklevel=2,
        )
        return False
    return True


def _library_path() -> Path:
    """Where the compiled kernels are kept: a name for what they depend on, this processor included."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache) / "torch_extensions"
    texts = [path.read_text(encoding="utf-8") for path in (*SOURCES, HEADER)]
    depends = [
        *texts,
        *FLAGS,
        torch.__version__,
        platform.machine(),
        *(sorted(cpu_features()) or [platform.processor()]),
    ]
    key = hashlib.sha256("\0".join(depends).encode()).hexdigest()[:16]
    return Path(root) / "relinear" / f"kernels-{key}.so"


def _build(path: Path) -> None:
    """Build and load the kernels. Any number of processes may do so at once, and be killed meanwhile."""
    from torch.utils.cpp_extension import load

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, _ninja_on_path():
        load(
            "relinear_kernels",
            [str(path) for path in SOURCES],
            extra_cflags=FLAGS,
            extra_ldflags=OPENMP,
            build_directory=folder,
            is_python_module=False,
        )
        os.replace(Path(folder) / "relinear_kernels.so", path)


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """torch looks for ninja on the path, where that of an environment that is not activated is missing."""
    before = os.environ.get("PATH", "")
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is not None:
        import ninja

        os.environ["PATH"] = os.pathsep.join([before, ninja.BIN_DIR])
    try:
        yield
    finally:
        os.environ["PATH"] = before
