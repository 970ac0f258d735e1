"""The cache of prepared data: folders named by what is in them, built once, checked when opened."""

import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from relinear.system.files import os_errors_named, read_json, write_json
from relinear.system.private_cache import check_all_private, make_private, private_folder, user_cache

#: part of every key: raise it when the meaning of cached files changes
FORMAT = 1
_MANIFEST = "manifest.json"
_BLOCK = 1 << 20
#: blocks of a file that are read to check it: all of a file up to this many MiB, evenly spread ones of a larger file
_CHECKED_BLOCKS = 256


def cache_folder(setting: Path | None = None) -> Path:
    """Return ``setting``, else ``$RELINEAR_CACHE``, else ``~/.cache/relinear``."""
    return Path(setting or os.environ.get("RELINEAR_CACHE") or user_cache() / "relinear").expanduser()


def digest(value: Any) -> str:
    """Return a short name for a JSON value, different for every value."""
    return hashlib.blake2b(json.dumps([FORMAT, value], sort_keys=True).encode(), digest_size=16).hexdigest()


def checksum(path: Path) -> int:
    """Return a checksum of a file; of a large one, of sampled blocks."""
    blocks = max(1, -(-path.stat().st_size // _BLOCK))
    chosen = range(blocks) if blocks <= _CHECKED_BLOCKS else np.linspace(0, blocks - 1, _CHECKED_BLOCKS).astype(int)
    value = 0
    with path.open("rb") as file:
        for block in chosen:
            file.seek(int(block) * _BLOCK)
            value = zlib.crc32(file.read(_BLOCK), value)
    return value


def _read(folder: Path) -> dict[str, Any] | None:
    """Return what ``build`` returned, or None if the entry is absent or any of its files is not what was written."""
    try:
        manifest = read_json(folder / _MANIFEST)
        for name, (size, sha256) in manifest["files"].items():
            if (folder / name).stat().st_size != size or checksum(folder / name) != sha256:
                return None
        return dict(manifest["value"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def cached(root: Path, kind: str, key: Any, build: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """Return the folder of an entry and what was noted about it, building it first if it is absent or damaged.

    Processes that want the same entry at once wait for the one that builds it. An entry appears whole or not at all.
    Nothing is read that another user could have put there (``check_all_private``).

    Args:
        root: the cache.
        kind: subfolder of the cache.
        key: JSON value that decides everything about the content.
        build: fills the folder it is given and returns JSON values to note.

    Raises:
        OSError: if the cache cannot be written, or not only by this user, with a message that says how to choose
            another one.
    """
    from filelock import FileLock

    try:
        folder = check_all_private(root / kind / digest(key))
        if (value := _read(folder)) is not None:
            return folder, value
        private_folder(folder.parent)
        lock = FileLock(folder.with_suffix(".lock"))
        lock.acquire()
    except OSError as error:
        raise _unusable(root, error) from error
    try:
        if (value := _read(folder)) is None:
            with os_errors_named(folder):
                value = _build(folder, key, build)
    finally:
        lock.release()
    return folder, value


def usable_folder(root: Path, *names: str) -> Path:
    """Return the folder ``names`` of the cache, made if need be. Raises OSError, as ``cached`` does."""
    try:
        return private_folder(root.joinpath(*names))
    except OSError as error:
        raise _unusable(root, error) from error


def _unusable(root: Path, error: OSError) -> OSError:
    problem = f"the cache {root} cannot be used ({error.filename or root}: {error.strerror or error})"
    return OSError(f"{problem}; set cache_dir or RELINEAR_CACHE to a folder of your own")


def _build(folder: Path, key: Any, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
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
        shutil.rmtree(folder, ignore_errors=True)  # what is there was found damaged
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return value


def write_tokens(path: Path, arrays: Iterable[np.ndarray], dtype: Any) -> int:
    """Write the arrays end to end as one .npy file without holding them all; returns the number of tokens."""
    count = 0
    with path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": (0,)}
        np.lib.format.write_array_header_1_0(file, header)
        start = file.tell()
        for array in arrays:
            file.write(array.astype(dtype, copy=False).tobytes())
            count += array.size
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, header | {"shape": (count,)})
        # numpy pads the header for a growing first dimension, so the final one has the first one's length.
        assert file.tell() == start
    return count
