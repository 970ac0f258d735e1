"""Atomic writes: a reader, or a run that is started again, sees the whole file or the one before it. Checked reads."""

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

from relinear.system.text import cut

MANIFEST = "manifest.json"
#: ends the names of what is not whole yet
_UNFINISHED = ".relinear"
_TEMPORARY = re.compile(rf"\..+\.[a-z0-9_]{{8}}\{_UNFINISHED}")
#: what libraries say whose own file writers fail, in place of an OSError
_UNWRITTEN = (
    *("PytorchStreamWriter", "inline_container", "I/O error", "Input/output error", "No space left", "File too large"),
    *("unable to open", "iostream error"),
)


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Give a temporary path that replaces ``path`` when the block ends without an error.

    A link stays a link, to the new content; a replaced file keeps its permissions.
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
            temporary.chmod(stat.S_IMODE(path.stat().st_mode) if path.exists() else _open_to(0o666))
            temporary.replace(path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _open_to(mode: int) -> int:
    """Return ``mode`` less the process's umask, as temporary files and folders are private."""
    umask = os.umask(0)
    os.umask(umask)
    return mode & ~umask


@contextlib.contextmanager
def atomic_directory(path: str | Path, last: str = "config.json", superseded: Iterable[str] = ()) -> Iterator[Path]:
    """Give a temporary directory whose files are moved into ``path`` if the block ends without an error.

    A directory that is not there yet appears in one step, whole. In one that is there, files of the same names are
    replaced (a link itself, never what it leads to) and all others stay.

    Args:
        path: the directory, made if need be.
        last: the file without which the others mean nothing. It goes first and comes last, so that a process that is
            killed in between leaves no model, rather than half of one.
        superseded: names of files that are removed unless the block writes them.

    Raises:
        NotADirectoryError: if ``path`` is a file.
    """
    requested, path = path, Path(os.path.realpath(path))
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{requested} is a file; choose a directory")
    home = path if path.exists() else path.parent
    home.mkdir(parents=True, exist_ok=True)
    with os_errors_named(path):
        temporary = Path(tempfile.mkdtemp(dir=home, prefix=f".{path.name}.", suffix=_UNFINISHED))
        try:
            yield temporary
            sync_files(temporary)
            if home == path.parent:
                temporary.chmod(_open_to(0o777))
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
    """Remove unfinished files of ``atomic_path`` and ``atomic_directory`` of a killed process from ``folder``."""
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def sync_files(directory: Path) -> None:
    """Write every file in ``directory`` through to the disk: renaming is atomic only for data that has reached it."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON to ``path`` atomically. NaN and infinities are refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def parse_json(text: str, source: str | Path) -> Any:
    """Return the value in ``text``. Raises ValueError, on ``source``, if it is not JSON or nested without end."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{source} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{source} is not valid JSON ({error})") from None


def read_json(path: str | Path) -> Any:
    """Return the value in a JSON file. Raises ValueError if it holds none, OSError if it cannot be read."""
    return parse_json(read_text(path), path)


@contextlib.contextmanager
def damaged_file_errors(path: str | Path, problem: str, advice: str) -> Iterator[None]:
    """Turn errors from reading the content of ``path`` within the block into one ValueError.

    It says that ``path`` is ``problem`` (no plan, damaged), why, and the advice.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        why = str(error) if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{path} is {problem} ({cut(why)}); {advice}") from error


def read_text(path: str | Path, most: int = -1) -> str:
    """Return the text of a file, or its first ``most`` characters.

    Raises ValueError if it is not UTF-8, OSError if it cannot be read.
    """
    try:
        with os_errors_named(path), open(path, encoding="utf-8") as file:
            return file.read(most)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None


@contextlib.contextmanager
def os_errors_named(path: str | Path) -> Iterator[None]:
    """Turn any I/O failure in the block into an OSError that names ``path``.

    torch and safetensors have errors of their own for it, and Python's do not name an open file.
    """
    try:
        yield
    except OSError as error:
        temporary = str(error.filename or "").startswith(str(Path(path).parent / f".{Path(path).name}."))
        if error.errno is not None and (error.filename is None or temporary):
            error.filename = str(path)
        raise
    except ValueError:  # of settings or of a run, in words already
        raise
    except Exception as error:
        message = " ".join(map(str, _causes(error)))
        if not any(words in message for words in _UNWRITTEN):
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
    """Return the SHA-256, in hexadecimal, of tensors by name (values, dtypes, shapes) and of JSON values ``about``."""
    import torch

    digest = hashlib.sha256(json.dumps(dict(about), sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_manifest(directory: str | Path, **facts: Any) -> None:
    """Write the size and SHA-256 of every file below ``directory`` into its ``manifest.json``, with further facts."""
    directory = Path(directory)
    parts = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST)
    files = {path.relative_to(directory).as_posix(): fingerprint(path) for path in parts}
    write_json(directory / MANIFEST, {"format": 1, **facts, "files": files})


def check_manifest(directory: str | Path) -> dict[str, Any] | None:
    """Return what ``write_manifest`` noted, after checking every part against it; None without a manifest.

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
    for name, as_noted in files.items():
        path = directory / name
        if not path.is_file():
            raise ValueError(f"{directory} lacks {name}, which was a part of it; restore it from a copy")
        if fingerprint(path) != as_noted:
            raise ValueError(f"{path} is not what was written: it is damaged, or was changed; restore it from a copy")
    return noted
