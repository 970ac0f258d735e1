"""Atomic writes: a reader, or a run that is started again, sees the whole file or the one before it. Checked reads."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "atomic_directory",
    "atomic_path",
    "check_manifest",
    "fingerprint",
    "parse_json",
    "read_json",
    "sync_files",
    "write_json",
    "write_manifest",
    "write_text",
    "writing",
]

MANIFEST = "manifest.json"
#: what libraries say whose own file writers fail, in place of an OSError
_UNWRITTEN = ("PytorchStreamWriter", "inline_container", "I/O error", "No space left", "File too large", "disk is full")


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp makes private files; these are as readable as any other
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """A temporary directory beside ``path`` that takes its place when the block ends without an error.

    An existing ``path`` is replaced once the new one is complete. Raises NotADirectoryError if it is a file.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; choose a directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield temporary
        sync_files(temporary)
        temporary.chmod(0o755)
        if not path.exists():
            temporary.replace(path)
        elif not _exchange(temporary, path):
            old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
            path.replace(old / "old")
            temporary.replace(path)
            shutil.rmtree(old)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync_files(directory: Path) -> None:
    """Have every file in ``directory`` on the disk: renaming is only all-or-nothing for data that has reached it."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _exchange(one: Path, other: Path) -> bool:
    """Let two directories take each other's names at once; False where the system cannot (it is Linux that can).

    By two renames there is a moment in which a killed process leaves nothing at ``path``.
    """
    at_cwd, rename_exchange = -100, 2
    try:
        rename = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):
        return False
    return rename(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), rename_exchange) == 0


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON to ``path`` atomically. NaN and infinities are refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def parse_json(text: str, where: str | Path) -> Any:
    """The value in ``text``; ``where`` heads the message of the ValueError if it is no JSON, or nested without end."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON ({error})") from None


def read_json(path: str | Path) -> Any:
    """The value in a JSON file. Raises ValueError if it holds none, OSError if it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start})") from None
    return parse_json(text, path)


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn what torch, safetensors and SQLite raise where a file cannot be written into an OSError that says so."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if not any(words in str(error) for words in _UNWRITTEN):
            raise
        reason = "it could not be written whole: the disk is full, or a limit on the size of files was met"
        raise OSError(errno.ENOSPC, reason, str(path)) from error


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, as JSON values."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_manifest(directory: str | Path, **facts: Any) -> None:
    """Note the size and the SHA-256 of every file below ``directory`` in its ``manifest.json``, with further facts."""
    directory = Path(directory)
    parts = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST)
    files = {path.relative_to(directory).as_posix(): fingerprint(path) for path in parts}
    write_json(directory / MANIFEST, {"format": 1, **facts, "files": files})


def check_manifest(directory: str | Path) -> dict[str, Any] | None:
    """What ``write_manifest`` noted, once every part has been held to it; None where there is no manifest.

    Raises:
        ValueError: if a part is missing or is not what was written, by name; if the manifest is damaged.
    """
    directory = Path(directory)
    if not (directory / MANIFEST).is_file():
        return None
    noted = read_json(directory / MANIFEST)
    files = noted.get("files") if isinstance(noted, dict) else None
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{directory / MANIFEST} is damaged; restore it from a copy")
    for name, written in files.items():
        path = directory / name
        if not path.is_file():
            raise ValueError(f"{directory} lacks {name}, which was a part of it; restore it from a copy")
        if fingerprint(path) != written:
            raise ValueError(f"{path} is not what was written: it is damaged, or was changed; restore it from a copy")
    return noted
