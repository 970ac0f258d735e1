"""How far entries lie from a reference, with intervals: paired by seed and validation block, bootstrapped over both."""

# Legend: S seeds, N blocks, G groups of neighbouring blocks, R replicates

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["REPLICATES", "gap", "interval", "replicates", "too_small"]

REPLICATES = 2000
#: neighbouring blocks are of one document: they are drawn together, in so many groups at most
_GROUPS = 256
_LEVEL = 0.95


def _grouped(losses: np.ndarray) -> np.ndarray:
    """What groups of neighbouring blocks add to the mean, times their number: (S, G) of the mean of ``losses``."""
    blocks = losses.shape[1]
    groups = min(_GROUPS, blocks)
    starts = np.linspace(0, blocks, groups, endpoint=False).astype(int)
    return np.add.reduceat(losses, starts, axis=1) * (groups / blocks)


def replicates(losses: np.ndarray, count: int = REPLICATES, seed: int = 0) -> np.ndarray:
    """Bootstrapped means (R,) of losses, or of differences of losses, (S, N): seeds are drawn, then blocks.

    All seeds were evaluated on the same blocks, so one draw of blocks serves all seeds of a replicate. The same seed
    and shape give the same draws: replicates of two entries may be held against each other one by one.

    A draw of S seeds out of S spreads less than S new ones would, by (S - 1) / S in variance: for three seeds that
    matters, and deviations of seeds are made as much larger. Nothing is said about seeds where there is one.
    """
    generator = np.random.default_rng(seed)
    means, (seeds, _) = losses.mean(1, keepdims=True), losses.shape
    if seeds > 1:
        losses = losses + (math.sqrt(seeds / (seeds - 1)) - 1) * (means - means.mean())
    grouped = _grouped(losses)
    groups = grouped.shape[1]
    of_seeds = generator.multinomial(seeds, np.full(seeds, 1 / seeds), count) / seeds
    of_groups = generator.multinomial(groups, np.full(groups, 1 / groups), count) / groups
    return ((of_seeds @ grouped) * of_groups).sum(1)


def interval(values: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of replicates."""
    low, high = np.quantile(values, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)


def gap(own: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> dict[str, Any]:
    """An entry's loss less the reference's, on the same seeds and blocks: below 0 the entry is better.

    Args:
        own, reference: a seed's losses by block (N,), or (1,) its mean where blocks were not kept.

    Returns:
        mean, low and high (95 %; None for a single number), the ``values`` of the seeds, and ``standard_error``: that
        of the evaluation, over blocks with seeds averaged (None without blocks).
    """
    whole = len({len(losses) for losses in (*own, *reference)}) == 1
    pairs = zip(own, reference, strict=True)
    difference = np.stack([a - b if whole else np.atleast_1d(a.mean() - b.mean()) for a, b in pairs]).astype(float)
    seeds, blocks = difference.shape
    low, high = interval(replicates(difference)) if seeds * blocks > 1 else (None, None)
    error = float(_grouped(difference).mean(0).std(ddof=1)) / math.sqrt(min(blocks, _GROUPS)) if blocks > 1 else None
    return {
        "mean": float(difference.mean()),
        "low": low,
        "high": high,
        "values": [float(value) for value in difference.mean(1)],
        "standard_error": error,
        "blocks": blocks,
    }


def too_small(gaps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Entries whose gap is less than four paired standard errors of the evaluation: its noise may be what is seen."""
    return [
        name
        for name, found in gaps.items()
        if found["standard_error"] is not None and found["standard_error"] > abs(found["mean"]) / 4
    ]
