"""Lock a directory for one process with an operating-system lock, which ends when the process does."""

import contextlib
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOCK = ".relinear.lock"
#: seconds to wait for a lock, as the processes of a run that was just killed take a moment to end
_PATIENCE = 3.0


class InUseError(ValueError):
    """Raised if another process uses the directory."""


@contextlib.contextmanager
def exclusive(directory: str | Path, patience: float | None = None) -> Iterator[Path]:
    """Lock ``directory`` within the block, and create it if it is missing; raise if another process has the lock.

    The system releases the lock (``flock`` on ``.relinear.lock``) however its process ends. The file is removed
    afterwards, and so are the folders created for it if they are empty. Without ``flock`` (by the system or the file
    system) nothing is locked.

    Args:
        directory: to lock.
        patience: seconds to wait for another process; by default as long as one that was just killed may take to end.

    Raises:
        InUseError: (a ValueError) if another process has the lock.
        OSError: if the directory cannot be created or written to.
    """
    real = Path(os.path.realpath(directory))  # the target of a dangling link is created
    directory = Path(directory)
    try:
        import fcntl
    except ImportError:
        real.mkdir(parents=True, exist_ok=True)
        yield directory
        return
    created = [folder for folder in (real, *real.parents) if not folder.exists()]
    path = directory / LOCK
    handle = _locked_handle(path, fcntl, _PATIENCE if patience is None else patience)
    try:
        with contextlib.suppress(OSError):  # the text only informs: on a full disk the lock works without it
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
        yield directory
    finally:
        with contextlib.suppress(OSError):  # if the file cannot be removed, it is unlocked all the same
            path.unlink()  # before the lock is released: see _is_still_at
        os.close(handle)
        for folder in created:
            with contextlib.suppress(OSError):  # not empty: another process uses it
                folder.rmdir()


def _locked_handle(path: Path, fcntl: Any, patience: float) -> int:
    """Return a locked handle of the file that other processes see at ``path``."""
    deadline = time.monotonic() + patience
    while True:
        try:
            Path(os.path.realpath(path.parent)).mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # the last holder has just removed the folder; in /proc it cannot be created
            if time.monotonic() > deadline + 1:
                raise
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still_at(handle, path):
                return handle
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = os.read(handle, 200).decode("utf-8", "replace").strip() or "another process"
                os.close(handle)
                raise InUseError(
                    f"another process is at work in {path.parent} ({holder}); wait for it, or choose another directory"
                ) from None
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return handle
        os.close(handle)


def _is_still_at(handle: int, path: Path) -> bool:
    """Return whether the open file is still at ``path``; its last holder removes it, and another may recreate it."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False
