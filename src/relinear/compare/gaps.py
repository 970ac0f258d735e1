"""Compute gaps of entries to a reference with confidence intervals, paired by seed and validation block."""

# Legend: S seeds, N blocks, G groups of neighbouring blocks, R replicates

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import numpy as np

from relinear.compare.schema import Gap
from relinear.system.confidence import half_width

REPLICATES = 8000
#: neighbouring blocks are of one document: they are drawn together, in at most this many groups
_GROUPS = 256
_LEVEL = 0.95
_NORMAL = NormalDist().inv_cdf((1 + _LEVEL) / 2)


def _grouped_sums(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sums of ``losses`` (S, N) over groups of neighbouring blocks (S, G), and how many blocks each has (G,)."""
    blocks = losses.shape[1]
    starts = np.linspace(0, blocks, min(_GROUPS, blocks), endpoint=False).astype(int)
    return np.add.reduceat(losses, starts, axis=1), np.diff([*starts, blocks])


def _seed_weights(seeds: int, count: int, generator: np.random.Generator) -> np.ndarray:
    """Draw weights (R, S), rows of sum 1, so that weighted means vary as much as the mean is uncertain.

    Resampling two or three values says far too little of how much others would differ. By these weights a weighted mean
    is ``mean + s / sqrt(S) T`` for any S values with standard deviation s, T being Student's t with S - 1 degrees of
    freedom, the same draw for all entries: their differences have the t interval of paired values.
    """
    if seeds == 1:
        return np.ones((count, 1))
    half = -(-count // 2)
    normal = generator.normal(size=(half, seeds))
    normal -= normal.mean(1, keepdims=True)
    deviations = normal / np.sqrt(seeds * generator.chisquare(seeds - 1, size=(half, 1)))
    # mirror images keep the few extreme draws from lying on one side by chance
    return 1 / seeds + np.concatenate([deviations, -deviations])[:count]


def replicates(losses: np.ndarray, count: int = REPLICATES, seed: int = 0) -> np.ndarray:
    """Return replicated means (R,) of losses (S, N), or of their differences, under resampled seeds and blocks.

    Over seeds they spread by Student's t, over text by a bootstrap that draws groups of neighbouring blocks. All seeds
    were evaluated on the same blocks, so one draw of blocks serves all seeds of a replicate. The same seed and shape
    give the same draws: replicates of two entries may be compared one by one. With one seed, only
    blocks are resampled.
    """
    generator = np.random.default_rng(seed)
    sums, counts = _grouped_sums(losses)
    seed_weights = _seed_weights(len(losses), count, generator)
    group_counts = generator.multinomial(len(counts), np.full(len(counts), 1 / len(counts)), count)
    return ((seed_weights @ sums) * group_counts).sum(1) / (group_counts @ counts)


def _standard_error(difference: np.ndarray) -> float:
    """Return the standard error of the mean of ``difference`` (S, N) over blocks, its seeds averaged."""
    sums, counts = _grouped_sums(difference)
    groups, blocks = len(counts), difference.shape[1]
    residuals = sums.mean(0) - difference.mean() * counts
    return math.sqrt(groups / (groups - 1) * float((residuals**2).sum())) / blocks


def interval(values: np.ndarray) -> tuple[float, float] | None:
    """Return the 95 % interval of replicates; None for a single one."""
    if len(values) < 2:
        return None
    low, high = np.quantile(values, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)


def gap(entry_losses: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> Gap:
    """Return an entry's loss minus the reference's, on the same seeds and blocks: below 0 the entry is better.

    Args:
        entry_losses: losses of each seed by block (N,), or their mean (1,) if losses by block were not saved.
        reference: losses of the reference, in the same form.

    Returns:
        mean, low and high (95 %; None for one seed, which says nothing of others), the ``values`` of the seeds, and
        ``standard_error``: the evaluation's, over blocks with seeds averaged (None without blocks). The interval
        is that of Student's t over the paired values, widened by the evaluation's error: half-widths add as squares.
    """
    by_block = len({len(losses) for losses in (*entry_losses, *reference)}) == 1
    pairs = zip(entry_losses, reference, strict=True)
    difference = np.stack([a - b if by_block else np.atleast_1d(a.mean() - b.mean()) for a, b in pairs]).astype(float)
    mean, blocks = float(difference.mean()), difference.shape[1]
    values = [float(value) for value in difference.mean(1)]
    error = _standard_error(difference) if blocks > 1 else None
    half = half_width(values)
    if half is not None:
        half = math.hypot(half, _NORMAL * (error or 0.0))
    return {
        "mean": mean,
        "low": None if half is None else mean - half,
        "high": None if half is None else mean + half,
        "values": values,
        "standard_error": error,
        "blocks": blocks,
    }


def gap_of_means(entry_values: Sequence[float], reference: Sequence[float]) -> Gap:
    """Return the gap from one value per seed, for runs without losses by block."""
    return gap(*([np.asarray([value]) for value in values] for values in (entry_values, reference)))


def too_small(gaps: Mapping[str, Gap]) -> list[str]:
    """Return entries whose gap is below four paired standard errors of the evaluation, so it may be noise."""
    return [name for name, gap in gaps.items() if (gap["standard_error"] or 0.0) > abs(gap["mean"]) / 4]
