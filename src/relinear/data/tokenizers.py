"""Load or train tokenizers (bytes, byte-pair encoding, any of transformers), encode text, divide it into windows."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relinear.data.chat import TerminatedText, encodable, render_conversations
from relinear.data.sources import hub_in_reach
from relinear.data.tasks import SYMBOLS
from relinear.hf.model_source import exists
from relinear.settings.messages import quoted
from relinear.system.text import shorten

END, PAD = "<|endoftext|>", "<|pad|>"
_MIN_BPE = 256 + 2
#: limited because a table of this size is allocated before any text is read
_MAX_BPE = 10_000_000
#: characters that byte-pair encoding is trained on; with more, merges hardly change and time grows
_TRAINING_CHARACTERS = 12_000_000
#: characters per call of the tokenizer: enough to use its threads, few enough for memory
_BATCH_CHARACTERS = 2_000_000


def bpe_size(name: str) -> int | None:
    """Return N of a tokenizer setting ``bpe:N``; None for any other setting."""
    if not name.startswith("bpe:"):
        return None
    number = name.removeprefix("bpe:").replace("_", "")
    if not number.isdecimal() or len(number) > 8 or not _MIN_BPE <= int(number) <= _MAX_BPE:
        raise ValueError(f"{name!r}: N of bpe:N is at least {_MIN_BPE} and at most {_MAX_BPE:,}, for instance bpe:8000")
    return int(number)


def check_tokenizer_name(name: str) -> str:
    """Return ``name``. Raises ValueError if it cannot name a tokenizer; whether it exists is checked at loading."""
    bpe_size(name)
    if not name.strip():
        raise ValueError("tokenizer must be 'bytes', 'bpe:N', or the name or folder of a Hugging Face tokenizer")
    return name


def _wrap(tokenizer: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=PAD)


def byte_tokenizer() -> Any:
    """Return a tokenizer whose ids are the 256 byte values and two special tokens: end of text 256, padding 257.

    It is a ``PreTrainedTokenizerFast``, saved and loaded like any other.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # maps bytes to printable characters

    characters = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True), AddedToken(PAD, special=True)])
    return _wrap(tokenizer)


def symbol_tokenizer() -> Any:
    """Return a tokenizer of the 16 symbols of ``cgt-arithmetic``; "#", which ends a task, is the end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({symbol: number for number, symbol in enumerate(SYMBOLS)}, unk_token="#"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="#")


def train_bpe(documents: Iterable[str], size: int, total_characters: int) -> Any:
    """Train a byte-level byte-pair encoding of ``size`` entries (fewer if the text yields no more), deterministically.

    Args:
        documents: the training split.
        size: entries, including 256 bytes and two special tokens.
        total_characters: size of all documents. Of a large corpus the same leading share of each document is used.
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
        name: the user's setting.
        separates: whether it must have a token that can separate documents.

    Raises:
        ValueError: if there is no such tokenizer, or if it has no such token.
    """
    if name in ("bytes", "symbols"):
        return byte_tokenizer() if name == "bytes" else symbol_tokenizer()
    if reason := _unavailable_reason(name):
        raise _tokenizer_error(name, reason)
    from transformers import AutoTokenizer

    try:
        # Without the Hub, a tokenizer that was downloaded before can still be used.
        local = Path(name).expanduser().is_dir()
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=not local and not hub_in_reach())
    except Exception as error:  # many kinds of Hub, file and parse errors, which all mean the same to a user
        raise _tokenizer_error(name, shorten(" ".join(str(error).split()) or type(error).__name__)) from error
    if separates:
        separator_id(tokenizer)
    return tokenizer


def _unavailable_reason(name: str) -> str:
    """Return why ``name`` must not be loaded, even if transformers would; "" if it may."""
    path = Path(name).expanduser()
    if exists(path) and not any(any(path.glob(part)) for part in ("*tok*", "*vocab*", "*.model")):
        return "no tokenizer was saved there"
    return "a newly trained one would have other tokens than those needed" if name.startswith("bpe:") else ""


def _tokenizer_error(name: str, reason: str) -> ValueError:
    return ValueError(
        f"cannot load the tokenizer {quoted(name)} ({reason}): it must be 'bytes', 'bpe:N', the folder of a saved "
        "tokenizer, or a name on the Hugging Face Hub, which must be reachable"
    )


def separator_id(tokenizer: Any) -> int:
    """Return the id of the token that ends a document. Raises ValueError if the tokenizer has none."""
    for value in (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id):
        if value is not None:
            return int(value)
    raise ValueError(
        f"the tokenizer {tokenizer.name_or_path!r} has no end-of-text token to separate documents; set its "
        "eos_token and save it again"
    )


def vocabulary_size(tokenizer: Any) -> int:
    """Return the number of entries that an embedding needs for all ids of the tokenizer, added tokens included."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def expected_vocabulary(name: str) -> int | None:
    """Return the vocabulary of ``bytes``, ``bpe:N`` or a saved tokenizer, before any text is read; None for ``none``.

    Raises ValueError if there is no such tokenizer.
    """
    if name == "none":  # of a task of vectors
        return None
    return bpe_size(name) or vocabulary_size(load_tokenizer(name))


def _is_byte_tokenizer(tokenizer: Any) -> bool:
    vocabulary = tokenizer.get_vocab()
    return len(vocabulary) == _MIN_BPE and vocabulary.get("Ā") == 0 and vocabulary.get(END) == 256


def _pieces(text: str) -> Iterator[str]:
    # A document longer than one batch is divided after a line end, so that memory stays bounded.
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
            ends.append(i == len(pieces) - 1 and not isinstance(document, TerminatedText))
            characters += len(part)
            if characters >= _BATCH_CHARACTERS:
                yield texts, ends
                texts, ends, characters = [], [], 0
    if texts:
        yield texts, ends


@contextlib.contextmanager
def without_truncation(tokenizer: Any) -> Iterator[Any]:
    """Yield the tokenizer's backend (None for a slow tokenizer) with truncation and padding turned off."""
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

    Lone surrogates, which no tokenizer accepts, become question marks. The tokenizer's settings do not change.
    """
    texts = [encodable(text) for text in texts]
    with without_truncation(tokenizer) as backend:
        if backend is None:
            return list(tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
        # The backend's batch method is several times faster than the wrapper, which also builds masks and offsets.
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]


def text_start(tokenizer: Any) -> list[int]:
    """Return the token ids that the tokenizer puts before every text, such as Llama's and Gemma's ``<bos>``."""
    (plain,), (complete,) = (encode(tokenizer, ["a"], add_special_tokens=special) for special in (False, True))
    starts = range(len(complete) - len(plain) + 1)
    return complete[: next((at for at in starts if complete[at : at + len(plain)] == plain), 0)]


def windows(ids: Sequence[int], start: Sequence[int], length: int) -> Iterator[tuple[int, int, list[int]]]:
    """Divide ids into windows of ``length`` that each begin with ``start``; an incomplete window at the end is dropped.

    Args:
        ids: token ids of text, without special tokens around it.
        start: ``text_start`` of the tokenizer. It counts toward ``length``, and is not added if it is there already.
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
        added = [] if list(ids[begin : begin + len(prefix)]) == prefix else prefix
        end = begin + length - len(added)
        if end > len(ids):
            return
        yield begin, end, [*added, *ids[begin:end]]
        begin = end


def encode_documents(tokenizer: Any, documents: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield the token ids of all documents in order, each ended by ``separator_id``, as arrays of varying length.

    The tokenizer's chat template renders conversations; the separator is added unless the template ends with it.
    """
    separator = separator_id(tokenizer)
    as_bytes = _is_byte_tokenizer(tokenizer)
    special = re.compile("|".join(map(re.escape, (END, PAD))))
    for texts, ends in _batches(render_conversations(tokenizer, documents)):
        # Text that spells out a special token goes through the tokenizer, which returns that token's id.
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
