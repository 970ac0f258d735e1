"""Text of the Hugging Face Hub, and whether the Hub is in reach."""

import json
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relinear.data.cache import cached
from relinear.data.chat import as_document, is_conversation
from relinear.data.sources import SPLIT_NAMES, Source, choose_column, files_source

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
        raise ValueError(
            _NOT_HAD.format(name=name, reason="the Hub is out of reach, and no copy is in the local cache")
        )
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
        strings = [
            key for key, feature in features.items() if getattr(feature, "dtype", "") in ("string", "large_string")
        ]
    others = [key for key in columns if key not in strings]
    row = next(iter(part), {}) if others else {}
    return choose_column(where, text_column, columns, strings, [key for key in others if is_conversation(row.get(key))])


def _hub_source(name: str, part: Any, column: str) -> Source:
    def documents() -> Iterator[str]:
        for batch in part.select_columns([column]).iter(batch_size=256):
            for text in batch[column]:
                yield as_document(text or "") or ""

    return Source(documents, ["hub", name, column, part._fingerprint])
