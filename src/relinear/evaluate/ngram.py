"""Fit an n-gram model with interpolated modified Kneser-Ney smoothing: a baseline that trained models must beat."""

# Legend: N blocks, T tokens per block, V vocabulary

from __future__ import annotations

import dataclasses

import numpy as np

# Discounts of counts of 1, 2 and more, used if too few n-grams occur to estimate them.
_DEFAULT_DISCOUNTS = (0.5, 1.0, 1.5)


@dataclasses.dataclass(frozen=True)
class _Order:
    """All n-grams of one length.

    Attributes:
        grams: code of every n-gram that occurs, in ascending order.
        discounted: count of every n-gram minus its discount.
        contexts: code of every context, in ascending order.
        totals: count of every context.
        spare: sum of every context's discounts, which shorter n-grams get.
    """

    grams: np.ndarray
    discounted: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    spare: np.ndarray

    @classmethod
    def of(cls, grams: np.ndarray, counts: np.ndarray, vocab_size: int) -> _Order:
        """Build it from n-grams in ascending order and their counts."""
        discounts = np.asarray((0.0, *_discounts(counts)))[np.minimum(counts, 3)]
        contexts = grams // vocab_size
        starts = np.flatnonzero(np.diff(contexts, prepend=-1))
        spare = np.add.reduceat(discounts, starts)
        return cls(grams, counts - discounts, contexts[starts], np.add.reduceat(counts, starts), spare)

    def interpolate(self, codes: np.ndarray, shorter: np.ndarray, vocab_size: int) -> np.ndarray:
        """Return the probability of each n-gram's last token after the others; ``shorter``: that by shorter n-grams."""
        discounted = np.where(*_look_up(self.grams, codes, self.discounted), 0.0)
        seen, totals = _look_up(self.contexts, codes // vocab_size, self.totals)
        _, spare = _look_up(self.contexts, codes // vocab_size, self.spare)
        return np.where(seen, (discounted + spare * shorter) / totals, shorter)


def _look_up(keys: np.ndarray, queries: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which of ``queries`` are among the sorted ``keys``, and their values (any value for the others)."""
    indices = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
    return keys[indices] == queries, values[indices]


def _discounts(counts: np.ndarray) -> tuple[float, ...]:
    """Return the discounts for counts of 1, of 2, and of 3 and more (Chen and Goodman 1999, equation 17)."""
    n = [int((counts == i).sum()) for i in (1, 2, 3, 4)]
    if not n[0] or not n[1]:
        return _DEFAULT_DISCOUNTS
    y = n[0] / (n[0] + 2 * n[1])
    estimates = [i - (i + 1) * y * n[i] / n[i - 1] if n[i - 1] else 0.0 for i in (1, 2, 3)]
    return tuple(estimate if 0 < estimate < i else _DEFAULT_DISCOUNTS[i - 1] for i, estimate in enumerate(estimates, 1))


def _codes(blocks: np.ndarray, order: int, vocab_size: int) -> np.ndarray:
    """Return every n-gram within a block as one number: (N, T - order + 1)."""
    count = blocks.shape[1] - order + 1
    codes = np.zeros((len(blocks), count), dtype=np.int64)
    for offset in range(order):
        codes *= vocab_size
        codes += blocks[:, offset : offset + count]
    return codes


class KneserNey:
    """An interpolated n-gram model with modified Kneser-Ney smoothing (Chen and Goodman 1999).

    The count of a longest n-gram is how often it occurs; that of a shorter one is how many tokens precede it. The
    discounts go to the next shorter n-grams, and those of single tokens to the whole vocabulary in equal parts. So
    every token has a probability in every context, and those of a context sum to one.

    Args:
        blocks: (N, T) token ids to count in; n-grams do not cross from one block into another.
        vocab_size: V, ids are below it.
        order: the n of the longest n-grams; at most T.

    Raises:
        ValueError: if there is nothing to count, ids or order are out of range, or V to the power of ``order`` exceeds
            64 bits.
    """

    def __init__(self, blocks: np.ndarray, vocab_size: int, order: int) -> None:
        blocks = np.asarray(blocks)
        if blocks.ndim != 2 or not blocks.size:
            raise ValueError(f"n-grams are counted in blocks (N, T) of token ids, got an array of shape {blocks.shape}")
        if not 1 <= order <= blocks.shape[1]:
            raise ValueError(f"order must be from 1 to the {blocks.shape[1]} tokens of a block, got {order}")
        if vocab_size**order >= 1 << 63:
            raise ValueError(f"{order}-grams of {vocab_size:,} tokens do not fit 64 bits; lower the order")
        if blocks.min() < 0 or blocks.max() >= vocab_size:
            raise ValueError(f"token ids must be from 0 to {vocab_size - 1}, got {blocks.min()} to {blocks.max()}")
        self.order, self.vocab_size = order, vocab_size
        grams, counts = np.unique(_codes(blocks, order, vocab_size), return_counts=True)
        orders = [_Order.of(grams, counts, vocab_size)]
        for shorter in range(order - 1, 0, -1):
            grams, counts = np.unique(grams % vocab_size**shorter, return_counts=True)
            orders.append(_Order.of(grams, counts, vocab_size))
        self._orders = orders[::-1]

    def losses(self, blocks: np.ndarray) -> np.ndarray:
        """Return the loss in nats (N, T - 1) of every token of ``blocks`` (N, T) after the first of its block."""
        blocks = np.asarray(blocks)
        probability = np.full(blocks.shape, 1 / self.vocab_size)
        for order, counted in enumerate(self._orders[: blocks.shape[1]], 1):
            shorter = probability[:, order - 1 :]
            codes = _codes(blocks, order, self.vocab_size)
            probability[:, order - 1 :] = counted.interpolate(codes, shorter, self.vocab_size)
        return -np.log(probability[:, 1:])
