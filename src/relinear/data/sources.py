"""Read documents from Python's standard library, local files and Hub data sets (the last two with ``datasets``)."""

from __future__ import annotations

import dataclasses
import functools
import glob
import itertools
import json
import logging
import os
import re
import socket
import sys
import sysconfig
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relinear.data.chat import Conversation, as_document
from relinear.settings.messages import quoted
from relinear.system.grouped import grouped
from relinear.system.private_cache import cache_folder, cached, digest, usable_folder
from relinear.system.text import shorten

if TYPE_CHECKING:
    from relinear.data.settings import DataSettings

#: suffix of a file's name -> format of the file; a suffix of compression may follow
FORMATS = {".txt": "text", ".md": "text", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".arrow": "arrow"}
FORMATS |= dict.fromkeys((".jsonl", ".json", ".ndjson"), "json")
_COMPRESSED = (".gz", ".bz2", ".xz")
#: format -> name of the builder of ``datasets`` that reads it, and the builder's options
_BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("text", {"sample_by": "document", "encoding": "utf-8-sig"}),
    "tsv": ("csv", {"sep": "\t"}),
}
#: files of the Hub and of ``datasets`` that are not data
_METADATA_FILES = {
    "README.md",
    "config.json",
    "dataset_dict.json",
    "dataset_info.json",
    "dataset_infos.json",
    "state.json",
}
_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
#: name of a file or Hub split -> split here
SPLIT_NAMES = {name: split for split, names in _NAMES.items() for name in names}
_SPLIT_PATTERN = re.compile(rf"(?:.*[-._0-9])?({'|'.join(SPLIT_NAMES)})(?:[-._0-9].*)?")
#: rows of a stream from which the types of columns are inferred if the data set does not state them
_ROWS_TO_INFER_TYPES = 1000
# Tests are half of the library and add little to it. Codec tables and the like are near copies of each other, so a
# model could recite those of the validation split.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class Source:
    """Documents in a fixed order.

    Attributes:
        documents: each call returns a new iterator over all documents.
        key: JSON value that changes whenever the documents may have changed.
    """

    documents: Callable[[], Iterator[str]]
    key: Any


def stdlib_source() -> Source:
    """Return one document per file of Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]  # thousands of files of packages
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort(key=lambda path: path.relative_to(root).as_posix())

    def documents() -> Iterator[str]:
        for path in files:
            try:
                yield path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue  # a few files have older encodings

    return Source(documents, ["stdlib", sys.version, _file_keys(files)])


def _file_keys(files: Sequence[Path]) -> list[Any]:
    return [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


# Local files


def local_sources(path: Path, config: str | None, settings: DataSettings) -> tuple[dict[str, Source], list[str]]:
    """Return the sources of a local file, folder or pattern by split, and the names of files that are not read.

    If the README.md of a folder has configurations, they define what is read. In any other folder, only the format
    whose files have the most bytes is read. Files and folders named train, validation or test (by the Hub's rules) are
    these splits; without such names the only split is ``all``.

    Args:
        path: the file, folder or pattern.
        config: a configuration of the README.md; None for its default.
        settings: the corpus's; ``text_column``, ``max_documents`` and ``cache_dir`` are used.

    Raises:
        ValueError: if there is nothing to read, or reading fails.
    """
    files = {path.name: path} if path.is_file() else _files_of(path)
    if config is not None or _has_configurations(path / "README.md"):
        key = ["configured", config, _file_keys(list(files.values()))]
        try:
            loaded = _load(str(path), settings, key, config)
        except ValueError as error:
            advice = f"{path}:NAME chooses a configuration"
            raise ValueError(f"{path} cannot be read as its README.md says ({advice}): {error}") from error
        return _by_split(str(path), loaded, settings, key)
    by_format: dict[str, list[str]] = {}
    for name in files:
        if (file_format := _format_of(name)) and (path.is_file() or Path(name).name not in _METADATA_FILES):
            by_format.setdefault(file_format, []).append(name)
    if not by_format:
        problem = f"no file can be read ({shorten(', '.join(files))})" if files else "there is no file"
        raise ValueError(f"{path}: {problem}; known: {', '.join(FORMATS)}, also as .gz")
    file_format = max(
        by_format, key=lambda file_format: sum(files[name].stat().st_size for name in by_format[file_format])
    )
    by_split = grouped(("" if path.is_file() else _split_of(name), name) for name in by_format[file_format])
    unnamed = by_split.pop("", [])
    if unnamed and "train" not in by_split:
        by_split["train" if by_split else "all"] = unnamed
    read = set(itertools.chain(*by_split.values()))
    parts = {split: [files[name] for name in names] for split, names in by_split.items()}
    return _file_sources(path, file_format, parts, settings), [name for name in files if name not in read]


def _format_of(name: str) -> str | None:
    path = Path(name.lower())
    return FORMATS.get((path.with_suffix("") if path.suffix in _COMPRESSED else path).suffix)


def _split_of(name: str) -> str:
    """Return the split that a part of a path names, the first such part; "" if none does."""
    matches = (_SPLIT_PATTERN.fullmatch(part) for part in Path(name.lower()).parts)
    return next((SPLIT_NAMES[match[1]] for match in matches if match), "")


def _files_of(path: Path) -> dict[str, Path]:
    """Return the files of a folder or pattern by name, sorted, without hidden ones; links are followed."""
    if not path.is_dir():
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
        matches = map(Path, sorted(glob.glob(str(path), recursive=True)))
        return {match.relative_to(root).as_posix(): match for match in matches if match.is_file()}
    files: list[Path] = []
    seen = set[str]()  # links may lead in a circle
    for folder, folders, names in os.walk(path, followlinks=True):
        real = os.path.realpath(folder)
        folders[:] = [name for name in folders if real not in seen and not name.startswith((".", "__"))]
        files += [Path(folder, name) for name in names if real not in seen and not name.startswith(".")]
        seen.add(real)
    return dict(sorted((file.relative_to(path).as_posix(), file) for file in files if file.is_file()))


def _has_configurations(card: Path) -> bool:
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    return bool(re.match(r"---\n(?:.*\n)??configs:.*?^---", text, re.DOTALL | re.MULTILINE))


def _file_sources(
    path: Path, file_format: str, parts: Mapping[str, Sequence[Path]], settings: DataSettings
) -> dict[str, Source]:
    """Return sources for files of one format by split; the files are read when the first document is requested."""
    builder, options = _BUILDERS.get(file_format, (file_format, {}))
    if builder == "text":
        settings = settings.replace(text_column=None)  # plain text has no columns to choose from
    files = list(itertools.chain(*parts.values()))
    key = [file_format, _file_keys(files)]
    files_by_split = {
        _datasets_name(split): [glob.escape(str(file.absolute())) for file in group] for split, group in parts.items()
    }

    @functools.cache
    def loaded() -> dict[str, Any]:
        try:
            return _load(builder, settings, key, data_files=files_by_split, **options)
        except ValueError as error:
            names = shorten(", ".join(file.name for file in files))
            raise ValueError(f"{path}: {names} cannot be read: {error}") from error

    def part(split: str) -> Callable[[], Any]:
        return lambda: loaded()[_datasets_name(split)]

    return {split: _source(str(path), part(split), settings, [*key, split]) for split in parts}


def _datasets_name(split: str) -> str:
    return "train" if split == "all" else split  # datasets reserves "all" for all splits together


# Reading by datasets


class _Errors(logging.Handler):
    """Collect what ``datasets`` logs instead of printing it; the log names the file, its exceptions do not."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(re.sub(r" with error <class '[^']*'>", "", record.getMessage()))


def _load(name: str, settings: DataSettings, key: Any, config: str | None = None, **options: Any) -> dict[str, Any]:
    """Call ``datasets.load_dataset`` without its progress bars; stream if only the first documents are wanted.

    Args:
        name: name of a builder or data set.
        settings: settings of the corpus.
        key: JSON value that determines the folder in relinear's cache; None uses the cache of ``datasets``.
        config: configuration of the data set.
        **options: further options of the builder.

    Raises:
        ValueError: if the data cannot be read, with the message of the library that failed.
        OSError: if the cache cannot be written.
    """
    import datasets

    if key is not None:  # the cache key of datasets has the time of a link, not of its target
        options["cache_dir"] = str(usable_folder(cache_folder(settings.cache_dir), "datasets", digest(key)))
    logger = logging.getLogger("datasets")
    errors = _Errors()
    bars = not datasets.are_progress_bars_disabled()
    handlers, logger.handlers = logger.handlers, [errors]
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name, config, streaming=settings.max_documents is not None, **options)
    except Exception as error:  # many packages raise about files, formats, networks and configurations
        cause = (isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__) or error
        if isinstance(cause, OSError) and cause.errno is not None:
            raise cause from None
        message = str(cause).split("Example of usage")[0] or type(cause).__name__
        raise ValueError(shorten(" ".join(next(iter(errors.messages), message).split()))) from error
    finally:
        logger.handlers = handlers
        if bars:
            datasets.enable_progress_bars()


def _by_split(
    name: str, loaded: Mapping[str, Any], settings: DataSettings, key: Sequence[Any]
) -> tuple[dict[str, Source], list[str]]:
    """Return the sources of a data set by split, and a note on each split whose name is unknown here."""
    parts = {SPLIT_NAMES[split]: part for split, part in loaded.items() if split in SPLIT_NAMES}
    if not parts:
        raise ValueError(f"{name!r} has no split named train, validation or test; it has {', '.join(map(str, loaded))}")
    sources = {
        split: _source(f"{name} ({split})", functools.partial(lambda part: part, part), settings, [*key, split])
        for split, part in parts.items()
    }
    return sources, [f"the split {split}" for split in loaded if split not in SPLIT_NAMES]


def _source(name: str, rows_of: Callable[[], Any], settings: DataSettings, key: Sequence[Any]) -> Source:
    """Return the source of one split of a data set."""

    def documents() -> Iterator[str]:
        rows = rows_of()
        column = _column(name, rows, settings.text_column)
        rows = rows.select_columns([column])
        if settings.max_documents is not None:
            rows = rows.take(settings.max_documents)
        try:
            for batch in rows.iter(batch_size=16):
                for value in batch[column]:
                    text = as_document(value or "")
                    if text is None:
                        raise ValueError(f"{name}: {quoted(column)} has {quoted(value)}, expected text or messages")
                    yield text
        except UnicodeDecodeError as error:
            raise ValueError(f"{name}: {quoted(column)} has text that is not UTF-8; convert it first") from error

    return Source(documents, [*key, settings.text_column])


def _column(name: str, rows: Any, chosen: str | None) -> str:
    """Return the column of documents: ``chosen``, else ``text``, ``messages``, or the only column of strings.

    Raises:
        ValueError: if the column is missing or has neither text nor conversations, or if no column is the obvious one.
    """
    features = rows.features
    if features is None:  # a stream that does not state them
        import datasets

        features = datasets.Dataset.from_list(list(rows.take(_ROWS_TO_INFER_TYPES))).features
    strings = ("string", "large_string", "string_view")
    texts = [key for key, feature in features.items() if getattr(feature, "dtype", "") in strings]
    chats = [key for key, feature in features.items() if _holds_messages(feature)]
    wanted = chosen or "text"
    if wanted in (*texts, *chats):
        return wanted
    if chosen is None and "messages" in chats:
        return "messages"
    if chosen is None and len(texts) == 1 and "text" not in features:
        return texts[0]
    problem = f"column {quoted(wanted)} has no text" if wanted in features else f"no column {quoted(wanted)}"
    raise ValueError(
        f"{name}: {problem}; choose one with text_column (--text-column); columns of text: "
        f"{shorten(', '.join(texts)) or 'none'}; all columns: {shorten(', '.join(features)) or 'none'}"
    )


def _holds_messages(feature: Any) -> bool:
    """Return whether a feature is a list of messages, or of mappings whose keys differ between rows."""
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    return {"role", "content"} <= set(inner) if isinstance(inner, dict) else type(inner).__name__ == "Json"


# The Hugging Face Hub


_HUB_ERROR = (
    "{name!r} is not a local file or folder, and as a Hugging Face Hub data set it cannot be read: {reason}. "
    "Use an existing path, 'stdlib', or a Hub name (owner/name or owner/name:config) if the Hub can be reached"
)


def hub_in_reach() -> bool:
    """Return whether the Hub answers; checked first, as the Hub's client would retry for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    endpoint = urllib.parse.urlparse(constants.ENDPOINT)
    if endpoint.scheme in urllib.request.getproxies():
        return True  # a direct connection would say nothing about the proxy
    try:
        port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
        socket.create_connection((endpoint.hostname or "", port), timeout=5).close()
    except OSError:
        return False
    return True


def hub_sources(name: str, settings: DataSettings) -> tuple[dict[str, Source], list[str]]:
    """Return the sources of a Hub data set ``owner/name`` or ``owner/name:config`` by split, and unknown splits.

    With ``max_documents`` the data set is streamed, not downloaded. The documents are saved in the cache, so that they
    are read once and are available offline afterwards.

    Raises:
        ValueError: if the data set, its config or its text column cannot be read; the message says what was tried.
    """
    if settings.max_documents is None:
        return _open_hub(name, settings)

    def save(folder: Path) -> dict[str, Any]:
        sources, unread = _open_hub(name, settings)
        for split, source in sources.items():
            with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
                for text in source.documents():
                    file.write(json.dumps([text, isinstance(text, Conversation)]) + "\n")
        return {"splits": list(sources), "unread": unread}

    key = [name, settings.text_column, settings.max_documents]
    folder, saved = cached(cache_folder(settings.cache_dir), "hub", key, save)

    def documents(split: str) -> Iterator[str]:
        with (folder / f"{split}.jsonl").open(encoding="utf-8") as file:
            for text, is_conversation in map(json.loads, file):
                yield Conversation(text) if is_conversation else text

    return {s: Source(functools.partial(documents, s), ["kept", *key, s]) for s in saved["splits"]}, saved["unread"]


def _open_hub(name: str, settings: DataSettings) -> tuple[dict[str, Source], list[str]]:
    import datasets
    from datasets.naming import camelcase_to_snakecase

    repository, _, config = name.partition(":")
    owner, _, short = repository.partition("/")
    cache = Path(datasets.config.HF_DATASETS_CACHE) / f"{owner}___{camelcase_to_snakecase(short)}"
    if not cache.exists() and not hub_in_reach():
        raise ValueError(_HUB_ERROR.format(name=name, reason="the Hub cannot be reached, and the cache has no copy"))
    try:
        loaded = _load(repository, settings, None, config or None)
    except (ValueError, OSError) as error:
        raise ValueError(_HUB_ERROR.format(name=name, reason=error)) from error
    fingerprints = {split: getattr(part, "_fingerprint", None) for split, part in loaded.items()}
    return _by_split(name, loaded, settings, ["hub", name, fingerprints])
