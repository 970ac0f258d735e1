"""The forest plot of claims: gaps of methods to their controls with intervals over seeds, read from results/."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import svg
from measured import interval, losses, mean, read, signed

__all__ = ["THEMES", "Row", "in_page", "picture", "rows"]

THEMES = svg.THEMES
WIDTH, LEFT, RIGHT, STEP, TOP = 540, 224, 20, 22, 54
ALT = "Forest plot: gaps in nats of HDPL, CCL, Transponder, rotors and CGT to their controls, with intervals over seeds"
LOW, HIGH, TICKS = -0.5, 0.2, (-0.4, -0.2, 0.0, 0.2)
#: below this many seeds a mark is hollow and has no interval
SEEDS = 3


@dataclasses.dataclass(frozen=True)
class Row:
    """A method less its control: the gap of every seed in nats, and the paper's where it is in nats a token too."""

    method: str
    control: str
    budget: str
    gaps: Sequence[float]
    papers: float | None = None

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The interval of 95 % by Student's t."""
        return interval(self.gaps) if len(self.gaps) >= SEEDS else None


def rows(paper: str = "") -> list[Row]:
    """What is drawn, from top to bottom; of one paper, whose name its methods begin with, or of all."""
    return [row for row in _rows() if row.method.lower().startswith(paper)]


@functools.cache
def _rows() -> list[Row]:
    ccl = losses("ccl/claims-1M/results.json")
    hdpl = read("hdpl/claims-5M/runs.json")["runs"]
    scratch = read("rotor/scratch/runs.json")["gaps"]
    fits = {one["projection"]: one for one in read("rotor/biased.json")["rows"] if one["method"] == "rotor, double"}
    sources = read("cgt/sources/report.json")["aux"]["minus_gpt2_equal"]["mean"]
    long = read("ccl/claims-20M/runs.json")["tuning_gaps"]["ccl"]["values"]

    def at(folder: str, tokens: int, name: str) -> list[float]:
        file = "results" if folder == "transponder" else "runs"
        (budget,) = [b for b in read(f"{folder}/budgets/{file}.json")["budgets"] if b["tokens"] == tokens]
        return next(entry["gap"]["values"] for entry in budget["entries"] if entry["name"] == name)

    def less(control: str) -> list[float]:
        return [a - b for a, b in zip(ccl["ccl"], ccl[control], strict=True)]

    def last(name: str) -> float:
        return hdpl[name]["seed-0"]["validation_loss"]

    loss_of_paper, printed = 4.2838 - 4.3206, {"q": 2.629 - 2.636, "k": 2.717 - 2.700, "v": 2.818 - 2.779}
    fitted = [
        Row(
            "Rotor fitted to SmolLM2",
            f"block-Hadamard in {p}",
            "",
            fits[f"{p}_proj"]["wikitext2"]["block-Hadamard, 64 blocks"]["values"],
            printed[p],
        )
        for p in "qkv"
    ]
    warmed = read("hdpl/warmup/runs.json")["gaps"]["hdpl"]["values"]
    return [
        Row("HDPL", "dense, usual warm-up", "1 M", at("hdpl", 1_000_000, "hdpl"), loss_of_paper),
        Row("HDPL", "dense, longer warm-up", "1 M", warmed, loss_of_paper),
        Row("HDPL", "dense, twice the rate", "5 M", [last("hdpl") - last("dense-0.002")], loss_of_paper),
        Row("CCL", "dense of its width", "1 M", less("dense-64"), math.log(55.83 / 238.30)),
        Row("CCL", "dense of its size", "1 M", less("dense-equal-parameters")),
        Row("CCL", "dense of its size", "3 M", at("ccl", 3_000_000, "ccl")),
        Row("CCL", "dense of its size", "5 M", long),
        Row("Transponder", "plain model", "0.3 M", at("transponder", 300_000, "transponder-rank-2")),
        Row("Transponder", "plain model", "1 M", at("transponder", 1_000_000, "transponder-rank-2")),
        *(
            Row("Rotor from scratch", name, "0.25 M", [-one for one in scratch[entry]["values"]])
            for name, entry in (("low rank", "low_rank"), ("block-Hadamard", "block_hadamard"), ("dense", "dense"))
        ),
        *fitted,
        Row("CGT", "GPT-2, 8 % larger", "3.7 M", [sources]),
    ]


def picture(theme: str, paper: str = "") -> str:
    """The SVG, for a light or a dark page; of one paper, or of all."""
    ink, soft, line, ours, papers = THEMES[theme]
    y, parts, method = TOP, [], None
    for row in rows(paper):
        if row.method != method:
            method, y = row.method, y + 6
            parts.append(svg.text(0, y + 4, f"{method} against", ink, "start", weight=600))
            y += STEP
        parts.append(svg.text(10, y + 4, row.control, ink, "start"))
        parts.append(svg.text(LEFT - 12, y + 4, row.budget, soft, "end"))
        parts += _marks(row, y, ours, papers)
        y += STEP
    bottom = y - STEP // 2
    axis = [
        svg.line(_place(at), 44, _place(at), bottom, ink if at == 0 else line, 1.4 if at == 0 else 1) for at in TICKS
    ]
    axis += [svg.text(_place(at), bottom + 17, f"{at:+.1f}".replace("-", "−") if at else "0", soft) for at in TICKS]
    axis.append(svg.text(_place(0) - 8, 34, "← method better", soft, "end"))
    axis.append(svg.text(_place(0) + 8, 34, "worse →", soft, "start"))
    axis.append(
        svg.text((_place(LOW) + _place(HIGH)) / 2, bottom + 37, "gap in validation loss, nats a token or byte", soft)
    )
    key = [svg.circle(8, 10, ours), svg.text(18, 14, "3 seeds, 95 % interval", soft, "start")]
    key += [svg.circle(190, 10, ours, hollow=True), svg.text(203, 14, "fewer seeds", soft, "start")]
    key += [svg.diamond(302, 10, papers), svg.text(313, 14, "in the paper, at its size", soft, "start")]
    key.append(svg.text(LEFT - 12, 34, "tokens", soft, "end"))
    return svg.whole(WIDTH, bottom + 46, described(paper), [*axis, *key, *parts])


def described(paper: str = "") -> str:
    """Every gap in words, the picture's title."""
    told = [
        f"{row.method} against {row.control}{f' at {row.budget} tokens' * bool(row.budget)} {signed(mean(row.gaps), 3)}"
        for row in rows(paper)
    ]
    return f"Gaps in nats, below zero the method is better: {'; '.join(told)}."


def in_page(folder: str, paper: str = "") -> str:
    """The plot in a page, in light and in dark; ``folder``: where the pictures are, seen from the page."""
    return svg.themed(f"{folder}/{file_name(paper)}", described(paper) if paper else ALT)


def file_name(paper: str = "") -> str:
    """The name of the picture's file, without its theme."""
    return f"claims-{paper}" if paper else "claims"


def _place(value: float) -> float:
    return LEFT + (value - LOW) / (HIGH - LOW) * (WIDTH - LEFT - RIGHT)


def _marks(row: Row, y: float, ours: str, papers: str) -> list[str]:
    parts = []
    if row.papers is not None and row.papers >= LOW:
        parts.append(svg.diamond(_place(row.papers), y, papers))
    elif row.papers is not None:
        parts.append(svg.text(LEFT, y + 4, f"◆ {row.papers:.2f} ←".replace("-", "−"), papers, "start"))
    if row.bounds is not None:
        parts.append(svg.line(_place(row.bounds[0]), y, _place(row.bounds[1]), y, ours, 2.4))
    return [*parts, svg.circle(_place(mean(row.gaps)), y, ours, hollow=row.bounds is None)]
