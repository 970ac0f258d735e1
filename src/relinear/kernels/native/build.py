"""Build the C++ kernels at their first use, one compiler process per file, and cache them on disk."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from relinear.kernels.implementations import environment_choice
from relinear.system.files import fingerprint
from relinear.system.lock import exclusive
from relinear.system.machine import cpu_features
from relinear.system.private_cache import check_private, private_folder, user_cache

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
#: Apple's compiler has no OpenMP; without it the kernels run on one thread
OPENMP = [] if sys.platform == "darwin" else ["-fopenmp"]
NATIVE = "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"
FLAGS = ["-std=c++17", "-O3", "-fPIC", NATIVE, "-fno-math-errno", "-fno-trapping-math", *OPENMP]

#: seconds to wait for another process that builds the kernels
LOCK_TIMEOUT = 120.0

#: value of RELINEAR_COMPILE_KERNELS -> whether kernels are built
COMPILE_CHOICES = {"1": True, "on": True, "": True, "0": False, "off": False}


@functools.cache
def compiler() -> str:
    """Return the path of the C++ compiler for kernels: CXX's, g++ or clang++; "" if there is none or it is disabled.

    Raises:
        ValueError: RELINEAR_COMPILE_KERNELS is none of ``COMPILE_CHOICES``.
    """
    value = os.environ.get("RELINEAR_COMPILE_KERNELS", "").lower()
    compiles = environment_choice("RELINEAR_COMPILE_KERNELS", value, COMPILE_CHOICES) and os.name == "posix"
    names = (os.environ.get("CXX", "g++"), "g++", "clang++") if compiles else ()
    return next(filter(None, map(shutil.which, names)), "")


def is_built() -> bool:
    """Return whether kernels need no build: they are loaded, or were on disk when this was first called."""
    return library.cache_info().currsize > 0 or _was_built()


@functools.cache
def _was_built() -> bool:
    try:
        return _cached_library(library_path()) is not None
    except OSError:
        return False


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the kernels; the first call builds them if they are not on disk. None, with a warning, if that fails."""
    try:
        path = library_path()
        path = private_folder(path.parent) / path.name  # private, as code loaded from there runs as this user
        return ctypes.CDLL(str(_cached_library(path) or _build(path)))
    except (RuntimeError, OSError, ValueError) as error:
        elsewhere = "set TORCH_EXTENSIONS_DIR to a folder of your own, or "
        warnings.warn(
            f"the C++ kernels could not be built or loaded, and torch's operations run instead, which are slower: "
            f"{error}; {elsewhere if isinstance(error, PermissionError) else ''}set RELINEAR_COMPILE_KERNELS=0 to skip "
            "the attempt",
            stacklevel=2,
        )
        return None


def missing(may_build: bool) -> str:
    """Return why the kernels cannot be called, or must not be built for this call; "" if they can be."""
    if not compiler():
        return "no C++ compiler, or RELINEAR_COMPILE_KERNELS=0"
    if not (may_build or is_built()):
        return "not worth building the kernels"
    return "" if library() is not None else "the kernels could not be built"


def library_path() -> Path:
    """Return where the compiled kernels are cached; the name hashes sources, flags, torch, compiler and processor.

    On disk the hash of the library itself is appended (``_hashed``).
    """
    cache = os.environ.get("XDG_CACHE_HOME") or user_cache()
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache) / "torch_extensions"
    texts = [path.read_text(encoding="utf-8") for path in (*SOURCES, *HEADERS)]
    depends = [
        *texts,
        *FLAGS,
        torch.__version__,  # the kernels use its OpenMP
        compiler(),
        platform.machine(),
        *(sorted(cpu_features()) or [platform.processor()]),
    ]
    key = hashlib.sha256("\0".join(depends).encode()).hexdigest()[:16]
    return Path(root) / "relinear" / f"kernels-{key}.so"


def _hashed(path: Path, library: Path) -> Path:
    """Return the file name of a library built for ``path``; it has the library's hash, so that damage is noticed."""
    return path.with_stem(f"{path.stem}-{fingerprint(library)['sha256'][:32]}")


def _cached_library(path: Path) -> Path | None:
    """Return an undamaged library built for ``path``, or None. Raises PermissionError if others can write to it."""
    for library in check_private(path.parent).glob(f"{path.stem}-*{path.suffix}"):
        if _hashed(path, check_private(library)).name == library.name:
            return library
    return None


def _build(path: Path) -> Path:
    """Build the kernels for ``path``; one process builds, others wait. Killing it leaves no broken library."""
    with exclusive(path.parent, LOCK_TIMEOUT), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        cached = _cached_library(path)
        if cached is not None:
            return cached
        built = Path(folder) / "kernels.so"
        objects = [Path(folder) / f"{source.stem}.o" for source in SOURCES]
        commands = [[compiler(), *FLAGS, "-c", *pair] for pair in zip(SOURCES, ["-o"] * len(objects), objects)]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(_run, commands))
        _run([compiler(), "-shared", *objects, *_openmp(), "-o", built])
        built.chmod(0o755)
        target = _hashed(path, built)
        os.replace(built, target)
        return target


def _run(command: list[str | Path]) -> None:
    """Run the compiler; raise RuntimeError with its messages if it fails."""
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{command[0]} failed with code {run.returncode}: {run.stderr.strip()[:500]}")


def _openmp() -> list[str | Path]:
    """Return linker arguments: torch's OpenMP library, so that both share threads, or else the compiler's."""
    if not OPENMP:
        return []
    return ["-Wl,--as-needed", *(Path(torch.__file__).parent / "lib").glob("libgomp*"), *OPENMP]
