"""How far short runs decide: how often the order of two arms at few tokens was their order at more, from the records.

Counted are pairs of arms that one study trained at both budgets; the order is that of mean losses over seeds. A pair is
distinguishable if the interval of its short runs (Student's t over paired seeds) excludes zero. Intervals of shares are
Wilson's, as if pairs were independent. They share arms, so that the intervals are too narrow.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from measured import folded, mean, read, signed, table
from relinear.system.confidence import half_width

#: study -> tokens -> the record of its runs
STUDIES = {
    "CCL, equal parameters": dict.fromkeys((300_000, 1_000_000, 3_000_000), "ccl/budgets/runs.json"),
    "HDPL, warm-up 0.1": {
        **dict.fromkeys((300_000, 1_000_000), "hdpl/budgets/runs.json"),
        5_000_000: "hdpl/claims-5M/runs.json",
    },
    "HDPL, tuned in all": {
        300_000: "hdpl/plan/runs.json",
        1_000_000: "hdpl/plan-5M/runs.json",
        5_000_000: "hdpl/plan-5M-seeds/runs.json",
    },
    "Transponder": {300_000: "transponder/plan/runs.json", 1_000_000: "transponder/plan-5M/runs.json"},
    "Rotors": {250_000: "rotor/control/runs.json", 1_000_000: "rotor/control-1M/runs.json"},
}
#: from which budgets to which, in tokens: least and most of each
SPANS = (
    ((250_000, 300_000), (1_000_000, 1_000_000)),
    ((250_000, 300_000), (3_000_000, 5_000_000)),
    ((1_000_000, 1_000_000), (3_000_000, 5_000_000)),
)


@dataclasses.dataclass(frozen=True)
class Pair:
    """The first arm's loss minus the second's, by seed, in short and in long runs of a study."""

    study: str
    first: str
    second: str
    tokens: tuple[int, int]
    short: Sequence[float]
    long: float

    @property
    def same(self) -> bool:
        """Whether both have one order."""
        return (mean(self.short) < 0) == (self.long < 0)

    @property
    def apart(self) -> bool:
        """Whether the short runs tell the arms apart."""
        half = half_width(self.short)
        return half is not None and abs(mean(self.short)) > half


def _losses(record: Mapping[str, Any], tokens: int) -> dict[str, list[float]]:
    """Arm -> validation loss by seed, as far as its runs have ended."""
    for budget in record.get("budgets") or ():
        if budget["tokens"] == tokens:
            return {entry["name"]: entry["validation_loss"]["values"] for entry in budget["entries"]}
    ended = {
        name: [run["validation_loss"] for _, run in sorted(seeds.items()) if run["status"] == "done"]
        for name, seeds in record["runs"].items()
    }
    return {name: losses for name, losses in ended.items() if losses}


def pairs(short: tuple[int, int], long: tuple[int, int]) -> list[Pair]:
    """Every pair that was trained at a budget within ``short`` and one within ``long``."""
    found = []
    for study, records in STUDIES.items():
        at = {tokens: _losses(read(name), tokens) for tokens, name in records.items()}
        few = next((tokens for tokens in at if short[0] <= tokens <= short[1]), None)
        many = next((tokens for tokens in at if long[0] <= tokens <= long[1]), None)
        if few is None or many is None:
            continue
        both = [name for name in at[few] if name in at[many]]
        for first, second in itertools.combinations(both, 2):
            gaps = [a - b for a, b in zip(at[few][first], at[few][second], strict=True)]
            later = mean(at[many][first]) - mean(at[many][second])
            found.append(Pair(study, first, second, (few, many), gaps, later))
    return found


def same(found: Sequence[Pair]) -> int:
    """How many kept their order."""
    return sum(pair.same for pair in found)


def wilson(right: int, of: int) -> tuple[float, float]:
    """Wilson's interval of 95 % of a share."""
    z = 1.96
    middle, width = right + z * z / 2, z * math.sqrt(right * (of - right) / of + z * z / 4)
    return (middle - width) / (of + z * z), (middle + width) / (of + z * z)


def _share(found: Sequence[Pair]) -> str:
    if not found:
        return "–"
    low, high = wilson(same(found), len(found))
    return f"{same(found)} of {len(found)}, {same(found) / len(found):.0%} [{low:.0%}, {high:.0%}]"


def _span(ends: tuple[int, int]) -> str:
    return " to ".join(f"{tokens / 1e6:g}" for tokens in dict.fromkeys(ends)) + " M"


def in_page() -> str:
    """What the page of claims says of short runs."""
    lines = []
    for short, long in SPANS:
        found = pairs(short, long)
        told = [pair for pair in found if pair.apart]
        studies = ", ".join(dict.fromkeys(pair.study.partition(",")[0] for pair in found))
        lines.append([_span(short), _span(long), _share(found), _share(told), studies])
    rows = [
        [pair.study, f"{pair.first} minus {pair.second}", *_gaps(pair), "yes" if pair.same else "**no**"]
        for short, long in SPANS[1:]
        for pair in pairs(short, long)
    ]
    head = ["study", "models", "short: tokens, gap", "long: tokens, gap", "same order"]
    return "\n\n".join(
        [
            table(["short run", "long run", "same order", "of those distinguishable", "studies"], lines),
            folded(f"Table of the {len(rows)} comparisons with 3 and 5 M tokens", table(head, rows)),
        ]
    )


def _gaps(pair: Pair) -> list[str]:
    half = half_width(pair.short)
    within = "" if half is None else f" ± {half:.3f}"
    few, many = (f"{tokens / 1e6:g} M" for tokens in pair.tokens)
    return [f"{few}, {signed(mean(pair.short), 3)}{within}", f"{many}, {signed(pair.long, 3)}"]
