"""Tune glibc's allocator: keep freed large buffers for reuse, or return all free memory to the system."""

import ctypes
import functools
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = 2**31 - 1  # mallopt takes a C int


@functools.cache
def tune_allocator() -> dict[str, int]:
    """Raise glibc's mmap and trim thresholds, so that freed activations are reused and not paged in again.

    By default glibc maps every buffer above 128 KiB (up to 32 MiB, once it has adapted) afresh from the system and
    unmaps it when it is freed. Each operation of a large model then pays for page faults, which can cost more than the
    arithmetic. In exchange, memory that was used once stays with the process. relinear's commands call this when they
    begin; ``import relinear`` does not. Calling it again changes nothing.

    Returns:
        The thresholds now in force in bytes, by name (for the record of a run); empty if the C library is not
        glibc or did not accept them.

    Examples:
        >>> isinstance(relinear.system.allocator.tune_allocator(), dict)  # before the first tensor
        True
    """
    libc = _glibc()
    if libc is None:
        return {}
    libc.mallopt.argtypes, libc.mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    thresholds = {"mmap_threshold": _M_MMAP_THRESHOLD, "trim_threshold": _M_TRIM_THRESHOLD}
    return {name: _LARGEST for name, option in thresholds.items() if libc.mallopt(option, _LARGEST) == 1}


def release_freed_memory() -> None:
    """Return free memory between blocks in use to the system, for work in stages that need buffers of other sizes.

    Does nothing if the C library is not glibc.
    """
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim.argtypes = (ctypes.c_size_t,)
        libc.malloc_trim(0)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
