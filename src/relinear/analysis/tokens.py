"""Held-out text as rows of tokens, for the analyses."""

# Legend: N sequences, T tokens

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from relinear.data import DataSettings, iter_texts

DOCUMENTS = 8  # so that several are seen


@dataclasses.dataclass(frozen=True)
class HeldOutText:
    """How much of the validation text of ``data`` is looked at.

    sequences, length: N and T. fewer: of a text, or for a model, that is too short for them, take what there is.
    """

    data: DataSettings
    sequences: int = 64
    length: int = 64
    fewer: bool = False


def tokens_of(text: HeldOutText, tokenizer: Any) -> Tensor:
    """(N, T) token ids from the validation text, taken in turn from the middles of its first documents.

    Raises:
        ValueError: if the text is shorter; with ``fewer``, if it has not a single sequence.
    """
    sequences, length = text.sequences, text.length
    groups: list[list[list[int]]] = []
    rest: list[int] = []
    for document in iter_texts(text.data, "validation"):
        # Only so much of a document as can be needed.
        rest += tokenizer(document[: 20 * sequences * length], add_special_tokens=False)["input_ids"]
        rows = [rest[i : i + length] for i in range(0, len(rest) - length + 1, length)]
        if rows:
            start = max(0, len(rows) - sequences) // 2  # the middle: books begin with title pages
            groups.append(rows[start : start + sequences])
            rest = []
        if len(groups) >= DOCUMENTS and sum(map(len, groups)) >= sequences:
            break
    turns = itertools.zip_longest(*groups)
    found = [row for turn in turns for row in turn if row is not None][:sequences]
    if len(found) < (1 if text.fewer else sequences):
        raise ValueError(f"the text has only {len(found)} sequences of {length} tokens, {sequences} are asked for")
    return torch.tensor(found)
