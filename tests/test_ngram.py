"""Kneser-Ney n-grams against the same formula written out with dictionaries, and as a distribution."""

import collections
import itertools
import math

import numpy as np
import pytest

from relinear.evaluate import KneserNey

V = 5


def text(blocks: int, length: int, seed: int = 0) -> np.ndarray:
    """Tokens that lean on the one before them, so that all counts occur."""
    generator = np.random.default_rng(seed)
    ids = np.zeros((blocks, length), dtype=np.int64)
    for column in range(length):
        before = ids[:, column - 1] if column else 0
        ids[:, column] = (before + generator.geometric(0.5, blocks)) % V
    return ids


def discounts(counts) -> list[float]:
    n1, n2, n3, n4 = (sum(count == i for count in counts.values()) for i in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2) if n1 and n2 else None
    plain = [0.5, 1.0, 1.5]
    if y is None:
        return plain
    found = [1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3 if n3 else 0]
    return [d if 0 < d < i + 1 else plain[i] for i, d in enumerate(found)]


def written_out(blocks, order):
    """p(token | context) by the textbook: tuples in dictionaries, one n-gram at a time."""
    counts = {order: collections.Counter()}
    for block in blocks.tolist():
        for start in range(len(block) - order + 1):
            counts[order][tuple(block[start : start + order])] += 1
    for n in range(order - 1, 0, -1):
        counts[n] = collections.Counter(gram[1:] for gram in counts[n + 1])

    def probability(token, context):
        n = len(context) + 1
        lower = probability(token, context[1:]) if context else 1 / V
        after = {gram[-1]: count for gram, count in counts[n].items() if gram[:-1] == tuple(context)}
        if not after:
            return lower
        off = [0.0, *discounts(counts[n])]
        total = sum(after.values())
        spare = sum(off[min(count, 3)] for count in after.values())
        count = after.get(token, 0)
        return (count - off[min(count, 3)] + spare * lower) / total

    return probability


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_losses_are_those_of_the_formula_written_out(order) -> None:
    seen, new = text(40, 9), text(6, 9, seed=1)
    probability = written_out(seen, order)
    expected = [
        [-math.log(probability(token, block[max(0, at - order + 1) : at])) for at, token in enumerate(block) if at]
        for block in new.tolist()
    ]
    np.testing.assert_allclose(KneserNey(seen, V, order).losses(new), expected, rtol=1e-12)


@pytest.mark.parametrize("order", [1, 3, 5])
@pytest.mark.parametrize("blocks", [1, 60])
def test_probabilities_of_every_context_sum_to_one(order, blocks) -> None:
    model = KneserNey(text(blocks, 7), V, order)
    for context in itertools.product(range(V), repeat=3):
        last = model.losses(np.asarray([[*context, token] for token in range(V)]))[:, -1]
        assert np.exp(-last).sum() == pytest.approx(1, abs=1e-12)


def test_longer_contexts_help_where_text_leans_on_them() -> None:
    seen, new = text(500, 30), text(50, 30, seed=1)
    one, two = (KneserNey(seen, V, order).losses(new).mean() for order in (1, 2))
    entropy = -sum(p * math.log(p) for p in (0.5**k / (1 - 0.5**V) for k in range(1, V + 1)))
    assert one > two + 0.1
    assert two == pytest.approx(entropy, abs=0.05)


@pytest.mark.parametrize(
    ("blocks", "vocab_size", "order", "said"),
    [
        (np.zeros(4, dtype=int), 5, 2, r"blocks \(N, T\)"),
        (np.zeros((2, 4), dtype=int), 5, 5, "from 1 to the 4 tokens"),
        (np.zeros((2, 8), dtype=int), 1 << 20, 4, "do not fit 64 bits"),
        (np.full((2, 4), 5), 5, 2, "from 0 to 4"),
    ],
)
def test_wrong_arguments(blocks, vocab_size, order, said) -> None:
    with pytest.raises(ValueError, match=said):
        KneserNey(blocks, vocab_size, order)
