"""Convert tokenizers to GGUF for llama.cpp: byte-level BPE, or SentencePiece's BPE by scores."""

import itertools
import json
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from relinear.data.tokenizers import encode, text_start
from relinear.settings.messages import warn_user
from relinear.system.text import some_names

#: What llama.cpp knows: settings as in tokenizer.json, and its name for them; SentencePiece's kind has none, and says
#: whether a space goes before a text. A tokenizer must match one of these exactly: one that is only similar splits rare
#: texts differently, which nobody would notice.
_KNOWN = json.loads((Path(__file__).parent / "gguf_tokenizers.json").read_text(encoding="utf-8"))
#: settings of a BPE model that change its result if they are set
_SETTINGS = ("type", "ignore_merges", "byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix")
#: bytes that occur in no text, as byte-level BPE writes them
_NO_TEXT = set("ÀÁõö÷øùúûüýþÿ")
_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}


def tokenizer_fields(tokenizer: Any, entries: int) -> dict[str, Any]:
    """Return a tokenizer's fields in a GGUF file, by their names after ``tokenizer.ggml.``.

    Args:
        tokenizer: of transformers.
        entries: of the model's embedding; those that are no tokens are unused.

    Raises:
        ValueError: if llama.cpp does not know such a tokenizer, or would make other tokens of a text.
    """
    from gguf import TokenType

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("a GGUF file needs a fast tokenizer: pass tokenizer=AutoTokenizer.from_pretrained(...)")
    described = json.loads(backend.to_str())
    known = _known(described)
    vocabulary = tokenizer.get_vocab()
    is_byte_level = "pre" in known
    _check_expressible(described, is_byte_level)
    if beyond := [token for token, number in vocabulary.items() if number >= entries]:
        raise ValueError(
            f"the tokenizer has tokens beyond the {entries} of the model: {len(beyond)}, such as {beyond[0]!r}"
        )
    tokens, kinds = [f"[unused{number}]" for number in range(entries)], [TokenType.UNUSED] * entries
    for token, number in vocabulary.items():
        is_byte = not is_byte_level and token in _BYTE_TOKENS
        tokens[number], kinds[number] = token, TokenType.BYTE if is_byte else TokenType.NORMAL
    for token in described["added_tokens"]:
        kinds[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        if not is_byte_level:  # llama.cpp looks for it in the text as it is, where spaces are spaces
            tokens[token["id"]] = token["content"].replace("▁", " ")
    fields: dict[str, Any] = {"tokens": tokens, "token_type": kinds, **_added_around(tokenizer)}
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            fields[f"{key}_token_id"] = number
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in described["model"]["merges"]]
    if is_byte_level:
        return fields | {"model": "gpt2", "pre": known["pre"], "merges": [" ".join(pair) for pair in merges]}
    ranks = _ranks(merges, described)
    scores = [-float(ranks.get(token, 0)) for token in tokens]
    return fields | {"model": "llama", "add_space_prefix": known["add_space_prefix"], "scores": scores}


def _known(described: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of ``_KNOWN`` for these settings, which llama.cpp supports."""
    settings = {key: value for key in _SETTINGS if (value := described["model"].get(key))}
    of_model = ", ".join(f"{key}={value}" for key, value in settings.items())
    for kind in ("normalizer", "pre_tokenizer"):
        step = described[kind]
        steps = [] if step is None else step.get(f"{kind.replace('_', '')}s", [step])
        # trim_offsets says where tokens are, not which; llama.cpp leaves Unicode's composition to the text
        stated = [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
        settings[f"{kind}s"] = [step for step in stated if step != {"type": "NFC"}]
    if (known := next((entry for entry in _KNOWN if entry["settings"] == settings), None)) is not None:
        return known
    names = ", ".join(dict.fromkeys(entry["pre"] for entry in _KNOWN if "pre" in entry))
    steps = [step["type"] for step in settings["normalizers"] + settings["pre_tokenizers"]]
    raise ValueError(
        f"llama.cpp knows no tokenizer with these settings: {of_model} after {', '.join(steps) or 'nothing'}. Files "
        f"take SentencePiece's BPE, and byte-level BPE that cuts text as one of {names} does. Compress without --for "
        "(reader='relinear'), or call relinear.fold_(model) and convert it by llama.cpp's own script"
    )


def _check_expressible(described: dict[str, Any], is_byte_level: bool) -> None:
    inexpressible, dropped = list[str](), list[str]()
    for token in described["added_tokens"]:
        for key in ("lstrip", "rstrip", "single_word"):
            if token[key]:
                problems = dropped if token["special"] and key != "single_word" else inexpressible
                problems.append(f"{key} of {token['content']!r}")
    if dropped:
        warn_user(f"llama.cpp keeps spaces beside special tokens, which the tokenizer drops ({some_names(dropped, 3)})")
    units = set(ByteLevel.alphabet()) - _NO_TEXT if is_byte_level else _BYTE_TOKENS
    if units - set(described["model"]["vocab"]) and (described["model"].get("unk_token") or not is_byte_level):
        inexpressible.append("bytes without a token")  # of which it makes unk_token, and llama.cpp nothing
    if inexpressible:
        listed = some_names(inexpressible, 3)
        raise ValueError(f"the tokenizer has {listed}, which no GGUF file expresses; call relinear.fold_(model)")


def _ranks(merges: list[list[str]], described: dict[str, Any]) -> dict[str, int]:
    """Return the rank of each merged token: SentencePiece merges the pair that gives the token of lowest rank."""
    products = [left + right for left, right in merges]
    in_turn = list(dict.fromkeys(products))
    runs = sum(product != before for product, before in itertools.pairwise(["", *products]))
    vocabulary = described["model"]["vocab"]
    whole = _BYTE_TOKENS.union(token["content"] for token in described["added_tokens"])
    splits = sum(
        token[:at] in vocabulary and token[at:] in vocabulary
        for token in vocabulary.keys() - whole
        for at in range(1, len(token))
    )
    if runs != len(in_turn) or splits != sum(product not in whole for product in products):
        raise ValueError(
            "the tokenizer's merges are not those of a SentencePiece model: a GGUF file holds one score a token, so "
            "all merges that make a token must follow each other; call relinear.fold_(model)"
        )
    return {product: rank for rank, product in enumerate(in_turn)}


def _added_around(tokenizer: Any) -> dict[str, bool]:
    """Return whether the tokenizer adds BOS before a text and EOS after it, found by encoding one."""
    plain, whole = (encode(tokenizer, ["a"], add_special_tokens=special)[0] for special in (False, True))
    before, bos, eos = text_start(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id
    after = whole[len(before) + len(plain) :]
    if before not in ([], [bos]) or after not in ([], [eos]):
        raise ValueError(
            f"the tokenizer makes {whole} of a text whose tokens are {plain}. A GGUF file can only say that the BOS "
            f"token ({bos}) stands before a text and the EOS token ({eos}) behind it; call relinear.fold_(model)"
        )
    return {"add_bos_token": bool(before), "add_eos_token": bool(after)}
