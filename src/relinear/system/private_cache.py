"""Cache results in folders that no other user can write to; entries are named by their key and checked when opened."""

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from relinear.system.files import os_errors_named, read_json, write_json
from relinear.system.lock import exclusive

#: part of every key; raise it when the meaning of cached files changes
FORMAT = 1
_MANIFEST = "manifest.json"
_BLOCK = 1 << 20
#: blocks of 1 MiB that are read to check a file: the whole file if it has no more, else evenly spread ones
_CHECKED_BLOCKS = 256


# Entries


def cache_folder(setting: Path | None = None) -> Path:
    """Return ``setting``, else ``$RELINEAR_CACHE``, else ``~/.cache/relinear``."""
    return Path(setting or os.environ.get("RELINEAR_CACHE") or user_cache() / "relinear").expanduser()


def digest(value: Any) -> str:
    """Return a hash of a JSON value, which names its cache entry."""
    return hashlib.blake2b(json.dumps([FORMAT, value], sort_keys=True).encode(), digest_size=16).hexdigest()


def checksum(path: Path) -> int:
    """Return a checksum of a file; for a large file, of sampled blocks."""
    blocks = max(1, -(-path.stat().st_size // _BLOCK))
    chosen = range(blocks) if blocks <= _CHECKED_BLOCKS else np.linspace(0, blocks - 1, _CHECKED_BLOCKS).astype(int)
    value = 0
    with path.open("rb") as file:
        for block in chosen:
            file.seek(int(block) * _BLOCK)
            value = zlib.crc32(file.read(_BLOCK), value)
    return value


def _read_entry(folder: Path) -> dict[str, Any] | None:
    """Return what ``build`` returned; None if the entry is absent or one of its files was changed."""
    try:
        manifest = read_json(folder / _MANIFEST)
        for name, (size, expected) in manifest["files"].items():
            if (folder / name).stat().st_size != size or checksum(folder / name) != expected:
                return None
        return dict(manifest["value"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def cached(root: Path, kind: str, key: Any, build: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """Return the folder of an entry and what ``build`` returned for it; build the entry if it is absent or damaged.

    Processes that need the same entry wait for the one that builds it. An entry appears complete or not at all.
    Nothing is read that another user could have put there (``check_all_private``).

    Args:
        root: the cache.
        kind: subfolder of the cache.
        key: JSON value that determines the content.
        build: writes the content into the folder that it gets, and returns JSON values to store with it.

    Raises:
        OSError: if the cache cannot be written, or if other users can write to it; the message says how to choose
            another one.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = check_all_private(root / kind / digest(key))
            if (value := _read_entry(folder)) is not None:
                return folder, value
            private_folder(folder.parent)
            stack.enter_context(exclusive(folder.with_suffix(".building"), math.inf))
        except OSError as error:
            raise _unusable(root, error) from error
        if (value := _read_entry(folder)) is None:
            with os_errors_named(folder):
                value = _build_entry(folder, key, build)
    return folder, value


def usable_folder(root: Path, *names: str) -> Path:
    """Return the folder ``names`` of the cache, created if missing. Raises OSError, as ``cached`` does."""
    try:
        return private_folder(root.joinpath(*names))
    except OSError as error:
        raise _unusable(root, error) from error


def _unusable(root: Path, error: OSError) -> OSError:
    problem = f"the cache {root} cannot be used ({error.filename or root}: {error.strerror or error})"
    return OSError(f"{problem}; set cache_dir or RELINEAR_CACHE to a folder of your own")


def _build_entry(folder: Path, key: Any, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        value = build(temporary)
        files = {
            str(path.relative_to(temporary)): (path.stat().st_size, checksum(path))
            for path in sorted(temporary.rglob("*"))
            if path.is_file()
        }
        write_json(temporary / _MANIFEST, {"key": key, "files": files, "value": value})
        make_private(temporary)
        shutil.rmtree(folder, ignore_errors=True)  # an earlier entry, which is damaged
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return value


# Owners


def check_private(path: str | Path) -> Path:
    """Return ``path`` with links resolved, after checking that no other user can write there; changes nothing.

    It and all folders above it must belong to this user or to root, and no other user may write to them. Folders above
    it may have the sticky bit instead, as /tmp has. Paths that do not exist pass, and so do systems without owners.

    Raises:
        PermissionError: if a part belongs to another user or others can write to it; the message names it.
    """
    path = Path(path).absolute()
    real = Path(os.path.realpath(path))  # raises no error for links in a circle
    if hasattr(os, "geteuid"):
        for part in dict.fromkeys([real, path, *real.parents, *path.parents]):
            try:
                _check_owner(part, part.lstat(), above=part not in (real, path))
            except FileNotFoundError:
                continue
    return real


def check_all_private(folder: str | Path) -> Path:
    """Run ``check_private`` on ``folder`` and its whole content, as others may have been able to write to it before."""
    folder = check_private(folder)
    for part in folder.rglob("*"):
        check_private(part)
    return folder


def private_folder(folder: str | Path) -> Path:
    """Return ``folder``, created if missing, if it passes ``check_private``; raise PermissionError otherwise."""
    folder = check_private(folder)
    for missing in reversed([part for part in (folder, *folder.parents) if not part.exists()]):
        missing.mkdir(mode=0o755, exist_ok=True)
    return check_private(folder)


def make_private(folder: Path) -> None:
    """Remove write permission for other users from ``folder`` and its content, as ``check_all_private`` requires."""
    for part in (folder, *folder.rglob("*")):
        part.chmod(0o755 if part.is_dir() else 0o644)


def user_cache() -> Path:
    """Return ``~/.cache``. Raises FileNotFoundError for a user without a home, as in containers."""
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        advice = "this user has no home directory; set HOME, or RELINEAR_CACHE and XDG_CACHE_HOME"
        raise FileNotFoundError(errno.ENOENT, advice, "~/.cache") from None


def _check_owner(path: Path, state: os.stat_result, above: bool) -> None:
    if state.st_uid not in (os.geteuid(), 0):
        reason = f"it belongs to another user (number {state.st_uid}), who could have put anything there"
        raise PermissionError(errno.EACCES, reason, str(path))
    writable = state.st_mode & stat.S_IWOTH or (state.st_mode & stat.S_IWGRP and not _is_private(state.st_gid))
    if writable and not stat.S_ISLNK(state.st_mode) and not (above and state.st_mode & stat.S_ISVTX):
        reason = "other users may write there, and could have put anything there; empty it, then chmod go-w"
        raise PermissionError(errno.EACCES, reason, str(path))


def _is_private(group: int) -> bool:
    """Return whether this user is the only member of a group, as on systems that give every user a group."""
    import grp
    import pwd

    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}
