"""Read the texts of a compression as blocks of tokens, spread over documents: to calibrate, heal and evaluate on.

A text's first tokens are one document, so documents take turns, in an order that the seed decides. A long document
gives excerpts of a block each, from places that the seed decides. Half of the documents calibrate and heal, the other
half evaluate. If the first half is too short, the end of the second is used, too.
"""

# Legend: N blocks, T tokens per block

import dataclasses
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relinear.compression.calibrate import model_fingerprint
from relinear.compression.settings import CompressSettings
from relinear.compression.storage import load_tensors, save_tensors
from relinear.contract.module_state import eval_mode
from relinear.data.chat import Conversation, TerminatedText
from relinear.data.tokenizers import encode_documents, text_start, windows
from relinear.distill.record import iter_documents

#: documents read for each block of calibration, if there are so many; and the most characters
DOCUMENTS_PER_BLOCK, MAX_CHARACTERS = 4, 2**26
#: windows and documents to evaluate on
MIN_WINDOWS, MIN_DOCUMENTS = 30, 6
#: the kind of text that the model writes itself, as ``Excerpt.corpus``
SAMPLED = "sampled"
#: texts that the model writes at a time
SAMPLED_AT_ONCE = 16
#: characters of a document's sections for each token of a block: more than one block in most texts
CHARACTERS_PER_TOKEN = 8


class Excerpt(NamedTuple):
    """Locate the beginning of a block: corpus, document, and position there in characters or token ids."""

    corpus: str
    document: int
    start: int


#: where a block begins, and its token ids
_Block = tuple[Excerpt, list[int]]


@dataclasses.dataclass(frozen=True)
class CompressionData:
    """Token ids (N, T) for calibration, healing and evaluation.

    Attributes:
        blocks: for calibration.
        healing: for healing.
        evaluation: for evaluation.
        unseen: whether the blocks for evaluation are in none of the others.
        excerpts: where the blocks for calibration begin.
        evaluation_excerpts: where those for evaluation begin.
        elsewhere: token ids of other texts to evaluate on, by name.
    """

    blocks: Tensor
    healing: Tensor
    evaluation: Tensor
    unseen: bool
    excerpts: tuple[Excerpt, ...]
    evaluation_excerpts: tuple[Excerpt, ...]
    elsewhere: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return where the texts come from, as JSON values."""
        return {name: [e._asdict() for e in getattr(self, name)] for name in ("excerpts", "evaluation_excerpts")}

    @property
    def kinds(self) -> list[int]:
        """Return the number of each calibration block's corpus: each corpus counts as a kind of text."""
        names = list(dict.fromkeys(excerpt.corpus for excerpt in self.excerpts))
        return [names.index(excerpt.corpus) for excerpt in self.excerpts]

    @property
    def remarks(self) -> list[str]:
        """Return warnings about how far figures on these texts can be trusted."""
        remarks = list[str]()
        if len({excerpt.corpus for excerpt in self.excerpts} - {SAMPLED}) == 1:
            remarks.append(
                "calibrated on one kind of text; the loss on other kinds may be higher: give --data several times, "
                "with different kinds of text"
            )
        if not self.unseen:
            remarks.append("the corpus is too small to hold text out: the result is evaluated on its calibration text")
        elif shared := {e[:2] for e in self.evaluation_excerpts} & {e[:2] for e in self.excerpts}:
            remarks.append(f"documents that both calibrate and evaluate, by different parts: {len(shared)}")
        windows, documents = len(self.evaluation_excerpts), len({e[:2] for e in self.evaluation_excerpts})
        if windows < MIN_WINDOWS or documents < MIN_DOCUMENTS:
            count = f"{windows} window{'s' * (windows != 1)} of {documents} document{'s' * (documents != 1)}"
            needed = f"{MIN_WINDOWS} windows of {MIN_DOCUMENTS} documents"
            remarks.append(f"evaluated on {count}; intervals need {needed}")
        return remarks


@torch.no_grad()
def with_sampled_text(corpus: CompressionData, model: Any, folder: Path, seed: int) -> CompressionData:
    """Return a corpus of one kind with every second block of its calibration written by the model, as another kind.

    The model continues the first token of the block, at temperature 1. Its text is stored in ``folder``.
    """
    replaced = corpus.blocks[1::2]
    path = folder / f"{SAMPLED}-{model_fingerprint(model, corpus.blocks, [], {'seed': seed})[:16]}.safetensors"
    if not path.is_file():
        new = replaced.shape[1] - 1
        with torch.random.fork_rng(), eval_mode(model):
            torch.manual_seed(seed)
            starts = replaced[:, :1].to(next(model.parameters()).device).split(SAMPLED_AT_ONCE)
            options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
            options |= {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
            sampled = torch.cat([model.generate(ids, attention_mask=torch.ones_like(ids), **options) for ids in starts])
        save_tensors(path, {"ids": sampled})
    blocks, excerpts = corpus.blocks.clone(), list(corpus.excerpts)
    blocks[1::2] = load_tensors(path)["ids"]
    excerpts[1::2] = [Excerpt(SAMPLED, number, 0) for number in range(len(replaced))]
    return dataclasses.replace(corpus, blocks=blocks, excerpts=tuple(excerpts))


class Documents:
    """Hold the documents of one corpus that are read so far; divide them into sections, and take blocks of these."""

    def __init__(self, name: str, data: Iterable[Any], tokenizer: Any, settings: CompressSettings) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.length = settings.sequence_length
        self.seed = settings.seed
        self.items = iter_documents([data] if isinstance(data, str) else data, tokenizer)
        #: what was read, as text or token ids
        self.documents: list[Any] = []
        #: token ids that stand before each text
        self.prefix: list[int] = []
        #: characters read so far
        self.characters = 0
        #: number of documents read for calibration (the same whatever healing and evaluation need)
        self.calibration_documents = 0

    def read(self, blocks: int, count: int) -> None:
        """Read several documents for each of ``blocks``, and tokens for ``count`` blocks, or all there are.

        The first documents depend on ``blocks`` alone, so that the same text calibrates whatever else is asked for.
        """
        self._read_until(blocks, max(DOCUMENTS_PER_BLOCK * blocks, 4 * MIN_DOCUMENTS))
        self.calibration_documents = len(self.documents)
        self._read_until(count, 0)

    def _read_until(self, blocks: int, documents: int) -> None:
        least = blocks * self.length * 2 * CHARACTERS_PER_TOKEN
        while self.characters < least or (self.characters < MAX_CHARACTERS and len(self.documents) < documents):
            if (item := next(self.items, None)) is None:
                return
            if not self.documents and isinstance(item, str):  # token ids are used unchanged
                self.prefix = text_start(self.tokenizer)
            self.documents.append(item)
            self.characters += len(item) * (1 if isinstance(item, str) else CHARACTERS_PER_TOKEN)

    def halves(self) -> tuple[list[Excerpt], list[Excerpt]]:
        """Return the sections of calibration and of evaluation documents; of a single document, its two halves."""
        order = random.Random(self.seed).sample(range(self.calibration_documents), self.calibration_documents)
        order += range(self.calibration_documents, len(self.documents))
        by_document = [self._sections(at) for at in order]
        if len(order) == 1:
            middle = -(-len(by_document[0]) // 2)
            by_document = [by_document[0][:middle], by_document[0][middle:]]
        return self._shuffled(by_document[::2]), self._shuffled(by_document[1::2])

    def _sections(self, document: int) -> list[Excerpt]:
        item = self.documents[document]
        step = CHARACTERS_PER_TOKEN * self.length if isinstance(item, str) else self.length
        length = 1 if isinstance(item, Conversation) else max(1, len(item))  # a conversation is one section
        return [Excerpt(self.name, document, at) for at in range(0, length, step)]

    def _shuffled(self, by_document: Sequence[list[Excerpt]]) -> list[Excerpt]:
        """Return one section of each document, then another of each, and so on."""
        for sections in by_document:
            if sections:
                random.Random(f"{self.seed} {sections[0].document}").shuffle(sections)
        return _in_turns(by_document)

    def encode(self, section: Excerpt) -> list[int]:
        """Return token ids of a section; the words at its ends are whole."""
        item, length = self.documents[section.document], self.length
        if not isinstance(item, str):
            return item[section.start : section.start + length]
        if not isinstance(item, Conversation) and len(item) > CHARACTERS_PER_TOKEN * length:
            start, end = (_word(item, at) for at in (section.start, section.start + CHARACTERS_PER_TOKEN * length))
            item = item[start:] if end >= len(item) else TerminatedText(item[start:end])
        return [int(i) for array in encode_documents(self.tokenizer, [item]) for i in array]

    def take(self, sections: list[Excerpt], count: int, last: bool = False) -> list[_Block]:
        """Take ``count`` blocks, or all there are: one of each section, its remainder only if that is too little.

        Args:
            sections: to take from; those that are used are removed.
            count: number of blocks to take.
            last: whether to begin at the end of the list.
        """
        first_blocks, second_blocks = list[_Block](), list[_Block]()
        short_ids, short_sections = list[int](), list[Excerpt]()
        while sections and len(first_blocks) < count:
            section = sections.pop(-1 if last else 0)
            ids = self.encode(section)
            blocks = [(section, window) for _, _, window in windows(ids, self.prefix, self.length)]
            first_blocks, second_blocks = first_blocks + blocks[:1], second_blocks + blocks[1:]
            if not blocks:  # short documents make blocks together
                short_ids, short_sections = short_ids + ids, [*short_sections, section]
            if (cut := next(windows(short_ids, self.prefix, self.length), None)) is not None:
                first_blocks.append((short_sections[0], cut[2]))
                short_ids, short_sections = short_ids[cut[1] :], [section]
        return (first_blocks + second_blocks)[:count]

    def in_order(self) -> tuple[list[_Block], int]:
        """Return all blocks in order, documents joined, and the number of tokens."""
        joined: list[tuple[Excerpt, int]] = []
        for document in range(len(self.documents)):
            for section in self._sections(document):
                joined += [(section, token) for token in self.encode(section)]
        cut = windows([token for _, token in joined], self.prefix, self.length)
        return [(joined[begin][0], window) for begin, _, window in cut], len(joined)


def _in_turns(lists: Iterable[list[Excerpt]]) -> list[Excerpt]:
    """Return the first of each list, then the second of each, and so on."""
    return [section for turn in itertools.zip_longest(*lists) for section in turn if section is not None]


def _word(text: str, at: int) -> int:
    """Return the position of the next word, if it is near."""
    space = text.find(" ", at, at + 40) if 0 < at < len(text) else -1
    return at if space < 0 else space


def read_corpus(
    texts: Iterable[Any] | Mapping[str, Iterable[Any]],
    tokenizer: Any,
    settings: CompressSettings,
    plan_only: bool,
) -> CompressionData:
    """Return the corpus; if no text remains to evaluate on, the last calibration blocks are used.

    Several corpora give a block each in turns.

    Raises:
        ValueError: if there is no corpus, more than blocks, or one that is too short for its share; for what a
            tokenizer returns, of which each part would count as a corpus.
    """
    count, evaluation_count, length = settings.blocks, settings.evaluation_blocks, settings.sequence_length
    healing_count = 0 if plan_only else settings.heal_blocks
    corpora = texts if isinstance(texts, Mapping) else {"": texts}
    if "input_ids" in corpora:
        raise ValueError("texts is one mapping with input_ids, which is a single item of a corpus; give a list of such")
    if not corpora:
        raise ValueError("texts is an empty mapping; give one corpus or more, by name")
    if count < len(corpora):
        raise ValueError(
            f"{len(corpora)} corpora in turns, and {count} blocks of sequence_length={length}: use more tokens"
        )
    by_corpus = []
    for name, data in corpora.items():
        counts = [-(-total // len(corpora)) for total in (count, healing_count, evaluation_count)]
        try:
            by_corpus.append(_divided(Documents(name, data, tokenizer, settings), *counts))
        except ValueError as error:
            which = f"{name}, one of {len(corpora)} corpora in turns: " if len(corpora) > 1 else ""
            raise ValueError(f"{which}{error}") from error
    in_turns = (itertools.chain.from_iterable(zip(*part)) for part in zip(*by_corpus))
    calibration, healing, evaluation = map(list, in_turns)
    calibration = calibration[:count]
    unseen = bool(evaluation)
    evaluation = evaluation[:evaluation_count] or calibration[len(calibration) - evaluation_count :]
    excerpts, evaluation_excerpts = (tuple(excerpt for excerpt, _ in part) for part in (calibration, evaluation))
    return CompressionData(
        _stack(calibration, length),
        _stack(healing[:healing_count], length),
        _stack(evaluation, length),
        unseen,
        excerpts,
        evaluation_excerpts,
    )


def _divided(documents: Documents, calibrate: int, heal: int, evaluate: int) -> tuple[list[_Block], ...]:
    """Return so many blocks for each purpose, fewer to evaluate on if the corpus is short.

    Raises:
        ValueError: if it is too short for the others.
    """
    count = calibrate + heal
    documents.read(calibrate, count + evaluate)
    first_half, second_half = documents.halves()
    blocks = documents.take(first_half, calibrate)
    if len(blocks) == calibrate:
        blocks += documents.take(first_half, heal)
        blocks += documents.take(second_half, count - len(blocks), last=True)
    if len(blocks) == count:
        return sorted(blocks[:calibrate]), blocks[calibrate:], documents.take(second_half, evaluate)
    blocks, tokens = documents.in_order()  # a corpus this short has no halves: one block after the other
    if len(blocks) < count:
        needed = f"{count * documents.length:,} are to be recorded ({'tokens plus heal_tokens' if heal else 'tokens'})"
        raise ValueError(f"the corpus has {tokens:,} tokens; {needed}: give more text or lower these")
    return sorted(blocks[:calibrate]), blocks[calibrate:count], blocks[count : count + evaluate]


def _stack(blocks: Sequence[_Block], length: int) -> Tensor:
    return torch.tensor([ids for _, ids in blocks]) if blocks else torch.empty(0, length, dtype=torch.long)


def read_elsewhere(texts: Mapping[str, Iterable[Any]], tokenizer: Any, settings: CompressSettings) -> dict[str, Tensor]:
    """Return token ids (N, T) of texts to evaluate on, by name, spread over their documents."""
    if texts and not settings.evaluate:
        raise ValueError("evaluate_on names texts to evaluate on, and evaluate=False leaves that out: give one of them")
    blocks_by_name = {}
    for name, items in texts.items():
        corpus = Documents(name, items, tokenizer, settings)
        count = settings.evaluation_blocks
        try:
            corpus.read(count, count)
        except ValueError as error:
            raise ValueError(f"evaluate_on, {name}: {error}") from error
        blocks = corpus.take(_in_turns(corpus.halves()), count)
        if len(blocks) < count:
            in_order, tokens = corpus.in_order()
            blocks = in_order[:count]
        if not blocks:
            raise ValueError(f"evaluate_on, {name}: the corpus has {tokens:,} tokens, too few for a window")
        blocks_by_name[name] = _stack(sorted(blocks), settings.sequence_length)
    return blocks_by_name
