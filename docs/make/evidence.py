"""Rules of evidence: gaps of methods to their controls, from results/gaps.yaml, and the verdict that each supports.

An interval is Student's t over paired seeds, widened by the error of the evaluation text. A gap shows "no difference"
where its half-width is below half of the paper's effect, in the same unit; otherwise it is inconclusive. One seed has
no interval and no verdict.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence

from measured import RESULTS, mean, signed, table
from relinear.settings.yaml_settings import read_yaml
from relinear.system.confidence import half_width

__all__ = ["AHEAD", "BEHIND", "INCONCLUSIVE", "NO_DIFFERENCE", "Row", "described", "in_results", "rows", "select"]

AHEAD, BEHIND, NO_DIFFERENCE, INCONCLUSIVE = "ahead", "behind", "no difference", "inconclusive"
#: bytes of English text in a token of Llama's vocabulary: the papers' nats per token are so many times ours per byte
BYTES = 4.25
#: folders whose models read bytes
_OF_BYTES = ("transponder", "cgt", "fair")
#: tokens that the papers train on
_OF_PAPER = {"HDPL": 1.31e9, "CCL": 20.5e6, "Transponder": 1.2e9, "CGT": 400_000 * 128 * 512}
#: note on a row -> its field
_NOTES = {
    "Best setting at the edge of the search": "ends",
    "Not tuned": "fixed",
    "Inconclusive: the runs differ in other settings, too": "unlike",
    "Interval without the error of the evaluation text": "lost",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A method minus its control, below zero where the method is better.

    Attributes:
        gaps: of every seed, in nats.
        record: of results/ that the gaps were read from.
        tokens: that a run was trained on; 0 where it is a fit.
        effect: the paper's, in the same unit; None where it prints none.
        where: in the paper.
        folder: of results/.
        of: seeds that a gap is the mean of, where it alone was kept.
        error: standard error of the evaluation, where losses by block were kept.
        printed: half of the interval's width where the command's own table alone was kept.
        ends: best settings at the edge of the search.
        fixed: what was not tuned.
        unlike: what else the arms differ in, so that no verdict follows.
        lost: why the error of the evaluation text is not in the interval.
        cost: FLOPs and time of a training step over the control's; FLOPs alone where it was not timed.
        drawn: whether it stands in the forest plot.
    """

    method: str
    control: str
    gaps: Sequence[float]
    record: str = ""
    tokens: float = 0
    effect: float | None = None
    where: str = ""
    folder: str = ""
    of: int = 0
    error: float = 0.0
    printed: float | None = None
    ends: str = ""
    fixed: str = ""
    unlike: str = ""
    lost: str = ""
    cost: str = ""
    drawn: bool = True

    @property
    def name(self) -> str:
        """As claims name it."""
        return f"{self.method} minus {self.control}"

    @property
    def seeds(self) -> int:
        """How many."""
        return self.of or len(self.gaps)

    @property
    def half(self) -> float | None:
        """Half the width of the interval of 95 %; None for one seed."""
        half = half_width(self.gaps) if self.printed is None else self.printed
        return None if half is None else math.hypot(half, 1.96 * self.error)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The interval of 95 %."""
        middle = mean(self.gaps)
        return None if self.half is None else (middle - self.half, middle + self.half)

    @property
    def powered(self) -> bool:
        """Whether half of the paper's effect would have been seen."""
        return self.half is not None and self.effect is not None and self.half < abs(self.effect) / 2

    @property
    def verdict(self) -> str:
        """What follows from the gaps."""
        if self.unlike or self.bounds is None:
            return INCONCLUSIVE
        if self.bounds[1] < 0:
            return AHEAD
        if self.bounds[0] > 0:
            return BEHIND
        return NO_DIFFERENCE if self.powered else INCONCLUSIVE

    @property
    def budget(self) -> str:
        """1 M, and nothing for a fit."""
        return f"{self.tokens / 1e6:.3g} M" if self.tokens else ""

    @property
    def share(self) -> str:
        """Return the share of the paper's tokens."""
        whole = _OF_PAPER.get(self.method)
        if not whole:
            return ""
        part = 100 * self.tokens / (BYTES if self.folder in _OF_BYTES else 1) / whole
        return f"{part:.0f} %" if part >= 10 else f"{part:.1g} %"


@functools.cache
def rows(drawn: bool = True) -> tuple[Row, ...]:
    """Gaps of results/gaps.yaml in their order; ``drawn``: those of the forest plot alone."""
    found = [Row(**one) for one in read_yaml(RESULTS / "gaps.yaml")["gaps"]]
    return tuple(row for row in found if row.drawn or not drawn)


def select(name: str) -> list[Row]:
    """Rows that are called so, "METHOD minus CONTROL". Raises ValueError where there is none."""
    found = [row for row in rows(drawn=False) if row.name == name]
    if not found:
        raise ValueError(f"results/gaps.yaml has no gap {name!r}")
    return found


def described(found: Sequence[Row], unit: str) -> str:
    """The paper's effect, the half-widths that were reached, and what limits the verdict."""
    effects = [abs(row.effect) for row in found if row.effect is not None]
    halves = [row.half for row in found if row.half is not None]
    where = ", ".join(dict.fromkeys(row.where for row in found if row.where))
    said = ["The paper prints no effect in this unit"]
    if effects:
        said = [f"The paper's {'smallest ' * (len(set(effects)) > 1)}effect: {min(effects):.2g} {unit} ({where})"]
    reached = " to ".join(dict.fromkeys(f"{pick(halves):.3f}" for pick in (min, max))) if halves else "none, one seed"
    said.append(f"Half-width of our interval: {reached}")
    if any(row.printed is not None for row in found):
        said.append("For one row the losses by seed are lost; its interval is the one that the command printed")
    for head, field in _NOTES.items():
        named = ", ".join(dict.fromkeys(one for row in found for one in getattr(row, field).split(", ") if one))
        said += [f"{head}: {named}"] * bool(named)
    return ". ".join(said)


def in_results() -> str:
    """The table of results/README.md."""
    lines, noted = [], collections.defaultdict[str, list[str]](list)
    for number, row in enumerate(rows(), 1):
        found = signed(mean(row.gaps), 3)
        if row.bounds is not None:
            found += f" [{signed(row.bounds[0], 3)}, {signed(row.bounds[1], 3)}]"
        for head, field in _NOTES.items():
            noted[f"{head}: {getattr(row, field)}"] += [str(number)] * bool(getattr(row, field))
        flops, _, time = row.cost.partition(", ")
        lines.append(
            [
                str(number),
                f"[{row.method}]({row.folder}/README.md) minus {row.control}",
                f"{row.budget or 'a fit'}, {row.seeds} seed{'s' * (row.seeds > 1)}",
                found,
                "–" if row.effect is None else signed(row.effect, 3),
                "–" if row.half is None else f"{row.half:.3f}",
                f"{flops or 'not counted'}, {time or 'not timed'}",
                f"**{row.verdict}**",
            ]
        )
    head = ["", "gap", "tokens, seeds", "nats [95 %]", "paper's", "half-width", "FLOPs, time", "result"]
    notes = [f"- {said} (rows {', '.join(numbers)})." for said, numbers in noted.items() if numbers]
    return table(head, lines) + "\n\n" + "\n".join(notes)
