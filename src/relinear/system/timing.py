"""Time functions on a busy machine: contenders take turns in one process, and ratios are computed round by round."""

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping

import torch


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of one contender over all rounds.

    Attributes:
        seconds: the median.
        ratio: the median ratio to the baseline in the same round.
        ratio_low: its lower quartile.
        ratio_high: its upper quartile.
        rounds: how often it was timed.
    """

    seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    rounds: int


def seconds_of(call: Callable[[], object], repeats: int = 1) -> float:
    """Return the mean seconds of ``repeats`` calls; waits for the GPU."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def duration(seconds: float) -> str:
    """Return a time as text, in the largest unit with a value of at least two."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"about {seconds / size:,.0f} {unit}"
    return f"about {max(seconds, 1):.0f} seconds"


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    baseline: str,
    *,
    rounds: int = 15,
    min_seconds: float = 0.1,
    warmup: int = 2,
    on_round: Callable[[int], None] = lambda done: None,
) -> dict[str, Timing]:
    """Time every contender once per round, always in the same order.

    Args:
        contenders: name -> a function without arguments that runs it once.
        baseline: the name of the contender that ratios refer to.
        rounds: number of rounds.
        min_seconds: a contender repeats within a round for about this time, so that the clock's resolution does not
            matter for short calls.
        warmup: untimed calls of each before the first round (compilation, caches, the allocator).
        on_round: called before each round with the number of rounds done.
    """
    repeats = {}
    for name, call in contenders.items():
        for _ in range(max(1, warmup)):
            call()
        repeats[name] = max(1, min(1000, round(min_seconds / max(seconds_of(call), 1e-7))))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    gc_was_enabled = gc.isenabled()
    gc.disable()
    try:
        for done in range(rounds):
            on_round(done)
            for name, call in contenders.items():
                times[name].append(seconds_of(call, repeats[name]))
    finally:
        if gc_was_enabled:
            gc.enable()
    result = {}
    for name, values in times.items():
        ratios = [value / reference for value, reference in zip(values, times[baseline], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
        result[name] = Timing(statistics.median(values), middle, low, high, rounds)
    return result
