"""Tokenizers: bytes, byte-pair encoding trained on the corpus, or any of transformers. All are real HF tokenizers."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relinear.contract.messages import quoted
from relinear.data.chat import Closed, encodable, render_conversations
from relinear.data.sources import hub_in_reach
from relinear.data.tasks import SYMBOLS
from relinear.hf.model_source import exists, is_cached, is_path
from relinear.system.text import shorten

END, PAD = "<|endoftext|>", "<|pad|>"
_SMALLEST_BPE = 256 + 2
#: a table of this size is allocated before any text is read
_LARGEST_BPE = 10_000_000
#: characters that byte-pair encoding is trained on: beyond this, merges hardly change and time grows
_TRAINING_CHARACTERS = 12_000_000
#: characters handed to the tokenizer at once: enough for its threads, little enough for memory
_BATCH_CHARACTERS = 2_000_000


def trained_size(name: str) -> int | None:
    """Return N of a tokenizer setting ``bpe:N``; None for any other setting."""
    if not name.startswith("bpe:"):
        return None
    number = name.removeprefix("bpe:").replace("_", "")
    if not number.isdecimal() or len(number) > 8 or not _SMALLEST_BPE <= int(number) <= _LARGEST_BPE:
        raise ValueError(
            f"{name!r}: N of bpe:N is at least {_SMALLEST_BPE} and at most {_LARGEST_BPE:,}, for instance bpe:8000"
        )
    return int(number)


def check_tokenizer_name(name: str) -> str:
    """Return ``name``. Raises ValueError if it cannot name a tokenizer; whether it exists is checked at loading."""
    trained_size(name)
    if not name.strip():
        raise ValueError("tokenizer must be 'bytes', 'bpe:N', or the name or folder of a Hugging Face tokenizer")
    return name


def _wrap(tokenizer: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=PAD)


def byte_tokenizer() -> Any:
    """Return a tokenizer of 256 bytes, each its own id, and two special tokens: end of text 256, padding 257.

    A ``PreTrainedTokenizerFast``: saved and loaded as any other.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # printable characters in place of bytes

    characters = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True), AddedToken(PAD, special=True)])
    return _wrap(tokenizer)


def symbol_tokenizer() -> Any:
    """Return a tokenizer of the 16 symbols of ``cgt-arithmetic``; "#", which ends a task, ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({symbol: number for number, symbol in enumerate(SYMBOLS)}, unk_token="#"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="#")


def train_bpe(documents: Iterable[str], size: int, total_characters: int) -> Any:
    """Return a byte-level byte-pair encoding of ``size`` entries (fewer if the text gives no more), deterministic.

    Args:
        documents: the training split.
        size: entries, including 256 bytes and two special tokens.
        total_characters: of all documents. Of a large corpus the same leading share of every document is used.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    share = min(1.0, _TRAINING_CHARACTERS / max(1, total_characters))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text[: int(len(text) * share) + 1] for text in documents), trainer)
    return _wrap(tokenizer)


def load_tokenizer(name: str, *, separates: bool = True) -> Any:
    """Load the tokenizer ``bytes`` or ``symbols``, or one by ``AutoTokenizer.from_pretrained``.

    Args:
        name: what a user wrote.
        separates: whether a token that could separate documents is needed.

    Raises:
        ValueError: if there is no such tokenizer, or it has no such token.
    """
    if name in ("bytes", "symbols"):
        return byte_tokenizer() if name == "bytes" else symbol_tokenizer()
    if reason := _why_none(name):
        raise _no_tokenizer(name, reason)
    from transformers import AutoTokenizer

    try:
        # Without a Hub, what was fetched before still serves.
        local = Path(name).expanduser().is_dir()
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=not local and not hub_in_reach())
    except Exception as error:  # hub, file and parse errors of many kinds: to a user there is no such tokenizer
        raise _no_tokenizer(name, shorten(" ".join(str(error).split()) or type(error).__name__)) from error
    if separates:
        separator_id(tokenizer)
    return tokenizer


def _why_none(name: str) -> str:
    """Return why ``name`` cannot be loaded, checking files only; "" if it can."""
    path = Path(name).expanduser()
    if exists(path):
        saved = any(any(path.glob(part)) for part in ("*tok*", "*vocab*", "*.model"))
        return "it is a file" if path.is_file() else "" if saved else "no tokenizer was saved there"
    if name.startswith("bpe:"):
        return "one that is trained anew has other tokens than those that are asked for"
    if is_path(name):
        return "there is no such folder"
    fetched = is_cached(name) or is_cached(name, file="tokenizer_config.json")
    return "" if fetched or hub_in_reach() else "it was not fetched before, and the Hugging Face Hub cannot be reached"


def _no_tokenizer(name: str, reason: str) -> ValueError:
    return ValueError(
        f"cannot load the tokenizer {quoted(name)} ({reason}): it must be 'bytes', 'bpe:N', a folder that a "
        "tokenizer was saved to, or a name of the Hugging Face Hub that can be reached"
    )


def separator_id(tokenizer: Any) -> int:
    """Return the id of the token that ends a document. Raises ValueError if the tokenizer has none."""
    for value in (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id):
        if value is not None:
            return int(value)
    raise ValueError(
        f"the tokenizer {tokenizer.name_or_path!r} has no end-of-text token, so documents cannot be told apart; set "
        "its eos_token and save it again"
    )


def vocabulary_size(tokenizer: Any) -> int:
    """Return entries an embedding needs for every id of the tokenizer, added tokens included."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def expected_vocabulary(name: str) -> int | None:
    """Return the vocabulary of ``bytes``, ``bpe:N`` or a saved tokenizer, before any text is read; None for ``none``.

    Raises ValueError if there is no such tokenizer.
    """
    if name == "none":  # of a task of vectors
        return None
    return trained_size(name) or vocabulary_size(load_tokenizer(name))


def _is_byte_tokenizer(tokenizer: Any) -> bool:
    vocabulary = tokenizer.get_vocab()
    return len(vocabulary) == _SMALLEST_BPE and vocabulary.get("Ā") == 0 and vocabulary.get(END) == 256


def _pieces(text: str) -> Iterator[str]:
    # A document beyond one batch is cut behind a line end, so that memory stays bounded.
    start = 0
    while len(text) - start > _BATCH_CHARACTERS:
        stop = text.rfind("\n", start, start + _BATCH_CHARACTERS) + 1 or start + _BATCH_CHARACTERS
        yield text[start:stop]
        start = stop
    yield text[start:] if start else text


def _batches(documents: Iterable[str]) -> Iterator[tuple[list[str], list[bool]]]:
    texts: list[str] = []
    ends: list[bool] = []
    characters = 0
    for document in documents:
        pieces = list(_pieces(document))
        for i, part in enumerate(pieces):
            texts.append(part)
            ends.append(i == len(pieces) - 1 and not isinstance(document, Closed))
            characters += len(part)
            if characters >= _BATCH_CHARACTERS:
                yield texts, ends
                texts, ends, characters = [], [], 0
    if texts:
        yield texts, ends


@contextlib.contextmanager
def whole_texts(tokenizer: Any) -> Iterator[Any]:
    """Return the tokenizer's backend (None for a slow one), set to truncate and pad nothing."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        yield None
        return
    truncation, padding = backend.truncation, backend.padding
    backend.no_truncation()
    backend.no_padding()
    try:
        yield backend
    finally:
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)


def encode(tokenizer: Any, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
    """Return the token ids of whole texts, without the tokenizer's truncation and padding.

    Lone surrogates, which no tokenizer takes, become question marks. The tokenizer's settings stay as they were.
    """
    texts = [encodable(text) for text in texts]
    with whole_texts(tokenizer) as backend:
        if backend is None:
            return list(tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
        # The backend's own batch is several times faster than the wrapper, which builds masks and offsets too.
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]


def text_start(tokenizer: Any) -> list[int]:
    """Return the token ids that the tokenizer puts before every text, such as Llama's and Gemma's ``<bos>``."""
    (plain,), (complete,) = (encode(tokenizer, ["a"], add_special_tokens=special) for special in (False, True))
    starts = range(len(complete) - len(plain) + 1)
    return complete[: next((at for at in starts if complete[at : at + len(plain)] == plain), 0)]


def windows(ids: Sequence[int], start: Sequence[int], length: int) -> Iterator[tuple[int, int, list[int]]]:
    """Cut ids into windows of ``length`` that each begin with ``start``; a remainder that fills none is dropped.

    Args:
        ids: of text, without special tokens around it.
        start: ``text_start`` of the tokenizer. It counts toward ``length``, and is not repeated where it stands.
        length: tokens per window.

    Yields:
        Where the window begins and ends in ``ids``, and the window.

    Raises:
        ValueError: if ``start`` leaves no room for text.
    """
    if length <= len(start):
        raise ValueError(f"the tokenizer puts {len(start)} tokens before every text; windows of {length} hold no more")
    begin, prefix = 0, list(start)
    while begin < len(ids):
        lead = [] if list(ids[begin : begin + len(prefix)]) == prefix else prefix
        end = begin + length - len(lead)
        if end > len(ids):
            return
        yield begin, end, [*lead, *ids[begin:end]]
        begin = end


def encode_documents(tokenizer: Any, documents: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield the token ids of all documents in order, each closed by ``separator_id``, as arrays of some length.

    Conversations are written by the tokenizer's chat template, and closed if that does not close them.
    """
    separator = separator_id(tokenizer)
    as_bytes = _is_byte_tokenizer(tokenizer)
    special = re.compile("|".join(map(re.escape, (END, PAD))))
    for texts, ends in _batches(render_conversations(tokenizer, documents)):
        # Text that spells out a special token goes through the tokenizer, which gives it that token's id.
        if as_bytes and not any(special.search(text) for text in texts):
            encoded: Any = [np.frombuffer(text.encode(), dtype=np.uint8) for text in map(encodable, texts)]
        else:
            encoded = encode(tokenizer, texts)
        for ids, end in zip(encoded, ends, strict=True):
            array = np.empty(len(ids) + end, dtype=np.uint32)
            array[: len(ids)] = ids
            if end:
                array[-1] = separator
            yield array
