"""Where documents come from: the standard library, local files, the Hugging Face Hub. Sources yield whole documents."""

import contextlib
import dataclasses
import json
import re
import socket
import sys
import sysconfig
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from relinear.core.config import nearest, shown
from relinear.data.cache import cached
from relinear.data.chat import as_document, is_conversation
from relinear.system.files import parse_json, writing
from relinear.system.text import cut

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
#: what files and Hub splits are called, and what that is to us
SPLIT_NAMES = {"train": "train", "test": "test"} | dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
_SPLIT_PATTERN = re.compile(rf"({'|'.join(SPLIT_NAMES)})(?:[-_.].*)?")
# Tests are half of the library and say little that the library does not; the codec tables and their like are near
# copies of each other, which would let a model recite the validation split.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class Source:
    """Documents in a fixed order.

    documents: starts over at every call.
    key: JSON value that changes whenever the documents may have changed.
    """

    documents: Callable[[], Iterator[str]]
    key: Any


def stdlib_source() -> Source:
    """One document a file of the running Python's standard library, without its tests. Raises ValueError if absent."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
        if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts[:-1])
    ]
    if not files:
        raise ValueError(f"this Python has no library sources under {root}; give --data a file, a folder or a Hub name")

    def documents() -> Iterator[str]:
        for path in files:
            try:
                yield path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue  # a handful of files are in older encodings

    return Source(documents, ["stdlib", sys.version, _file_keys(files)])


def _file_keys(files: Sequence[Path]) -> list[Any]:
    return [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def local_sources(path: Path, text_column: str | None) -> dict[str, Source]:
    """Return the sources of a local file or folder by split; an undivided one has the split ``all``.

    A folder whose files (or subfolders) are named train, validation and test, as the Hub names them, is divided by
    them; otherwise all files of a folder make one corpus.

    Raises:
        ValueError: if there is nothing to read, a file is of another kind, or the text column is missing.
    """
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise ValueError(f"{path}: cannot read {path.suffix or 'this kind of file'}; known: {', '.join(SUFFIXES)}")
        return {"all": files_source([path], text_column)}
    files = [
        file
        for file in sorted(path.rglob("*"), key=lambda file: file.relative_to(path).as_posix())
        if file.suffix.lower() in SUFFIXES
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not files:
        raise ValueError(f"{path} has no {', '.join(SUFFIXES)} file in it")
    by_split: dict[str, list[Path]] = {}
    for file in files:
        match = _SPLIT_PATTERN.fullmatch(file.relative_to(path).parts[0].lower())
        by_split.setdefault(SPLIT_NAMES[match[1]] if match else "", []).append(file)
    if "train" in by_split or "" not in by_split:
        by_split.pop("", None)
        return {split: files_source(by_split[split], text_column) for split in by_split}
    return {"all": files_source(files, text_column)}


def files_source(files: Sequence[Path], text_column: str | None) -> Source:
    """Yield the documents of files of any known kind, one after another."""

    def documents() -> Iterator[str]:
        for path in files:
            yield from _READERS[path.suffix.lower()](path, text_column)

    return Source(documents, ["files", _file_keys(files), text_column])


def _read_text(path: Path, text_column: str | None) -> Iterator[str]:
    with _as_utf8(path), writing(path):
        text = path.read_text(encoding="utf-8-sig")
    yield text


def _read_jsonl(path: Path, text_column: str | None) -> Iterator[str]:
    column = None
    with path.open(encoding="utf-8-sig") as file, _as_utf8(path):
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            row = parse_json(line, f"{path}, line {number}")
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: expected an object, got {type(row).__name__}")
            if column is None:
                strings = [key for key, value in row.items() if isinstance(value, str)]
                chats = [key for key, value in row.items() if is_conversation(value)]
                column = choose_column(str(path), text_column, list(row), strings, chats)
            if column not in row:
                raise ValueError(f"{path}, line {number}: no column {shown(column)}; it has {cut(', '.join(row))}")
            text = as_document(row[column] or "")
            if text is None:
                found = type(row[column]).__name__
                raise ValueError(f"{path}, line {number}: {shown(column)} is {found}, expected text or messages")
            yield text


@contextlib.contextmanager
def _as_utf8(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from error


def _read_parquet(path: Path, text_column: str | None) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no readable parquet file ({str(error).splitlines()[0]})") from error
    with file:
        schema = file.schema_arrow
        strings = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
        chats = [field.name for field in schema if _holds_messages(pa, field.type)]
        column = choose_column(str(path), text_column, schema.names, strings, chats)
        try:
            for batch in file.iter_batches(batch_size=64, columns=[column]):
                for text in batch.column(0):
                    yield as_document(text.as_py() or "") or ""
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path} is damaged ({str(error).splitlines()[0]})") from error


def _holds_messages(pa: Any, kind: Any) -> bool:
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    messages = listed and pa.types.is_struct(kind.value_type)
    return bool(messages) and {"role", "content"} <= {field.name for field in kind.value_type}


_READERS = {".txt": _read_text, ".md": _read_text, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


def choose_column(
    where: str, wanted: str | None, columns: Sequence[str], strings: Sequence[str], chats: Sequence[str] = ()
) -> str:
    """Return the column of documents: the one asked for, else ``text``, ``messages``, or the only one of strings.

    Args:
        where: the file or data set, for messages.
        wanted: what was asked for, or None.
        columns: all there are. strings: those of text. chats: those of conversations.

    Raises:
        ValueError: if the one that was asked for is not there or holds neither, or none is the obvious one.
    """
    if wanted is not None:
        if wanted not in columns:
            raise ValueError(
                f"{where}: no column {shown(wanted)}; {nearest(wanted, columns)}; columns: {cut(', '.join(columns))}"
            )
        if wanted not in (*strings, *chats):
            raise ValueError(
                f"{where}: column {shown(wanted)} holds no text; columns of text: {cut(', '.join(strings)) or 'none'}"
            )
        return wanted
    for name, members in (("text", strings), ("messages", chats)):
        if name in members:
            return name
    if len(strings) == 1:
        return strings[0]
    raise ValueError(
        f"{where}: no column 'text'; choose one with text_column (--text-column); columns of text: "
        f"{cut(', '.join(strings)) or 'none'}; all columns: {cut(', '.join(columns)) or 'none'}"
    )


# The Hugging Face Hub


_NOT_HAD = (
    "{name!r} is no local file or folder, and as a Hugging Face Hub data set it cannot be had: {reason}. "
    "Give an existing path, 'stdlib', or a Hub name (owner/name or owner/name:config) with the Hub in reach"
)


def hub_in_reach() -> bool:
    """Return whether the Hub answers; asked first, because its own client tries again for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    endpoint = urllib.parse.urlparse(constants.ENDPOINT)
    if endpoint.scheme in urllib.request.getproxies():
        return True  # only the proxy can tell
    try:
        port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
        socket.create_connection((endpoint.hostname or "", port), timeout=5).close()
    except OSError:
        return False
    return True


def hub_sources(name: str, text_column: str | None, max_documents: int | None, cache: Path) -> dict[str, Source]:
    """Return the sources of a Hub data set ``owner/name`` or ``owner/name:config`` by split.

    With ``max_documents`` the data set is streamed, not downloaded, and what was read is kept in the cache, so that it
    is read once and is there without a network afterwards.

    Raises:
        ValueError: if the data set, its config or its text column cannot be had; says what was tried.
    """
    if max_documents is None:
        parts, columns = _open_hub(name, text_column, streaming=False)
        return {split: _hub_source(name, part, columns[split]) for split, part in parts.items()}

    def keep(folder: Path) -> dict[str, Any]:
        parts, columns = _open_hub(name, text_column, streaming=True)
        for split, part in parts.items():
            with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
                for row in part.take(max_documents):
                    file.write(json.dumps({"text": row[columns[split]] or ""}) + "\n")
        return {"splits": list(parts)}

    folder, kept = cached(cache, "hub", [name, text_column, max_documents], keep)
    return {split: files_source([folder / f"{split}.jsonl"], "text") for split in kept["splits"]}


def _open_hub(name: str, text_column: str | None, *, streaming: bool) -> tuple[dict[str, Any], dict[str, str]]:
    import datasets
    from datasets.naming import camelcase_to_snakecase

    repository, _, config = name.partition(":")
    owner, _, short = repository.partition("/")
    kept = Path(datasets.config.HF_DATASETS_CACHE) / f"{owner}___{camelcase_to_snakecase(short)}"
    if not kept.exists() and not hub_in_reach():
        raise ValueError(_NOT_HAD.format(name=name, reason="the Hub is out of reach, and the cache has no copy"))
    try:
        loaded = datasets.load_dataset(repository, config or None, streaming=streaming)
    except Exception as error:  # network, hub, config and file errors of many kinds: to a user it cannot be had
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(_NOT_HAD.format(name=name, reason=reason)) from error
    parts = {SPLIT_NAMES[split]: part for split, part in loaded.items() if split in SPLIT_NAMES}
    if not parts:
        raise ValueError(f"{name!r} has no split named train, validation or test; it has {', '.join(map(str, loaded))}")
    return parts, {split: _hub_column(f"{name} ({split})", part, text_column) for split, part in parts.items()}


def _hub_column(where: str, part: Any, text_column: str | None) -> str:
    features = part.features
    if features is None:  # a stream may not know its columns before the first row
        row: dict[str, Any] = next(iter(part), {})
        columns, strings = list(row), [key for key, value in row.items() if isinstance(value, str)]
    else:
        columns = list(features)
        strings = [key for key, f in features.items() if getattr(f, "dtype", "") in ("string", "large_string")]
    others = [key for key in columns if key not in strings]
    row = next(iter(part), {}) if others else {}
    return choose_column(where, text_column, columns, strings, [key for key in others if is_conversation(row.get(key))])


def _hub_source(name: str, part: Any, column: str) -> Source:
    def documents() -> Iterator[str]:
        for batch in part.select_columns([column]).iter(batch_size=256):
            for text in batch[column]:
                yield as_document(text or "") or ""

    return Source(documents, ["hub", name, column, part._fingerprint])
