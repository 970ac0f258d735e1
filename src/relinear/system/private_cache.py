"""Read only files and folders from a cache that no other user can have put there."""

import contextlib
import errno
import os
import stat
from pathlib import Path


def check_private(path: str | Path) -> Path:
    """Return ``path`` without links, once it is known to be this user's alone; changes nothing.

    It and all folders above it must belong to this user or to root, and no other user may write to them; above it,
    folders with the sticky bit, such as /tmp, will do. What does not exist, and systems without owners, pass.

    Raises:
        PermissionError: that names what is another user's, or open to others, and why.
    """
    path = Path(path).absolute()
    real = Path(os.path.realpath(path))  # which passes over links in a circle
    if hasattr(os, "geteuid"):
        for part in dict.fromkeys([real, path, *real.parents, *path.parents]):
            try:
                _check(part, part.lstat(), above=part not in (real, path))
            except FileNotFoundError:
                continue
    return real


def check_all_private(folder: str | Path) -> Path:
    """Run ``check_private`` on ``folder`` and all in it, as it may have been open to others before."""
    folder = check_private(folder)
    for part in folder.rglob("*"):
        check_private(part)
    return folder


def private_folder(folder: str | Path) -> Path:
    """Return ``folder``, made if need be, once ``check_private`` has passed it; raise PermissionError otherwise."""
    folder = check_private(folder)
    for missing in reversed([part for part in (folder, *folder.parents) if not part.exists()]):
        missing.mkdir(mode=0o755, exist_ok=True)
    return check_private(folder)


def make_private(folder: Path) -> None:
    """Remove write permission for other users from ``folder`` and its content, as ``check_all_private`` asks."""
    for part in (folder, *folder.rglob("*")):
        part.chmod(0o755 if part.is_dir() else 0o644)


def user_cache() -> Path:
    """Return ``~/.cache``. Raises FileNotFoundError for a user without a home, as in containers."""
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        advice = "this user has no home directory; set HOME, or RELINEAR_CACHE and XDG_CACHE_HOME"
        raise FileNotFoundError(errno.ENOENT, advice, "~/.cache") from None


def user_name(number: int) -> str:
    """Return the name of a user, or else the number."""
    with contextlib.suppress(ImportError, KeyError):
        import pwd

        return pwd.getpwuid(number).pw_name
    return f"number {number}"


def _check(path: Path, state: os.stat_result, above: bool) -> None:
    if state.st_uid not in (os.geteuid(), 0):
        reason = f"it belongs to another user ({user_name(state.st_uid)}), who could have put anything there"
        raise PermissionError(errno.EACCES, reason, str(path))
    writable = state.st_mode & stat.S_IWOTH or (state.st_mode & stat.S_IWGRP and not _is_private(state.st_gid))
    if writable and not stat.S_ISLNK(state.st_mode) and not (above and state.st_mode & stat.S_ISVTX):
        reason = "other users may write there, and could have put anything there; empty it, then chmod go-w"
        raise PermissionError(errno.EACCES, reason, str(path))


def _is_private(group: int) -> bool:
    """Return whether this user is a group's only member, as where every user has a group."""
    import grp
    import pwd

    try:
        me, known = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == me.pw_gid and known.gr_name == me.pw_name and set(known.gr_mem) <= {me.pw_name}
