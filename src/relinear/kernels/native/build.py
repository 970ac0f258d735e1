"""Builds the C++ kernels with torch's extension loader at their first use, and keeps them on disk."""

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

import torch

from relinear.kernels.implementations import meant
from relinear.system.files import fingerprint
from relinear.system.machine import cpu_features
from relinear.system.private_cache import check_private, private_folder, user_cache

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
#: Apple's compiler has no OpenMP of its own, without which torch's headers run the kernels on one thread
OPENMP = [] if sys.platform == "darwin" else ["-fopenmp"]
NATIVE = "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"
FLAGS = ["-O3", NATIVE, "-fno-math-errno", "-fno-trapping-math", *OPENMP]

#: values of RELINEAR_COMPILE_KERNELS, and whether kernels are built then
WANTED = {"1": True, "on": True, "": True, "0": False, "off": False}


@functools.cache
def compiler() -> str:
    """Return the path of the C++ compiler for kernels: CXX's, g++ or clang++; "" where none is wanted or there.

    Raises:
        ValueError: RELINEAR_COMPILE_KERNELS is none of ``WANTED``.
    """
    asked = os.environ.get("RELINEAR_COMPILE_KERNELS", "").lower()
    wanted = meant("RELINEAR_COMPILE_KERNELS", asked, WANTED) and os.name == "posix"
    names = (os.environ.get("CXX", "g++"), "g++", "clang++") if wanted else ()
    return next(filter(None, map(shutil.which, names)), "")


def is_built() -> bool:
    """Whether no build has to be waited for: kernels were asked for before, or were on disk when this first was."""
    return is_loaded.cache_info().currsize > 0 or _was_built()


@functools.cache
def _was_built() -> bool:
    try:
        return _cached_library(library_path()) is not None
    except OSError:
        return False


@functools.cache
def is_loaded() -> bool:
    """Return whether the kernels can be called: loaded, and built where they have to be, when this is first asked."""
    try:
        path = library_path()
        path = private_folder(path.parent) / path.name  # what is loaded from there runs as this user
        kept = _cached_library(path)
        if kept is not None:
            torch.ops.load_library(kept)
        else:
            _build(path)
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        elsewhere = "set TORCH_EXTENSIONS_DIR to a folder of your own, or "
        warnings.warn(
            f"the C++ kernels could not be built or loaded, and torch's operations run instead, which are slower: "
            f"{error}; {elsewhere if isinstance(error, PermissionError) else ''}set RELINEAR_COMPILE_KERNELS=0 to skip "
            "the attempt",
            stacklevel=2,
        )
        return False
    return True


def is_loaded_beside(parameter: torch.Tensor) -> bool:
    """``is_loaded`` for a layer with this parameter: nothing is built for what is not on a CPU."""
    return parameter.is_cpu and compiler() != "" and is_loaded()


def missing(may_build: bool) -> str:
    """Say why the kernels cannot be called, or must not be built for this call; "" where they can."""
    if not compiler():
        return "no C++ compiler, or RELINEAR_COMPILE_KERNELS=0"
    if not (may_build or is_built()):
        return "not worth building the kernels"
    return "" if is_loaded() else "the kernels could not be built"


def library_path() -> Path:
    """Return where the compiled kernels are kept: a name for what they depend on, this processor included.

    On disk the hash of the library stands behind it (``_hashed``).
    """
    cache = os.environ.get("XDG_CACHE_HOME") or user_cache()
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache) / "torch_extensions"
    texts = [path.read_text(encoding="utf-8") for path in (*SOURCES, *HEADERS)]
    depends = [
        *texts,
        *FLAGS,
        torch.__version__,
        platform.machine(),
        *(sorted(cpu_features()) or [platform.processor()]),
    ]
    key = hashlib.sha256("\0".join(depends).encode()).hexdigest()[:16]
    return Path(root) / "relinear" / f"kernels-{key}.so"


def _hashed(path: Path, library: Path) -> Path:
    """The name of a library that was built for ``path``: with its own hash, so that a damaged one is seen."""
    return path.with_stem(f"{path.stem}-{fingerprint(library)['sha256'][:32]}")


def _cached_library(path: Path) -> Path | None:
    """A library that was built for ``path`` and is what was built. Raises PermissionError where it need not be."""
    for found in check_private(path.parent).glob(f"{path.stem}-*{path.suffix}"):
        if _hashed(path, check_private(found)).name == found.name:
            return found
    return None


def _build(path: Path) -> None:
    """Build and load the kernels. Any number of processes may do so at once, and be killed meanwhile."""
    from torch.utils.cpp_extension import load

    with tempfile.TemporaryDirectory(dir=path.parent) as folder, _ninja_on_path():
        load(
            "relinear_kernels",
            [str(path) for path in SOURCES],
            extra_cflags=FLAGS,
            extra_ldflags=OPENMP,
            build_directory=folder,
            is_python_module=False,
        )
        built = Path(folder) / "relinear_kernels.so"
        built.chmod(0o755)
        os.replace(built, _hashed(path, built))


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
