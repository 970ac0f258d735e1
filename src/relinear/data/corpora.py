"""Open a corpus and divide its documents into splits, so that no held-out document is ever trained on."""

from __future__ import annotations

import glob
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from relinear.data.chat import Conversation, encodable
from relinear.data.settings import DataSettings
from relinear.data.sources import Source, hub_sources, local_sources, stdlib_source
from relinear.data.tasks import (
    TRAINING_SAMPLES,
    VALIDATION_SAMPLES,
    ArithmeticTask,
    MixtureTask,
    Samples,
    Task,
    task_of,
)
from relinear.settings.messages import similar_names, warn_user
from relinear.system.text import shorten

#: ``all`` has every document of a corpus without splits
SPLITS = ("train", "validation", "test", "all")


def open_corpus(settings: DataSettings) -> Corpus:
    """Return the corpus of ``settings``.

    Hub data and folders with configurations are loaded here, other files on first use.

    Raises:
        ValueError: if it does not exist or has no text; the message says what was tried.
    """
    data = settings.data
    if data == "stdlib":
        return Corpus(settings, {"all": stdlib_source()})
    if (task := task_of(data)) is not None:
        return _task_corpus(task, settings)
    path = Path(data).expanduser()
    folder, _, config = data.rpartition(":")
    if path.exists() or (glob.has_magic(data) and glob.glob(str(path), recursive=True)):
        sources, unread = local_sources(path, None, settings)
    elif folder and Path(folder).expanduser().is_dir():
        sources, unread = local_sources(Path(folder).expanduser(), config, settings)
    elif re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?", data) and not path.parent.is_dir():
        sources, unread = hub_sources(data, settings)
    else:
        raise _missing_data(data, path)
    if unread:
        warn_user(f"ignored in {data}: {shorten(', '.join(unread))}")
    return Corpus(settings, sources, unread)


def _task_corpus(task: Task, settings: DataSettings) -> Corpus:
    """Return a task's texts: a mixture has the documents of its sources in turn, a task of vectors has none."""
    if isinstance(task, ArithmeticTask):

        def texts(split: str, size: int) -> Callable[[], Iterator[str]]:
            samples = Samples(task, size, settings.seed, split)
            return lambda: (task.text(samples.draw(index)) for index in range(len(samples)))

        sizes = {"train": TRAINING_SAMPLES, "validation": VALIDATION_SAMPLES}
        key = [task.to_dict(), settings.seed]
        return Corpus(settings, {split: Source(texts(split, size), key) for split, size in sizes.items()})
    if isinstance(task, MixtureTask):
        corpora = [open_corpus(settings.replace(data=name)) for name in task.sources]

        def chained(split: str) -> Callable[[], Iterator[str]]:
            return lambda: itertools.chain.from_iterable(corpus.documents(split) for corpus in corpora)

        key = [corpus.key for corpus in corpora]
        return Corpus(settings, {split: Source(chained(split), key) for split in ("train", "validation")})
    return Corpus(settings, {})


def _missing_data(data: str, path: Path) -> ValueError:
    siblings = [entry.name for entry in path.parent.iterdir() if entry.exists()] if path.parent.is_dir() else []
    close = similar_names(path.name, [*siblings, "stdlib"])
    hint = f"; did you mean {str(path.with_name(close[0])) if close[0] in siblings else close[0]!r}?" if close else "."
    return ValueError(
        f"{data!r} does not exist{hint} Use 'stdlib', an existing file, folder or pattern, or a Hugging Face Hub name "
        "(owner/name or owner/name:config)"
    )


def iter_texts(settings: DataSettings, split: str = "train", *, conversations: bool = False) -> Iterator[str]:
    """Return the documents of one split, in a fixed order.

    Args:
        settings: which corpus, and how to divide it.
        split: ``train`` or ``validation``; ``test`` if the corpus has one; ``all`` for every document of a corpus
            without splits.
        conversations: whether the caller can handle a ``Conversation``.

    Raises:
        ValueError: if the corpus is missing, empty, or has no such split (lists those it has); or if it has
            conversations and ``conversations`` is false.
    """
    documents = open_corpus(settings).documents(split)
    return documents if conversations else _only_text(documents, settings)


def evaluation_split(settings: DataSettings) -> str:
    """Return the split to evaluate on: ``all``, or the corpus's ``test``, else ``validation``."""
    splits = open_corpus(settings).splits
    return next(split for split in ("all", "test", "validation") if split in splits)


def _only_text(documents: Iterator[str], settings: DataSettings) -> Iterator[str]:
    for document in documents:
        if isinstance(document, Conversation):
            raise ValueError(
                f"{settings.data!r} holds conversations, which only compress, distill and training read; choose text "
                "with text_column (--text-column)"
            )
        yield document


class Corpus:
    """Read the documents of a source by split.

    Splits of the source are used as they are. Without a validation split, whole documents are held out for validation,
    chosen by a hash of their text and the seed, so that copies of a document are always in the same split. A source of
    a single document is divided at a paragraph. Training skips documents that are also in validation or test, and
    validation skips those that are also in test.
    """

    def __init__(self, settings: DataSettings, sources: dict[str, Source], unread: Sequence[str] = ()) -> None:
        self.settings = settings
        self._sources = sources
        #: names of files and splits of the source that are not read
        self.unread = unread

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits."""
        available = set(self._sources)
        divided = {"train", "validation"} if available & {"train", "all"} else set()
        return tuple(split for split in SPLITS if split in available | divided)

    @property
    def key(self) -> Any:
        """Return a JSON value that changes whenever the documents of a split may have changed."""
        s = self.settings
        parts = {split: source.key for split, source in self._sources.items()}
        return {"sources": parts, "max_documents": s.max_documents, "held_out": [s.validation_fraction, s.seed]}

    def documents(self, split: str) -> Iterator[str]:
        """Return the non-empty documents of ``split`` in a fixed order. Raises ValueError if there is no such split."""
        if split not in self.splits:
            known = ", ".join(self.splits) or "no text"
            raise ValueError(f"{self.settings.data!r} has no {split!r} split; it has {known}")
        if split in ("all", "test"):
            return self._read(split)
        if split in self._sources and "validation" in self._sources:
            excluded = self._excluded[split]
            return (text for text in self._read(split) if _digest(text) not in excluded)
        return self._divided(split)

    def _read(self, split: str) -> Iterator[str]:
        empty = True
        for text in itertools.islice(self._sources[split].documents(), self.settings.max_documents):
            if text.strip():
                empty = False
                yield encodable(text)
        if empty:
            place = "it" if split == "all" else f"its {split!r} split"
            raise ValueError(f"{self.settings.data!r} has no text in {place}")

    def _divided(self, split: str) -> Iterator[str]:
        # Without a validation split, documents are held out from the source's training documents.
        if isinstance(self._single_document, Conversation):
            raise ValueError(f"{self.settings.data!r} is one conversation, which cannot be divided; read it whole")
        if self._single_document:
            if part := _divide_document(self._single_document, self.settings.validation_fraction)[split]:
                yield part
            return
        excluded = self._excluded["validation"]
        for text in self._read(self._divided_split):
            digest = _digest(text)
            if digest not in excluded and (digest in self._held_out) == (split == "validation"):
                yield text

    @property
    def _divided_split(self) -> str:
        return "all" if "all" in self._sources else "train"

    @cached_property
    def _excluded(self) -> dict[str, set[bytes]]:
        test = {_digest(text) for text in self._read("test")} if "test" in self._sources else set()
        validation = {_digest(t) for t in self._read("validation")} if "validation" in self._sources else set()
        return {"train": test | validation, "validation": test}

    @cached_property
    def _sizes(self) -> dict[bytes, int]:
        excluded = self._excluded["validation"]
        sizes: dict[bytes, int] = {}
        for text in self._read(self._divided_split):
            digest = _digest(text)
            if digest not in excluded:
                sizes[digest] = sizes.get(digest, 0) + len(text)
        if not sizes:
            raise ValueError(f"every training document of {self.settings.data!r} is also in its test split")
        return sizes

    @cached_property
    def _single_document(self) -> str | None:
        if len(self._sizes) != 1:
            return None
        return next(text for text in self._read(self._divided_split) if _digest(text) in self._sizes)

    @cached_property
    def _held_out(self) -> set[bytes]:
        salt = str(self.settings.seed).encode()
        order = sorted(self._sizes, key=lambda key: hashlib.blake2b(key, key=salt, digest_size=16).digest())
        target = self.settings.validation_fraction * sum(self._sizes.values())
        chosen: set[bytes] = set()
        characters = 0
        for digest in order:  # whole documents, until their share is within a tenth of the target
            if characters + self._sizes[digest] <= 1.1 * target:
                chosen.add(digest)
                characters += self._sizes[digest]
            if characters >= 0.9 * target:
                break
        return chosen or {min(order, key=self._sizes.__getitem__)}


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.strip().encode(), digest_size=16).digest()


def _divide_document(text: str, fraction: float) -> dict[str, str]:
    """Divide a document at the end of a paragraph, line or word: its head is for training, its tail for validation."""
    target = round(len(text) * (1 - fraction))
    for separator in ("\n\n", "\n", " "):
        ends = [
            at + len(separator) for at in (text.rfind(separator, 0, target), text.find(separator, target)) if at >= 0
        ]
        nearest = min(ends, key=lambda end: abs(end - target), default=0)
        if abs(nearest - target) <= fraction * len(text) / 2:
            return {"train": text[:nearest], "validation": text[nearest:]}
    return {"train": text[:target], "validation": text[target:]}
