"""What the plans of results/plans looked for, what came of each, and what it changed in a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import curves
from evidence import Row, kept, rows
from measured import RESULTS, mean, read, signed, table
from relinear.compare.recipe import read_yaml

__all__ = ["plans_table"]


class Planned(NamedTuple):
    """A plan: the gap that it asks about, in words, its row, and what was said of the claim before and after.

    unit: of the gap, where it is not nats.
    """

    plan: str
    gap: str
    row: Row
    before: str
    after: str
    unit: str = ""


def _planned() -> Iterator[Planned]:
    def of(method: str, control: str, tokens: str) -> Row:
        (row,) = [r for r in rows() if (r.method, r.control, r.budget) == (method, control, tokens)]
        return row

    def of_cgt(found: dict[str, Any]) -> Row:
        return Row("CGT", "", **kept(found))

    scratch, hdpl = "Rotor from scratch", curves.apart("hdpl-plan", 300_000, "hdpl", "dense")
    yield Planned(
        "rotor",
        "rotors less low rank, 0.25 M",
        of(scratch, "low rank", "0.25 M"),
        "ahead of its controls; why is open",
        "ahead; over half of it is their network's",
    )
    yield Planned(
        "rotor-1M",
        "rotors less low rank with network, 1 M",
        of(scratch, "low rank, fixed network", "1 M"),
        "known at 0.25 M tokens alone",
        "ahead of low rank at 1 M, too; of dense not told",
    )
    yield Planned(
        "rotor-1M-arms",
        "rotors less block-Hadamard with network, 1 M",
        of(scratch, "block-Hadamard, fixed network", "1 M"),
        "no power at 0.25 M tokens",
        "ahead of block-Hadamard at 1 M, too",
    )
    yield Planned(
        "ccl",
        "CCL less dense of its size, 20.5 M",
        of("CCL", "dense of its size", "20.5 M"),
        "partly: at 1 M tokens, behind at 3 M",
        "did not hold: behind at the paper's own length",
    )
    yield Planned(
        "hdpl",
        "HDPL less dense, 0.3 M",
        Row("HDPL", "dense", **kept(hdpl), tokens=300_000),
        "partly: mostly dense's warm-up and rate",
        "partly: ahead; dense's warm-up at an end",
    )
    yield Planned(
        "hdpl-5M",
        "HDPL less dense, 1 M",
        of("HDPL", "dense, tuned in all", "1 M"),
        "partly: tuned at 0.3 M tokens alone",
        "partly: ahead at 1 M, mostly by its initialisation",
    )
    yield Planned(
        "hdpl-5M-seeds",
        "HDPL less dense, 5 M",
        of("HDPL", "dense, warm-up 0.7", "5 M"),
        "one seed at 5 M tokens",
        "open at 5 M: dense wants a shorter warm-up",
    )
    yield Planned(
        "transponder",
        "Transponder less dense, 0.3 M",
        of("Transponder", "plain model", "0.3 M"),
        "no power: too few seeds to tell",
        "did not hold: behind",
    )
    yield Planned(
        "transponder-5M",
        "Transponder less dense, 1 M",
        of("Transponder", "plain model", "1 M"),
        "behind, with a warm-up that 0.3 M chose",
        "no power: half-width not reached",
    )
    sources = read("cgt/sources-planned/report.json")
    yield Planned(
        "cgt",
        "frozen less dynamic at first, auxiliary loss",
        of_cgt(sources["aux"]["minus_dynamic"]["specialized"]["1 to 4"]),
        "no power; beside GPT-2 open",
        "no power: the paper has no figure; behind GPT-2",
    )
    yield Planned(
        "cgt-arithmetic",
        "frozen less dynamic, y regularised",
        of_cgt(read("cgt/arithmetic-planned/report.json")["differences"]["aux+reg specialized - aux+reg dynamic"]),
        "partly: at the task's ceiling alone",
        "partly: below the ceiling some is lost",
        " of the answers",
    )


def plans_table() -> str:
    """A row for each plan: effect looked for and gap found, half-widths, and the verdict on both sides."""
    lines = []
    for plan, words, row, before, after, unit in _planned():
        asked = read_yaml(RESULTS / "plans" / f"{plan}.yaml")
        assert row.bounds is not None, plan
        gap = f"{signed(mean(row.gaps), 3)} [{signed(row.bounds[0], 3)}, {signed(row.bounds[1], 3)}]"
        widths = f"{asked['effect'] / 2:.3f}; {row.half:.3f}"
        name = f"[{words}](../results/plans/{plan}.yaml)"
        lines.append([name, f"{asked['effect']:.3f}{unit}; {gap}", f"{widths}, {row.seeds} seeds", before, after])
    head = ["plan", "looked for; found [95 %]", "half-width: needed; reached", "said before", "said after"]
    return table(head, lines)
