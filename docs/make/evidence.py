"""Rules of evidence: gaps of methods to their controls, what of the paper's effect they could see, and the verdict.

An interval is Student's t over paired seeds. "Not seen" takes a half-width below half of the paper's effect, in the
same unit; else it is "no power". One seed has no interval and no verdict. A row says which best settings lay at an end
of what was tried, and what was not tuned.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import curves
import cut
from measured import losses, mean, of_text, read, signed, table
from relinear.system.student import half_width, seeds_needed

__all__ = [
    "AHEAD",
    "BEHIND",
    "NO_POWER",
    "ONE_SEED",
    "OPEN",
    "PARTS",
    "UNSCALED",
    "UNSEEN",
    "Row",
    "in_results",
    "powered",
    "rows",
    "told",
]

AHEAD, BEHIND, UNSEEN, NO_POWER, ONE_SEED, OPEN = "ahead", "behind", "not seen", "no power", "one seed", "open"
#: of English text, to a token of Llama's vocabulary: the papers' nats a token are so many times ours a byte
BYTES = 4.25
#: what CGT differed in from GPT-2 in every record so far
UNSCALED = "CGT was initialised without GPT-2's scaling of residual projections"
#: folders whose models read bytes, of which a token of the papers has several
_OF_BYTES = ("transponder", "cgt", "fair")
#: tokens that the papers train on
_OF_PAPER = {"HDPL": 1.31e9, "CCL": 20.5e6, "Transponder": 1.2e9, "CGT": 400_000 * 128 * 512}


@dataclasses.dataclass(frozen=True)
class Row:
    """A method less its control, below zero where the method is better.

    Attributes:
        gaps: of every seed, in nats.
        tokens: that a run was trained on; 0 where it is a fit.
        effect: the paper's, in the same unit; None where it prints none.
        where: in the paper.
        folder: of results/.
        of: seeds that a gap is the mean of, where it alone was kept.
        error: standard error of the evaluation, where losses by block were kept.
        printed: half of the interval's width where the command's own table alone was kept.
        ends: best settings that lay at an end of what was tried.
        fixed: what was not tuned.
        unlike: what the arms differ in beside the claim, so that no verdict follows.
        lost: why the error of the held-out text is not in the interval.
        cost: FLOPs and time of a training step over the control's, in words; FLOPs alone where it was not timed,
            and those of what takes the projection's place where it is a fit.
    """

    method: str
    control: str
    gaps: Sequence[float]
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

    def __post_init__(self) -> None:
        if self.printed is not None and len(self.gaps) > 1:
            raise ValueError(f"{self.method} less {self.control}: an interval of gaps by seed is computed, not printed")

    @property
    def seeds(self) -> int:
        """How many."""
        return self.of or len(self.gaps)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The interval of 95 %."""
        middle = mean(self.gaps)
        return None if self.half is None else (middle - self.half, middle + self.half)

    @property
    def half(self) -> float | None:
        """Half of its width: Student's t over seeds, widened by the error of the evaluation."""
        half = half_width(self.gaps) if self.printed is None else self.printed
        return None if half is None else math.hypot(half, 1.96 * self.error)

    @property
    def verdict(self) -> str:
        """What follows from the gaps."""
        if self.unlike:
            return OPEN
        if self.bounds is None:
            return ONE_SEED if self.seeds == 1 else NO_POWER
        if self.bounds[1] < 0:
            return AHEAD
        if self.bounds[0] > 0:
            return BEHIND
        return UNSEEN if powered([self]) else NO_POWER

    @property
    def budget(self) -> str:
        """1 M, and nothing for a fit."""
        return f"{self.tokens / 1e6:.3g} M" if self.tokens else ""

    @property
    def share(self) -> str:
        """Of the paper's tokens."""
        whole = _OF_PAPER.get(self.method)
        if not whole:
            return ""
        part = 100 * self.tokens / (BYTES if self.folder in _OF_BYTES else 1) / whole
        return f"{part:.0f} %" if part >= 10 else f"{part:.1g} %"


def powered(found: Sequence[Row]) -> bool:
    """Whether every row's half-width is below half of the paper's effect; not where there is none of either."""
    return bool(found) and all(
        row.half is not None and row.effect is not None and row.half < abs(row.effect) / 2 for row in found
    )


def told(found: Sequence[Row], unit: str) -> str:
    """The paper's effect, the least of several, and the half-widths that were reached."""
    effects = list(dict.fromkeys(abs(row.effect) for row in found if row.effect is not None))
    halves = [row.half for row in found if row.half is not None]
    where = ", ".join(dict.fromkeys(row.where for row in found if row.where))
    effect = "The paper prints no effect in this unit"
    if effects:
        effect = f"The paper's effect{' at its least' * (len(effects) > 1)}: {min(effects):.2g} {unit} ({where})"
    most = max(row.seeds for row in found)
    reached = "none, one seed" if most == 1 else f"none, of {most} seeds only the mean was kept"
    if halves:
        reached = " to ".join(dict.fromkeys(f"{pick(halves):.3f}" for pick in (min, max)))
    said = [effect, f"Half-width reached: {reached}"]
    said += [
        f"At {row.budget} tokens losses by seed are lost: the figure is what the command printed"
        for row in found
        if row.printed is not None
    ]
    for head, what in _NOTED.items():
        named = ", ".join(dict.fromkeys(one for row in found for one in getattr(row, what).split(", ") if one))
        said += [f"{head}: {named}"] * bool(named)
    costs = [row.cost.split(", ") for row in found if row.cost]
    flops = f"FLOPs of {'a forward pass' if any(row.tokens for row in found) else 'the projection'}"
    for what, of in zip((flops, "Time of a training step"), itertools.zip_longest(*costs), strict=False):
        least, most = (pick((one for one in of if one), key=float) for pick in (min, max))
        said.append(f"{what}, over the control's: {least}" + f" to {most}" * (least != most))
    return ". ".join(said)


#: what a row says beside its figures -> its field
_NOTED = {
    "At an end of what was tried": "ends",
    "Not tuned": "fixed",
    "Open, since the control differs in more than the claim": "unlike",
    "The interval lacks the error of the held-out text": "lost",
}


def per_byte(ours: float, theirs: float) -> float:
    """The gap of two of the paper's perplexities in nats a byte."""
    return math.log(ours / theirs) / BYTES


def per_token(nats: float, record: str) -> float:
    """The paper's nats a token in nats a token of a record's tokenizer, which says more or less at once."""
    train = read(record)["data"]["splits"]["train"]
    return nats / BYTES * train["bytes"] / train["tokens"]


def kept(found: Mapping[str, Any], sign: int = 1) -> dict[str, Any]:
    """What a row takes from a recorded gap."""
    return {"gaps": [sign * one for one in found["values"]], "error": found.get("standard_error") or 0.0}


#: of two arms that are neither the reference of their record
_LOST = "the record has no losses by block of these arms"
#: a setting that is tuned -> its word
_SETTINGS = {"learning_rate": "rate", "initializer_range": "initialisation", "warmup_ratio": "warm-up"}


def _warmed(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run with the share of its steps for warm-up."""
    return {"warmup_ratio": round(run["warmup"] / run["steps"], 1)} | dict(run) if "warmup" in run else dict(run)


def ends(record: str, named: Mapping[str, str]) -> str:
    """What of a record's chosen settings is the least or the most that was tried; ``named``: entries by their words."""
    found, said = read(record), []
    told = [*found.get("entries", ()), *(entry for one in found.get("budgets", ()) for entry in one["entries"])]
    for word, name in named.items():
        own = [entry for entry in told if entry["name"] == name]
        tried = [_warmed(run) for run in found.get("tuning", {}).get(name, ())]
        tried += [trial for entry in own if entry["tuning"] for trial in entry["tuning"]["trials"]]
        last = [_warmed(run) for run in found["runs"][name].values()] if name in found.get("runs", {}) else own
        last += [entry["tuning"] for entry in own if entry["tuning"]]
        for setting, told_as in _SETTINGS.items():
            values = {run[setting] for run in tried if run.get(setting) is not None}
            chosen = next((run[setting] for run in last if run.get(setting) is not None), None)
            if len(values) > 1 and chosen in (min(values), max(values)):
                said.append(f"{told_as} {chosen:g} of {word}")
    return ", ".join(said)


@functools.cache
def rows() -> tuple[Row, ...]:
    """Every gap to a main control, from top to bottom of the picture; ablations' are in the claims' tables."""
    ccl = losses("ccl/claims-1M/results.json")
    fits = {
        record: {one["projection"]: one for one in read(record)["rows"] if one["method"] == "rotor, double"}
        for record in ("rotor/biased.json", "rotor/fresh.json")
    }
    late = kept(read("ccl/claims-20M/runs.json")["tuning_gaps"]["ccl"])
    sources = read("cgt/sources-planned/report.json")

    def at(folder: str, tokens: int, name: str, part: str = "budgets") -> dict[str, Any]:
        (budget,) = [b for b in read(f"{folder}/{part}/runs.json")["budgets"] if b["tokens"] == tokens]
        return kept(next(entry["gap"] for entry in budget["entries"] if entry["name"] == name)) | {"tokens": tokens}

    def as_printed(folder: str, name: str) -> dict[str, Any]:
        told = read(f"{folder}/plan/runs.json")["printed"]
        apart = told["gaps"][name]
        half = (apart["high"] - apart["low"]) / 2
        return {"gaps": [apart["mean"]], "printed": half, "of": told["seeds"], "tokens": told["tokens"]}

    def less(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
        return [a - b for a, b in zip(ours, theirs, strict=True)]

    hdpl = {"effect": per_token(*_HDPL), "where": "Table 1", "folder": "hdpl"}
    gates = {"effect": per_byte(28.55, 30.31), "where": "Table 2, C4, 60M", "folder": "transponder"}
    wide = {"effect": per_token(math.log(55.83 / 238.30), "ccl/claims-1M/results.json"), "where": "Table 1"}
    #: of q, k and v: LLaMA-2, WikiText-2
    printed = {
        "block-Hadamard, 64 blocks": ("rotor/biased.json", 2.636, 2.700, 2.779),
        "low rank 1, fresh": ("rotor/fresh.json", 2.688, 3.455, 4.956),
        "low rank 4, fresh": ("rotor/fresh.json", 2.658, 2.729, 2.880),
    }
    ours = (2.629, 2.717, 2.818)
    against_equal = [at("hdpl", 1_000_000, name)["gaps"] for name in ("hdpl", "dense-equal-parameters")]
    as_before, by_tenths = "initialisation, warm-up", "warm-up, the rest in runs of a tenth"
    short = {name: found["seed-0"] for name, found in read("hdpl/claims-5M/runs.json")["runs"].items()}
    transponder = {"Transponder": "transponder-rank-2", "the plain model": "dense"}

    def cost(plan: str, own: str, other: str) -> str:
        """FLOPs of a forward pass and time of a training step over another arm's, in turns in one process."""
        of = read("costs.json").get(plan) or {e["name"]: e for e in read("ccl/claims-1M/results.json")["entries"]}
        flops = of[own]["flops_per_token"] / of[other]["flops_per_token"]
        if "speed" not in of[own]:
            return f"{flops:.2f}"
        return f"{flops:.2f}, {of[other]['speed']['train_ratio'] / of[own]['speed']['train_ratio']:.2f}"

    def tuned(part: str, tokens: int, control: str, entry: str, name: str, **more: Any) -> Row:
        """HDPL less an arm of one of its plans."""
        more |= kept(curves.apart(f"hdpl-{part}-plan", tokens, "hdpl", entry)) | {
            "cost": cost("hdpl-5M", "hdpl", entry)
        }
        more["ends"] = ends(f"hdpl/plan-{part}/runs.json", {"HDPL": "hdpl", name: entry})
        return Row("HDPL", control, tokens=tokens, **more)

    def beside(name: str, entry: str, tokens: float = 0.25e6) -> Row:
        """Rotors from scratch less an arm of their plan."""
        plan, fixed = ("rotor-control", "warm-up") if tokens < 1e6 else ("rotor-1M", "warm-up, initialisation")
        record, named = cut.RECORDS[plan], {"rotors": "rotor", name.replace(",", " with the"): entry}
        arms = cut.controls(plan)
        error, gaps = of_text(read(record)["runs"], "rotor", entry), less(arms["rotor"], arms[entry])
        more = {"ends": ends(record, named), "fixed": fixed, "cost": cost("rotor", "rotor", entry)}
        return Row("Rotor from scratch", name, gaps, tokens, folder="rotor", error=error, **more)

    def of_arm(arm: str) -> dict[str, Any]:
        """CCL less an arm at 1 M tokens."""
        record = read("ccl/claims-1M/results.json")
        if arm == record["reference"]:
            return kept(next(one["gap"] for one in record["entries"] if one["name"] == "ccl")) | {"tokens": 1e6}
        return {"gaps": less(ccl["ccl"], ccl[arm]), "tokens": 1e6, "lost": _LOST}

    def of_ccl(control: str, arm: str, fixed: str = "warm-up", **more: Any) -> Row:
        """CCL less an arm, whose costs are those of 1 M tokens."""
        return Row("CCL", control, folder="ccl", fixed=fixed, cost=cost("ccl", "ccl", arm), **more)

    def on_bytes(method: str) -> Row:
        """Less a shallower dense model of its parameters, all linear layers replaced, everything tuned."""
        own, other = (read("fair/runs.json")["entries"][name] for name in (method.lower(), "dense-shallow"))
        at_ends = [f"{edge} of {name}" for name, one in ((method, own), ("dense", other)) for edge in one["edges"]]
        more = kept(own["gaps"]["dense-shallow"]) | {"folder": "fair", "ends": ", ".join(at_ends)}
        more["cost"] = f"{own['flops_per_token'] / other['flops_per_token']:.2f}"
        return Row(method, "shallower dense, on bytes", tokens=1e6, **more)

    def biased_end(record: str, method: str, projection: str) -> str:
        """The rate of a control's fit where it is an end of what could be tried."""
        own = [r for r in read(record)["rows"] if (r["method"], r["projection"]) == (method, projection)]
        return ", ".join(f"rate {row['rate']:g} of {method.partition(',')[0]}" for row in own if row["edge"])

    return (
        tuned("5M", 1_000_000, "dense, tuned in all", "dense", "dense", **hdpl),
        tuned(
            "5M", 1_000_000, "dense, HDPL's initialisation", "dense-from-hdpl", "dense from its matrices", folder="hdpl"
        ),
        Row(
            "HDPL",
            "dense of its size, warm-up 0.1",
            less(*against_equal),
            1e6,
            folder="hdpl",
            fixed="warm-up",
            unlike="dense wants a longer warm-up there",
            lost=_LOST,
            cost=cost("hdpl-budgets", "hdpl", "dense-equal-parameters"),
        ),
        tuned(
            "5M-seeds",
            5_000_000,
            "dense, warm-up 0.7",
            "dense",
            "dense",
            **hdpl,
            fixed=as_before,
            unlike="dense wants a shorter warm-up there",
        ),
        Row(
            "HDPL",
            "dense, warm-up 0.1",
            less(*([short[name]["validation_loss"]] for name in ("hdpl", "dense-0.002"))),
            5e6,
            **hdpl,
            fixed=as_before,
            cost=cost("hdpl-5M", "hdpl", "dense"),
        ),
        tuned(
            "5M-seeds",
            5_000_000,
            "dense, HDPL's initialisation",
            "dense-from-hdpl",
            "dense from its matrices",
            folder="hdpl",
            fixed=as_before,
            unlike="a shorter warm-up was not tried with it",
        ),
        on_bytes("HDPL"),
        of_ccl("dense of its width", "dense-64", **of_arm("dense-64"), **wide),
        of_ccl("dense, second embedding", "dense-second-embedding", **of_arm("dense-second-embedding")),
        of_ccl("dense of its size", "dense-equal-parameters", **of_arm("dense-equal-parameters")),
        of_ccl("dense of its size", "dense-equal-parameters", f"rate, {as_before}", **at("ccl", 3_000_000, "ccl")),
        of_ccl("dense of its size", "dense-equal-parameters", "initialisation, warm-up", **late, tokens=5.1e6),
        of_ccl("dense of its size", "dense-equal-parameters", by_tenths, **as_printed("ccl", "ccl")),
        on_bytes("CCL"),
        *(
            Row(
                "Transponder",
                "plain model",
                **at("transponder", tokens, "transponder-rank-2", part),
                **gates,
                ends=ends(f"transponder/{part}/runs.json", transponder),
                cost=cost("transponder", "transponder-rank-2", "dense"),
            )
            for tokens, part in ((300_000, "plan"), (1_000_000, "plan-5M"))
        ),
        on_bytes("Transponder"),
        beside("low rank", "low_rank"),
        beside("block-Hadamard", "block_hadamard"),
        beside("dense", "dense"),
        beside("low rank, fixed network", "low_rank-network"),
        beside("block-Hadamard, fixed network", "block_hadamard-network"),
        beside("dense, fixed network", "dense-network"),
        beside("low rank", "low_rank", 1e6),
        beside("block-Hadamard", "block_hadamard", 1e6),
        beside("dense", "dense", 1e6),
        beside("low rank, fixed network", "low_rank-network", 1e6),
        beside("block-Hadamard, fixed network", "block_hadamard-network", 1e6),
        beside("dense, fixed network", "dense-network", 1e6),
        *(
            Row(
                "Rotor fitted to SmolLM2",
                f"{against.partition(',')[0]} in {p}",
                **kept(fits[record][f"{p}_proj"]["wikitext2"][against]),
                effect=mine - theirs,
                where="main table",
                folder="rotor",
                ends=biased_end(record, against, f"{p}_proj"),
                cost=cost("fits", f"rotor, double in {p}_proj", f"{against} in {p}_proj"),
            )
            for against, (record, *of) in printed.items()
            for p, mine, theirs in zip("qkv", ours, of, strict=True)
        ),
        *(
            Row(
                "CGT",
                control,
                **kept(sources[arm]["minus_gpt2_equal"]),
                tokens=2.46e6,
                effect=-0.23 / BYTES,
                where="Figure 5, the narrower model; 0.009 in the wider",
                folder="cgt",
                ends="rate 0.008 of GPT-2",
                fixed="warm-up",
                unlike=UNSCALED,
                cost=cost("cgt", arm, "gpt2-equal"),
            )
            for arm, control in (("no-aux", "GPT-2, 8 % larger"), ("aux", "GPT-2; CGT with auxiliary loss"))
        ),
    )


#: what HDPL's plans look for: the paper's lead over dense, in a token of our vocabulary
_HDPL = (4.2838 - 4.3206, "hdpl/start/results.json")
#: an arm of a plan of HDPL that it is less -> its words; budgets in tokens -> the plans that have them
_POWERS = {"dense": "dense", "dense-from-hdpl": "dense from its matrices", "hdpl-without-noise": "HDPL without noise"}
_PLANS = {300_000: "hdpl-plan", 1_000_000: "hdpl-5M-plan", 5_000_000: "hdpl-5M-seeds-plan"}


def powers() -> str:
    """What the plans of HDPL could see: spread of paired differences, half-width, and the seeds that its half takes."""
    effect, lines = per_token(*_HDPL), []
    for tokens, plan in _PLANS.items():
        for arm, word in _POWERS.items():
            row = Row("HDPL", word, **kept(curves.apart(plan, tokens, "hdpl", arm)), tokens=tokens)
            spread = statistics.stdev(row.gaps)
            needed = str(seeds_needed(abs(effect), spread))
            reached = f"{row.half:.3f}; {abs(effect) / 2:.3f}"
            lines.append([f"HDPL less {word}", row.budget, f"{spread:.3f}", reached, f"{row.seeds}; {needed}"])
    return table(["gap", "tokens", "spread", "half-width; looked for", "seeds; it takes"], lines)


def in_results() -> str:
    """The table of results/README.md."""
    lines, noted = [], collections.defaultdict[str, list[str]](list)
    for number, row in enumerate(rows(), 1):
        found = signed(mean(row.gaps), 3)
        if row.bounds is not None:
            found += f" [{signed(row.bounds[0], 3)}, {signed(row.bounds[1], 3)}]"
        effect = "–" if row.effect is None else signed(row.effect, 3)
        seeds = f"{row.budget or 'a fit'}, {row.seeds} seed{'s' * (row.seeds > 1)}"
        for head, what in _NOTED.items():
            said = getattr(row, what)
            noted[f"{head}: {said}"] += [str(number)] * bool(said)
        flops, _, time = row.cost.partition(", ")
        noted["Not timed: the arms were not run in turns in one process"] += [str(number)] * (not time)
        noted["A fit: FLOPs are those of the projection alone"] += [str(number)] * (not row.tokens)
        costs = f"{flops or 'not counted'}, {time or 'not timed'}"
        half = "–" if row.half is None else f"{row.half:.3f}"
        claim = f"[{row.method}]({row.folder}/README.md) less {row.control}"
        lines.append([str(number), claim, seeds, found, effect, half, costs, f"**{row.verdict}**"])
    head = ["", "gap", "tokens, seeds", "nats [95 %]", "paper's", "half-width", "FLOPs, time", "verdict"]
    notes = [
        f"- {said} ({'row' if len(numbers) == 1 else 'rows'} {', '.join(numbers)})."
        for said, numbers in noted.items()
        if numbers
    ]
    return table(head, lines) + "\n\n" + "\n".join(notes)


#: folder -> part -> what makes it
PARTS = {"hdpl": {"powers": powers}}
