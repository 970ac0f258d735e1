"""Tokenise documents into a memory-mapped cache, and divide the tokens into blocks of equal length."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from relinear.data.corpora import Corpus, open_corpus
from relinear.data.settings import DataSettings
from relinear.data.tasks import (
    TRAINING_SAMPLES,
    VALIDATION_SAMPLES,
    MixtureTask,
    Samples,
    Task,
    TokenisedMixture,
    task_of,
)
from relinear.data.tokenizers import (
    bpe_size,
    encode_documents,
    load_tokenizer,
    separator_id,
    train_bpe,
    vocabulary_size,
    without_truncation,
)
from relinear.system.files import os_errors_named
from relinear.system.private_cache import cache_folder, cached, checksum, digest
from relinear.system.progress import Progress, ProgressCallback, no_progress


class PackedDataset(Dataset):
    """Split tokens into blocks of ``sequence_length``: item i is ``{"input_ids": (T,), "labels": (T,)}``, both equal.

    Tokens stay on disk, and each worker opens the file itself. An incomplete block at the end is dropped.
    """

    def __init__(self, path: Path, sequence_length: int, max_tokens: int | None = None) -> None:
        self.path = path
        self.sequence_length = sequence_length
        tokens = len(self.tokens)
        self.blocks = (tokens if max_tokens is None else min(tokens, max_tokens)) // sequence_length

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """Return all tokens of the split, memory-mapped and read-only."""
        with os_errors_named(self.path):
            return np.load(self.path, mmap_mode="r", allow_pickle=False)

    @property
    def checksum(self) -> int:
        """Return a checksum of the tokens, to compare two runs."""
        with os_errors_named(self.path):
            return checksum(self.path)

    def __getstate__(self) -> dict[str, Any]:
        # Pickling a memory map would copy the whole file.
        return {key: value for key, value in self.__dict__.items() if key != "tokens"}

    def __len__(self) -> int:
        return self.blocks

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -self.blocks <= index < self.blocks:
            raise IndexError(f"block {index} of {self.blocks}")
        start = index % self.blocks * self.sequence_length
        ids = torch.from_numpy(self.tokens[start : start + self.sequence_length].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}


@dataclasses.dataclass(frozen=True)
class PackedData:
    """The data that a run trains and evaluates on.

    Attributes:
        train: blocks of tokens, or samples of a task.
        validation: the same of the validation split.
        tokenizer: a Hugging Face tokenizer, to be saved with the model; None for a task of vectors.
        vocab_size: entries that the embedding needs; None for a task of vectors.
        description: JSON values: the settings; documents, characters, UTF-8 bytes and tokens by split; files not read.
    """

    train: Any
    validation: Any
    tokenizer: Any
    vocab_size: int | None
    description: dict[str, Any]


def prepare_data(
    settings: DataSettings | Mapping[str, Any], *, on_progress: ProgressCallback = no_progress
) -> PackedData:
    """Tokenise and pack the training and validation splits, or open an earlier call's cache.

    Each document ends with the tokenizer's end-of-text token. The key of the cache has the corpus (paths, sizes and
    times of its files), its division into splits and the tokenizer. Damaged entries are built again, and several
    processes may request the same entry at once.

    Args:
        settings: which text and tokenizer: ``DataSettings`` or a mapping of its fields.
        on_progress: called with the characters done so far, every million characters and at the end.

    Returns:
        The data: ``train`` and ``validation``, datasets of ``{"input_ids": (T,), "labels": (T,)}``, the tokenizer,
        ``vocab_size`` and a description.

    Raises:
        ValueError: for wrong settings; if the corpus is missing, empty, has no training split or is too short for one
            block.
        OSError: if the cache cannot be written.

    Examples:
        >>> from pathlib import Path
        >>> _ = Path("text.txt").write_text("Once upon a time there was a layer. " * 50)
        >>> data = relinear.data.prepare_data({"data": "text.txt", "tokenizer": "bytes", "sequence_length": 64})
        >>> data.train[0]["input_ids"].shape
        torch.Size([64])
    """
    settings = DataSettings.load(settings, "data settings")
    if (task := task_of(settings.data)) is not None:
        return _task_data(task, settings, on_progress)
    root = cache_folder(settings.cache_dir)
    corpus = open_corpus(settings)
    tokenizer, tokenizer_key = _tokenizer(settings.tokenizer, corpus, root, on_progress)
    vocabulary = vocabulary_size(tokenizer)
    dtype = np.uint16 if vocabulary <= 1 << 16 else np.uint32

    def build(folder: Path) -> dict[str, Any]:
        counts = {}
        for split in ("train", "validation"):
            totals: dict[str, int] = {}
            documents = _with_progress(corpus.documents(split), f"tokenising {split}", on_progress, totals)
            tokens = write_tokens(folder / f"{split}.npy", encode_documents(tokenizer, documents), dtype)
            counts[split] = totals | {"tokens": tokens}
        return counts

    key = {"corpus": corpus.key, "tokenizer": tokenizer_key}
    folder, counts = cached(root, "tokens", key, build)
    for split in ("train", "validation"):
        if (length := counts[split]["tokens"]) < settings.sequence_length:
            advice = " or raise validation_fraction" if split == "validation" else ""
            raise ValueError(
                f"the {split} split of {settings.data!r} has {length} tokens, too few for one sequence of "
                f"{settings.sequence_length}; lower sequence_length{advice}, or use more text"
            )
    limit = settings.max_validation_tokens
    if limit is not None and limit < settings.sequence_length:
        raise ValueError(f"max_validation_tokens={limit} is less than one sequence of {settings.sequence_length}")
    train = PackedDataset(folder / "train.npy", settings.sequence_length)
    validation = PackedDataset(folder / "validation.npy", settings.sequence_length, limit)
    return _with_description(settings, (train, validation), tokenizer, counts, corpus.unread)


def write_tokens(path: Path, arrays: Iterable[np.ndarray], dtype: Any) -> int:
    """Write the arrays one after another into one .npy file, not all in memory at once; return the number of tokens."""
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
        # numpy pads the header so that the first dimension can grow: the final header is as long as the first.
        assert file.tell() == start
    return count


def _with_description(
    settings: DataSettings, splits: Iterable[Any], tokenizer: Any, counts: dict[str, Any], unread: Sequence[str] = ()
) -> PackedData:
    vocabulary = None if tokenizer is None else vocabulary_size(tokenizer)
    description: dict[str, Any] = {"settings": settings.model_dump(mode="json"), "vocab_size": vocabulary}
    description |= {"splits": counts, "not_read": list(unread)}
    train, validation = splits
    return PackedData(train, validation, tokenizer, vocabulary, description)


def _task_data(task: Task, settings: DataSettings, on_progress: ProgressCallback) -> PackedData:
    """Return the samples of a task; those of a mixture are drawn from the tokenised documents of its sources."""
    tasks_by_split: dict[str, Any] = {"train": task, "validation": task}
    if isinstance(task, MixtureTask):
        if len(task.sources) > 1 and bpe_size(settings.tokenizer) is not None:
            raise ValueError(
                f"{settings.tokenizer} is trained on one corpus; use a tokenizer that fits all of {task.of}"
            )
        parts = [prepare_data(settings.replace(data=name), on_progress=on_progress) for name in task.sources]
        tokenizer = parts[0].tokenizer
        for split in tasks_by_split:
            documents = (_split_documents(getattr(source, split).tokens, separator_id(tokenizer)) for source in parts)
            tasks_by_split[split] = TokenisedMixture(task, settings.sequence_length, tuple(documents))
    else:
        tokenizer = None if settings.tokenizer == "none" else load_tokenizer(settings.tokenizer)
    length, limit = settings.sequence_length, settings.max_validation_tokens
    sizes = {"train": TRAINING_SAMPLES, "validation": VALIDATION_SAMPLES if limit is None else max(1, limit // length)}
    counts = {split: {"samples": size, "tokens": size * length} for split, size in sizes.items()}
    splits = (Samples(task, sizes[split], settings.seed, split) for split, task in tasks_by_split.items())
    return _with_description(settings, splits, tokenizer, counts)


def _split_documents(tokens: np.ndarray, separator: int) -> tuple[np.ndarray, ...]:
    """Split tokens into documents at ``separator``, which each of them ends with; it is removed."""
    ends = np.flatnonzero(tokens == separator)
    return tuple(tokens[start:end] for start, end in zip([0, *(ends[:-1] + 1)], ends, strict=True))


def _with_progress(
    documents: Iterable[str], stage_text: str, on_progress: ProgressCallback, totals: dict[str, int] | None = None
) -> Iterator[str]:
    """Yield the documents and report the characters so far; at the end ``totals`` gets the counts of all documents."""
    count, characters, size, reported = 0, 0, 0, 0
    for text in documents:
        yield text
        count += 1
        characters += len(text)
        size += len(text.encode())
        if characters - reported >= 1_000_000:
            reported = characters
            on_progress(Progress(stage_text, reported, stage="data"))
    on_progress(Progress(stage_text, characters, stage="data"))
    if totals is not None:
        totals |= {"documents": count, "characters": characters, "bytes": size}


def _tokenizer(name: str, corpus: Corpus, root: Path, on_progress: ProgressCallback) -> tuple[Any, Any]:
    """Return the tokenizer of a setting, and a JSON value for cache keys that identifies how it encodes."""
    size = bpe_size(name)
    if size is None:
        tokenizer = load_tokenizer(name)
        with without_truncation(tokenizer) as backend:
            content = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
        template = getattr(tokenizer, "chat_template", None)
        return tokenizer, [digest(content), separator_id(tokenizer), *([digest(template)] if template else [])]

    def build(folder: Path) -> dict[str, Any]:
        total = sum(len(text) for text in corpus.documents("train"))
        documents = _with_progress(corpus.documents("train"), "training the tokenizer", on_progress)
        train_bpe(documents, size, total).save_pretrained(folder)
        return {}

    key = {"corpus": corpus.key, "bpe": size}
    folder, _ = cached(root, "tokenizers", key, build)
    return load_tokenizer(str(folder)), key
