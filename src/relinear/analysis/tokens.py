"""Held-out text as rows of tokens, for the analyses."""

# Legend: N sequences, T tokens

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from relinear.data import DataSettings, iter_texts

__all__ = ["tokens_of"]

DOCUMENTS = 8  # so that several are seen


def tokens_of(settings: DataSettings, tokenizer: Any, sequences: int, length: int, fewer: bool = False) -> Tensor:
    """(N, T) token ids from the validation text, taken in turn from the middles of its first documents.

    Raises:
        ValueError: if the text is shorter; with ``fewer``, if it has not a single sequence.
    """
    groups: list[list[list[int]]] = []
    rest: list[int] = []
    for text in iter_texts(settings, "validation"):
        # Only so much of a document as can be needed.
        rest += tokenizer(text[: 20 * sequences * length], add_special_tokens=False)["input_ids"]
        rows = [rest[i : i + length] for i in range(0, len(rest) - length + 1, length)]
        if rows:
            start = max(0, len(rows) - sequences) // 2  # the middle: books begin with title pages
            groups.append(rows[start : start + sequences])
            rest = []
        if len(groups) >= DOCUMENTS and sum(map(len, groups)) >= sequences:
            break
    turns = itertools.zip_longest(*groups)
    found = [row for turn in turns for row in turn if row is not None][:sequences]
    if len(found) < (1 if fewer else sequences):
        raise ValueError(f"the text has only {len(found)} sequences of {length} tokens, {sequences} are asked for")
    return torch.tensor(found)
