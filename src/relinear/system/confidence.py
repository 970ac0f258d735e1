"""Compute 95 % confidence intervals of the mean of a few independent values, by Student's t."""

import functools
import math
import statistics
from collections.abc import Sequence

_LEVEL = 0.95


def _central_probability(angle: float, degrees: int) -> float:
    """Return P(|t| < sqrt(degrees) tan(angle)), by Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= k / (k + 1) * math.cos(angle) ** 2
    return (angle + math.sin(angle) * total) * 2 / math.pi if odd else math.sin(angle) * total


@functools.cache
def t_quantile(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t with ``degrees`` of freedom, by bisection."""
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _central_probability(middle, degrees) < _LEVEL else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def half_width(values: Sequence[float]) -> float | None:
    """Return half the width of the 95 % confidence interval of the mean of independent ``values``; None for one."""
    if len(values) < 2:
        return None
    return t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def seeds_needed(effect: float, std: float) -> int:
    """Return the smallest number of seeds whose ``half_width`` is below half of ``effect``.

    Args:
        effect: the difference to detect.
        std: standard deviation over seeds of the paired differences, in the same unit.
    """
    count = 2
    while t_quantile(count - 1) * std / math.sqrt(count) >= effect / 2:
        count += 1
    return count
