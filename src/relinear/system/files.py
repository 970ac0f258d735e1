"""Atomic writes: a reader, or a run that is started again, sees the whole file or the one before it. Checked reads."""

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relinear.system import written
from relinear.system.text import cut
from relinear.system.written import MARK

MANIFEST = "manifest.json"
#: what libraries say whose own file writers fail, in place of an OSError
_UNWRITTEN = (
    *("PytorchStreamWriter", "inline_container", "I/O error", "Input/output error", "No space left", "File too large"),
    *("disk is full", "unable to open", "iostream error"),
)


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place when the block ends without an error.

    A link stays a link, to the new content; a file that is replaced hands on who may read it.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=MARK)
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
    """``mode`` without what the process's umask takes: temporary files and folders are private."""
    umask = os.umask(0)
    os.umask(umask)
    return mode & ~umask


@contextlib.contextmanager
def atomic_directory(path: str | Path, work: str = "saved") -> Iterator[Path]:
    """A temporary directory whose content takes its place in ``path`` when the block ends without an error.

    What relinear wrote there before goes; what others wrote, or changed, stays, and is refused where it would be
    replaced: before the block what is known to be, after it what it turns out to write. A
    directory of relinear's alone is exchanged in one step. Beside files of others, at a mount point and through links
    the files are put in place one by one, ``config.json`` last, without which no model is there.

    Args:
        path: the directory, made if need be. work: as in ``check_ours``.

    Raises:
        NotADirectoryError: if it is a file. ValueError: if a file in it would be replaced that relinear did not write,
            or that was changed since.
    """
    given, path = path, Path(os.path.realpath(path))
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{given} is a file; choose a directory")
    ours = written.check_ours(path, work)
    inside = os.path.ismount(path) or (path.exists() and not os.access(path.parent, os.W_OK))
    home = path if inside else path.parent
    home.mkdir(parents=True, exist_ok=True)
    with writing(path):
        temporary = Path(tempfile.mkdtemp(dir=home, prefix=f".{path.name}.", suffix=MARK))
        try:
            yield temporary
            meanwhile = written.sign(temporary, path, work, ours)
            sync_files(temporary)
            _settle(temporary, path, work, ours, meanwhile)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _settle(new: Path, path: Path, work: str, ours: set[str], meanwhile: str) -> None:
    """Put what is in ``new`` in place."""
    if not path.exists():
        new.chmod(_open_to(0o777))
        new.replace(path)
        return
    fresh = {part.name for part in new.iterdir()}
    there = {part.name: part for part in path.iterdir() if part != new}
    stale = {part.name for part in written.parts_of(path, work)} & ours - fresh
    same = (fresh & there.keys()) - ours
    for name in same:
        if written.digest_of(there[name]) != written.digest_of(new / name):
            raise written.not_ours(there[name])
    plain = new.parent != path and not any(part.is_symlink() or part.is_dir() for part in there.values())
    plain = plain and not os.path.samefile(path, os.curdir)  # who stands in it would stand in what is removed
    new.chmod(stat.S_IMODE(path.stat().st_mode))
    if plain and there.keys() <= fresh | stale and _exchange(new, path):
        return
    write_text(path / MARK, meanwhile)
    for name in sorted(stale | {"config.json"} & fresh & ours, key=lambda name: name != "config.json"):
        if name in stale or not there[name].is_symlink():
            written.remove(there[name])
    for name in sorted(fresh - same, key=lambda name: (name == MARK, name == "config.json")):
        if (path / name).is_symlink():  # to a larger disk, say
            with atomic_path(path / name) as temporary:
                shutil.copyfile(new / name, temporary)
        else:
            if (path / name).is_dir():  # which can only take the place of an empty one
                written.remove(path / name)
            (new / name).replace(path / name)


@contextlib.contextmanager
def kept_up(folder: Path) -> Iterator[None]:
    """Have the mark in ``folder``, if there is one that knows contents, know what the block writes there, too."""
    noted = written.noted_in(folder)
    before = {part: written.digest_of(part) for part in written.parts_of(folder, "saved")} if noted else {}
    yield
    if noted:
        after = {part: written.digest_of(part) for part in written.parts_of(folder, "saved")}
        noted |= {part.name: {digest} for part, digest in after.items() if digest != before.get(part)}
        write_text(folder / MARK, written.as_mark(noted))


def list_written(folder: str | Path, work: str) -> None:
    """Have the record of a work that has ended list its files: of any other, or one that is changed, it is not ours."""
    record, folder = Path(folder) / written.record_of(work), Path(folder)
    parts = [part for part in written.parts_of(folder, work) if written.is_listed(part, work)]
    write_json(record, read_json(record) | {written.LISTED: {part.name: written.digest_of(part) for part in parts}})


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
    """Return the value in a JSON file. Raises ValueError if it holds none, OSError if it cannot be read."""
    return parse_json(read_text(path), path)


@contextlib.contextmanager
def understood(path: str | Path, what: str, advice: str) -> Iterator[None]:
    """Within the block, where what ``path`` holds is taken apart, whatever it lacks ends in one ValueError.

    It says that ``path`` is ``what`` (no plan, damaged), why, and the advice.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        why = str(error) if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{path} is {what} ({cut(why)}); {advice}") from error


def read_text(path: str | Path, most: int = -1) -> str:
    """The text of a file, or its first ``most`` characters; a named pipe that nobody writes to is not waited for.

    Raises ValueError if it is not UTF-8, OSError if it cannot be read.
    """
    try:
        with writing(path), open(path, encoding="utf-8", opener=_open_at_once) as file:
            return file.read(most)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None


def _open_at_once(path: str, flags: int) -> int:
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    os.set_blocking(handle, True)
    return handle


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Have whatever is raised where ``path`` cannot be written, or read, be an OSError that has its name.

    torch, safetensors, SQLite and optuna have errors of their own for it, and Python's do not name an open file.
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
        causes = list(_causes(error))
        said = " ".join(map(str, causes))
        if not any(words in said for words in _UNWRITTEN) and all(type(e).__module__ != "sqlite3" for e in causes):
            raise
        failing = re.search("I/O error|Input/output", said) and "No space left" not in said
        number = errno.EIO if failing else errno.ENOSPC
        raise OSError(number, f"{os.strerror(number)} ({' '.join(str(error).split())[:200]})", str(path)) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


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
    """Return what ``write_manifest`` noted, once every part has been held to it; None where there is no manifest.

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
