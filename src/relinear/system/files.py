"""Write files atomically (readers see the old file or the complete new one), and check files that are read."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from relinear.system.text import shorten

MANIFEST = "manifest.json"
#: suffix of files and folders that are not complete yet
_UNFINISHED = ".relinear"
_TEMPORARY = re.compile(rf"\..+\.[a-z0-9_]{{8}}\{_UNFINISHED}")
#: words in the errors of libraries whose file writers fail without raising OSError
_WRITE_FAILURES = (
    *("PytorchStreamWriter", "inline_container", "I/O error", "Input/output error", "No space left", "File too large"),
    *("unable to open", "iostream error"),
)


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` when the block ends without an error.

    A link stays a link, now to the new content; a replaced file keeps its permissions.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with os_errors_named(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_UNFINISHED)
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.chmod(stat.S_IMODE(path.stat().st_mode) if path.exists() else _without_umask(0o666))
            temporary.replace(path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _without_umask(mode: int) -> int:
    """Return ``mode`` without the bits of the process's umask; needed because temporary files are private."""
    umask = os.umask(0)
    os.umask(umask)
    return mode & ~umask


@contextlib.contextmanager
def atomic_directory(path: str | Path, last: str = "config.json", superseded: Iterable[str] = ()) -> Iterator[Path]:
    """Yield a temporary directory whose files are moved into ``path`` if the block ends without an error.

    A new directory appears complete, in one step. In an existing one, files of the same names are replaced (a link
    itself, never its target) and all others stay.

    Args:
        path: the directory, created if missing.
        last: the file without which the others cannot be used. It is removed first and moved last, so that a killed
            process leaves no model rather than half of one.
        superseded: names of files that are removed unless the block writes them.

    Raises:
        NotADirectoryError: if ``path`` is a file.
    """
    requested = path
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{requested} is a file; choose a directory")
    parent = path if path.exists() else path.parent
    parent.mkdir(parents=True, exist_ok=True)
    with os_errors_named(path):
        temporary = Path(tempfile.mkdtemp(dir=parent, prefix=f".{path.name}.", suffix=_UNFINISHED))
        try:
            yield temporary
            sync_files(temporary)
            if parent == path.parent:
                temporary.chmod(_without_umask(0o777))
                temporary.replace(path)
            else:
                _move_files(temporary, path, last, superseded)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _move_files(source: Path, target: Path, last: str, superseded: Iterable[str]) -> None:
    if (source / last).exists():
        (target / last).unlink(missing_ok=True)
    for name in superseded:
        if not (source / name).exists():
            (target / name).unlink(missing_ok=True)
    files = [file for file in source.rglob("*") if file.is_file()]
    for file in sorted(files, key=lambda file: (file == source / last, file)):
        destination = target / file.relative_to(source)
        destination.parent.mkdir(exist_ok=True, parents=True)
        file.replace(destination)


def remove_temporaries(folder: Path) -> None:
    """Remove from ``folder`` what ``atomic_path`` and ``atomic_directory`` of a killed process left unfinished."""
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def sync_files(directory: Path) -> None:
    """Flush every file in ``directory`` to disk, as renaming is atomic only for data that is on it."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON to ``path`` atomically. NaN and infinities raise ValueError."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def parse_json(text: str, source: str | Path) -> Any:
    """Return the JSON value in ``text``. Raises ValueError, which names ``source``, if it is invalid or too nested."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not valid JSON ({error})") from None


def read_json(path: str | Path) -> Any:
    """Return the value in a JSON file. Raises ValueError if it has none, OSError if it cannot be read."""
    return parse_json(read_text(path), path)


@contextlib.contextmanager
def damaged_file_errors(path: str | Path, problem: str, advice: str) -> Iterator[None]:
    """Turn errors from reading the content of ``path`` within the block into one ValueError.

    The message is "PATH is PROBLEM (why); ADVICE", with a problem such as "damaged".
    """
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:
        why = str(error) if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{path} is {problem} ({shorten(why)}); {advice}") from error


def read_text(path: str | Path, limit: int = -1) -> str:
    """Return the text of a file, or its first ``limit`` characters.

    Raises ValueError if it is not UTF-8, OSError if it cannot be read.
    """
    try:
        with os_errors_named(path), open(path, encoding="utf-8") as file:
            return file.read(limit)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None


@contextlib.contextmanager
def os_errors_named(path: str | Path) -> Iterator[None]:
    """Turn any I/O failure in the block into an OSError that names ``path``.

    torch and safetensors raise other errors for it, and Python's OSError does not name a file that is already open.
    """
    try:
        yield
    except OSError as error:
        temporary = str(error.filename or "").startswith(str(Path(path).parent / f".{Path(path).name}."))
        if error.errno is not None and (error.filename is None or temporary):
            error.filename = str(path)
        raise
    except ValueError:  # about settings or a run: its message is clear already
        raise
    except Exception as error:
        message = " ".join(map(str, _causes(error)))
        if not any(words in message for words in _WRITE_FAILURES):
            raise
        failing = re.search("I/O error|Input/output", message) and "No space left" not in message
        number = errno.EIO if failing else errno.ENOSPC
        raise OSError(number, f"{os.strerror(number)} ({' '.join(str(error).split())[:200]})", str(path)) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def fingerprint(path: Path) -> dict[str, Any]:
    """Return the size and SHA-256 of a file, as JSON values."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def tensor_digest(tensors: Mapping[str, Any], about: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return the hexadecimal SHA-256 of named tensors (values, dtypes, shapes) and of the JSON values ``about``."""
    import torch

    digest = hashlib.sha256(json.dumps(dict(about), sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_manifest(directory: str | Path, **facts: Any) -> None:
    """Write ``manifest.json`` in ``directory``: size and SHA-256 of every file below it, and ``facts``."""
    directory = Path(directory)
    parts = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST)
    files = {path.relative_to(directory).as_posix(): fingerprint(path) for path in parts}
    write_json(directory / MANIFEST, {"format": 1, **facts, "files": files})


def check_manifest(directory: str | Path) -> dict[str, Any] | None:
    """Check every file against the manifest of ``write_manifest`` and return it; None without a manifest.

    Raises:
        ValueError: if a file is missing or was changed (the message names it); if the manifest is damaged.
    """
    directory = Path(directory)
    if not (directory / MANIFEST).is_file():
        return None
    manifest = read_json(directory / MANIFEST)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{directory / MANIFEST} is damaged; restore it from a copy")
    for name, expected in files.items():
        path = directory / name
        if not path.is_file():
            raise ValueError(f"{directory} lacks {name}, which its manifest lists; restore it from a copy")
        if fingerprint(path) != expected:
            raise ValueError(f"{path} is damaged or was changed since it was written; restore it from a copy")
    return manifest
