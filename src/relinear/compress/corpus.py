"""The texts of a compression as blocks of tokens: to calibrate, to heal and to judge on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relinear.compress.settings import CompressSettings
from relinear.distill.record import token_blocks

__all__ = ["Corpus", "read_corpus", "read_elsewhere"]


class Corpus(NamedTuple):
    """Token ids (N, T): for calibration, for healing, to judge the result on, and other texts for that, by name.

    unseen: whether those that judge are in none of the others.
    """

    blocks: Tensor
    further: Tensor
    judging: Tensor
    unseen: bool
    elsewhere: dict[str, Tensor]


def read_corpus(
    texts: Iterable[Any] | Mapping[str, Iterable[Any]],
    elsewhere: dict[str, Tensor],
    tokenizer: Any,
    settings: CompressSettings,
    plan_only: bool,
) -> Corpus:
    """The corpus one part after another; where nothing is behind the others to judge on, the last of calibration."""
    count, spare = settings.blocks, settings.evaluation_blocks
    further = 0 if plan_only else settings.heal_blocks + settings.held_out_blocks
    what = "tokens plus heal_tokens and heal_held_out_tokens" if further else "tokens"
    corpora = texts if isinstance(texts, Mapping) else {"": texts}
    blocks = _in_turns(corpora, tokenizer, settings.sequence_length, count + further, what, spare)
    seen, healing, behind = blocks[:count], blocks[count : count + further], blocks[count + further :]
    unseen = len(behind) > 0
    return Corpus(seen, healing, behind if unseen else seen[-spare:], unseen, elsewhere)


def _in_turns(
    corpora: Mapping[str, Iterable[Any]], tokenizer: Any, length: int, count: int, what: str, spare: int
) -> Tensor:
    """``count`` blocks (N, T), one of each corpus after the other, and up to ``spare`` more.

    Raises:
        ValueError: if there is no corpus, more than blocks, or one that is too short for its share; for what a
            tokenizer returns, of which each part would count as a corpus.
    """
    if "input_ids" in corpora:
        raise ValueError("texts is one mapping with input_ids, which is a single item of a corpus; give a list of such")
    if not corpora:
        raise ValueError("texts is an empty mapping; give one corpus or more, by name")
    if count < len(corpora):
        raise ValueError(
            f"{len(corpora)} corpora in turns, and {count} blocks of sequence_length={length} in all ({what}): give "
            "fewer corpora, or more tokens"
        )
    shares = []
    for name, texts in corpora.items():
        try:
            each = [-(-blocks // len(corpora)) for blocks in (count, spare)]
            shares.append(token_blocks(texts, tokenizer, length, each[0], what, each[1]))
        except ValueError as error:
            which = f"{name}, one of {len(corpora)} corpora in turns: " if len(corpora) > 1 else ""
            raise ValueError(f"{which}{error}") from error
    shortest = min(len(blocks) for blocks in shares)
    return torch.stack([blocks[:shortest] for blocks in shares], 1).flatten(0, 1)[: count + spare]


def read_elsewhere(texts: Mapping[str, Iterable[Any]], tokenizer: Any, settings: CompressSettings) -> dict[str, Tensor]:
    """Token ids (N, T) of texts to be judged on, by name."""
    if texts and not settings.evaluate:
        raise ValueError("evaluate_on names texts to judge on, and evaluate=False leaves judging out: give one of them")
    found = {}
    for name, items in texts.items():
        try:
            found[name] = token_blocks(
                items, tokenizer, settings.sequence_length, 1, spare=settings.evaluation_blocks - 1
            )
        except ValueError as error:
            raise ValueError(f"evaluate_on, {name}: {error}") from error
    return found
