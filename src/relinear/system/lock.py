"""Lock a directory for one process, by an operating system lock that a killed process releases."""

import contextlib
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOCK = ".relinear.lock"
#: seconds to wait for a lock: the processes of a run that was just killed take a moment to end
_PATIENCE = 3.0


class InUseError(ValueError):
    """Another process uses the directory."""


@contextlib.contextmanager
def exclusive(directory: str | Path, patience: float | None = None) -> Iterator[Path]:
    """Lock ``directory``, created if missing, within the block; raises if another process holds it.

    The lock (``flock`` on ``.relinear.lock``) ends with its holder however it ends. The file is removed
    again, and so are the folders made for it if nothing else has come into them. Where the system or the file system
    has no ``flock``, nothing is held.

    Args:
        directory: which.
        patience: seconds that another process is waited for; by default as long as one that was just killed may take.

    Raises:
        InUseError: (a ValueError) if another process holds the directory.
        OSError: if it cannot be made or written.
    """
    directory, real = Path(directory), Path(os.path.realpath(directory))  # a link that dangles becomes a folder there
    try:
        import fcntl
    except ImportError:
        real.mkdir(parents=True, exist_ok=True)
        yield directory
        return
    made = [folder for folder in (real, *real.parents) if not folder.exists()]
    path = directory / LOCK
    handle = _acquired(path, fcntl, _PATIENCE if patience is None else patience)
    try:
        with contextlib.suppress(OSError):  # who it is helps a reader; on a full disk the lock holds without it
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
        yield directory
    finally:
        with contextlib.suppress(OSError):  # a file that stays is no longer locked
            path.unlink()  # while it is still held: see _is_at
        os.close(handle)
        for folder in made:
            with contextlib.suppress(OSError):  # not empty: it is in use
                folder.rmdir()


def _acquired(path: Path, fcntl: Any, patience: float) -> int:
    """Return a handle of ``path`` that is locked, and is the file that others see there."""
    deadline = time.monotonic() + patience
    while True:
        try:
            Path(os.path.realpath(path.parent)).mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # its last holder has just removed the folder; in /proc it never comes
            if time.monotonic() > deadline + 1:
                raise
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(handle, path):
                return handle
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = os.read(handle, 200).decode("utf-8", "replace").strip() or "another process"
                os.close(handle)
                raise InUseError(
                    f"another process is at work in {path.parent} ({holder}); wait for it, or give another directory"
                ) from None
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return handle
        os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    """Return whether the open file is still at ``path``: its last holder removes it, another may recreate it."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False
