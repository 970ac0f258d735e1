"""Tokenizers as GGUF files hold them, for llama.cpp: byte-level BPE, or SentencePiece's BPE by scores."""

import itertools
import json
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

#: What llama.cpp knows: settings as in tokenizer.json, and its name for them; SentencePiece's kind has none, and says
#: whether a space goes before a text. A tokenizer is one of these word by word or none: a cut that is only alike gives
#: other tokens in rare texts, which nobody would notice.
_KNOWN = json.loads((Path(__file__).parent / "gguf_tokenizers.json").read_text(encoding="utf-8"))
#: settings of a BPE model that change what it does where they are set
_BPE_SETTINGS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
#: bytes that occur in no text, as byte-level BPE writes them
_NO_TEXT = set("ÀÁõö÷øùúûüýþÿ")
_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}


def tokenizer_fields(tokenizer: Any, entries: int) -> dict[str, Any]:
    """Return what a GGUF file says of a tokenizer, by the names that stand behind ``tokenizer.ggml.`` there.

    Args:
        tokenizer: of transformers.
        entries: of the model's embedding; those that are no tokens are unused.

    Raises:
        ValueError: if llama.cpp does not know such a tokenizer, or would make other tokens of a text.
    """
    from gguf import TokenType

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("a GGUF file holds the tokenizer, and that a fast one: give tokenizer=, by AutoTokenizer")
    described = json.loads(backend.to_str())
    known, bpe, vocabulary = _known(described), described["model"], tokenizer.get_vocab()
    added = {token["id"]: token for token in described["added_tokens"]}
    _check_expressible(described, "pre" in known)
    if beyond := [token for token, number in vocabulary.items() if number >= entries]:
        raise ValueError(
            f"the tokenizer has {len(beyond)} tokens beyond the {entries} of the model, such as {beyond[0]!r}"
        )
    tokens, kinds = [f"[unused{number}]" for number in range(entries)], [TokenType.UNUSED] * entries
    for token, number in vocabulary.items():
        tokens[number], kinds[number] = token, TokenType.NORMAL
        if number in added:
            kinds[number] = TokenType.CONTROL if added[number]["special"] else TokenType.USER_DEFINED
        elif "pre" not in known and token in _BYTE_TOKENS:
            kinds[number] = TokenType.BYTE
    before, after = _added_around(tokenizer)
    fields: dict[str, Any] = {"add_bos_token": before, "add_eos_token": after, "token_type": kinds}
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            fields[f"{key}_token_id"] = number
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in bpe["merges"]]
    if "pre" in known:
        return fields | {
            "model": "gpt2",
            "pre": known["pre"],
            "tokens": tokens,
            "merges": [" ".join(pair) for pair in merges],
        }
    ranks = _ranks(merges, bpe["vocab"], {token["content"] for token in added.values()})
    return fields | {
        "model": "llama",
        "add_space_prefix": known["add_space_prefix"],
        # llama.cpp looks for those in the text as it is, where spaces are spaces
        "tokens": [
            token.replace("▁", " ") if kind == TokenType.USER_DEFINED else token
            for token, kind in zip(tokens, kinds, strict=True)
        ],
        "scores": [-float(ranks.get(token, 0)) for token in tokens],
    }


def _known(described: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of what llama.cpp knows that these settings are."""
    bpe = described["model"]
    settings: dict[str, Any] = {key: bpe.get(key, False) for key in ("ignore_merges", "byte_fallback")}
    for kind in ("normalizer", "pre_tokenizer"):
        step = described[kind]
        steps = [] if step is None else step.get(f"{kind.replace('_', '')}s", [step])
        # trim_offsets says where tokens are, not which; llama.cpp leaves Unicode's composition to the text
        stated = [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
        settings[f"{kind}s"] = [step for step in stated if step != {"type": "NFC"}]
    for known in _KNOWN:
        if settings.items() <= known.items() and bpe.get("type") == "BPE":
            return known
    names = ", ".join(dict.fromkeys(known["pre"] for known in _KNOWN if "pre" in known))
    steps = [step["type"] for step in settings["normalizers"] + settings["pre_tokenizers"]]
    raise ValueError(
        f"llama.cpp knows no tokenizer with these settings: {bpe.get('type')} after "
        f"{', '.join(steps) or 'nothing'}. Files are written with SentencePiece's BPE, and with byte-level BPE that "
        f"cuts text as one of {names} does. Compress without --for (reader='relinear'), or relinear.fold_ the model "
        "and convert it by llama.cpp's own script"
    )


def _check_expressible(described: dict[str, Any], is_byte_level: bool) -> None:
    bpe = described["model"]
    units = set(ByteLevel.alphabet()) - _NO_TEXT if is_byte_level else _BYTE_TOKENS
    unlike = {f"{key}={bpe.get(key)!r}": bool(bpe.get(key)) for key in _BPE_SETTINGS}
    # of which the tokenizer makes unk_token, and llama.cpp nothing
    unlike["bytes without a token"] = bool(bpe.get("unk_token") and units - set(bpe["vocab"]))
    for token in described["added_tokens"]:
        flags = [key for key in ("lstrip", "rstrip", "single_word") if token[key]]
        unlike[f"{', '.join(flags)} of {token['content']!r}"] = bool(flags)
    if unsupported := [what for what, is_set in unlike.items() if is_set]:
        raise ValueError(
            f"the tokenizer has {'; '.join(unsupported)}, which a GGUF file cannot express; relinear.fold_ the model"
        )


def _ranks(merges: list[list[str]], vocabulary: dict[str, int], added: set[str]) -> dict[str, int]:
    """Return the rank of each token that is merged: SentencePiece merges whatever makes the token of the least."""
    products = [left + right for left, right in merges]
    in_turn = list(dict.fromkeys(products))
    runs = sum(product != before for product, before in itertools.pairwise(["", *products]))
    whole = added | _BYTE_TOKENS
    splits = sum(
        token[:at] in vocabulary and token[at:] in vocabulary
        for token in vocabulary.keys() - whole
        for at in range(1, len(token))
    )
    if runs != len(in_turn) or splits != sum(product not in whole for product in products):
        raise ValueError(
            "the tokenizer's merges are not those of a SentencePiece model, which a GGUF file holds as one score a "
            "token: every way to make it, one token after the other; relinear.fold_ the model"
        )
    return {product: rank for rank, product in enumerate(in_turn)}


def _added_around(tokenizer: Any) -> tuple[bool, bool]:
    """Return whether the tokenizer puts its BOS before a text and its EOS behind it: what it does, not says."""
    ids = tokenizer("a", truncation=False)["input_ids"]
    plain = tokenizer("a", truncation=False, add_special_tokens=False)["input_ids"]
    bos, eos = [tokenizer.bos_token_id], [tokenizer.eos_token_id]
    for before, after in ((False, False), (True, False), (False, True), (True, True)):
        if ids == bos * before + plain + eos * after:
            return before, after
    raise ValueError(
        f"the tokenizer makes {ids} of a text whose tokens are {plain}. A GGUF file can only say that the BOS token "
        f"({bos[0]}) stands before a text and the EOS token ({eos[0]}) behind it; relinear.fold_ the model"
    )
