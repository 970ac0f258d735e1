"""Tables of comparisons at several budgets and at several sizes, from their results.json and scale.json."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from measured import arms_apart, commands, less, mean, of_text, read, table, with_interval

__all__ = ["PARTS", "apart", "gap_at", "planned", "typed", "whose"]

#: folder of results/ -> its record at several budgets: results.json, or what results/unfinished.py made of it
_BUDGETS = {
    "ccl": "ccl/budgets/runs.json",
    "hdpl": "hdpl/budgets/runs.json",
    "hdpl-plan": "hdpl/plan/runs.json",
    "hdpl-5M-plan": "hdpl/plan-5M/runs.json",
    "hdpl-5M-seeds-plan": "hdpl/plan-5M-seeds/runs.json",
    "transponder": "transponder/budgets/results.json",
    "transponder-plan": "transponder/plan/runs.json",
    "transponder-5M-plan": "transponder/plan-5M/runs.json",
}
_SCALE = "scale/scale.json"


def _entry(folder: str, tokens: int, name: str) -> dict[str, Any] | None:
    row = next(one for one in read(_BUDGETS[folder])["budgets"] if one["tokens"] == tokens)
    return next((entry for entry in row["entries"] if entry["name"] == name), None)


def gap_at(folder: str, tokens: int, name: str) -> str:
    """An entry's gap to the reference at a budget, with its interval. Raises LookupError where it has none."""
    entry = _entry(folder, tokens, name)
    if entry is None:
        raise LookupError(f"{_BUDGETS[folder]} has no {name} at {tokens:,} tokens")
    return with_interval(entry["gap"])


def typed(folder: str) -> str:
    """The command."""
    return read(_BUDGETS[folder])["command"]


def gaps(folder: str) -> str:
    """Losses and gaps by budget, with rate and start, and what counting comes to."""
    found = read(_BUDGETS[folder])
    rows = found["budgets"]
    lines = []
    for name in dict.fromkeys(entry["name"] for row in rows for entry in row["entries"]):
        entries = [_entry(folder, row["tokens"], name) for row in rows]
        chosen = dict.fromkeys(", ".join(_chosen(one)) for one in entries if one)
        cells = [_cell(entry) for entry in entries]
        lines.append([f"`{name}`", "; then ".join(chosen), *cells])
    order = rows[0]["ngram"]["order"]
    counted = [f"{row['ngram']['validation_loss']:.3f}" for row in rows]
    lines.append([f"counting: Kneser-Ney {order}-grams", "", *counted])
    warmed = any(len(_chosen(entry)) == 3 for row in rows for entry in row["entries"])
    settings = "rate, start" + ", warm-up" * warmed
    head = ["entry", settings, *(f"{row['tokens']:,} tokens" for row in rows)]
    return f"Loss, and gap to `{found['reference']}`:\n\n" + table(head, lines)


def shared(folder: str, ours: str) -> str:
    """An entry's loss less the reference's in tuning runs of the same seed and settings, by start, warm-up and rate."""
    found = read(_BUDGETS[folder])
    names = ours, found["reference"]
    rows: dict[tuple[str, str, str], dict[float, float]] = {}
    for budget in found["budgets"]:
        tried = [_tried(entry) for name in names for entry in budget["entries"] if entry["name"] == name]
        for (warmup, start, rate), apart in less(*tried).items():
            rows.setdefault((f"{budget['tokens']:,}", f"{warmup:g}", f"{start:g}"), {})[rate] = apart
    rates = sorted(set().union(*rows.values()))
    lines = [[*case, *(f"{of[rate]:+.3f}" if rate in of else "–" for rate in rates)] for case, of in rows.items()]
    head = ["tokens", "warm-up", "start", *(f"rate {rate:g}" for rate in rates)]
    told = f"`{ours}` less `{found['reference']}`, tuning runs of both at the same settings, one seed:"
    return f"{told}\n\n{table(head, lines)}"


def _tried(entry: Mapping[str, Any]) -> dict[tuple[float, float, float], float]:
    """(share of the steps for warm-up, start, rate) -> loss of an entry's tuning runs, those at full length too."""
    tuning = entry["tuning"]
    own = {key: entry[key] for key in ("warmup_ratio", "initializer_range")}
    runs = [own | run for run in tuning["trials"] + tuning.get("full_length", {}).get("trials", [])]
    return {
        (run["warmup_ratio"], run["initializer_range"], run["learning_rate"]): run["validation_loss"] for run in runs
    }


def _chosen(entry: Mapping[str, Any]) -> list[str]:
    """Rate, start, and the share of the steps for warm-up where that was tuned."""
    chosen = entry["learning_rate"], entry["initializer_range"], entry.get("warmup_ratio")
    return [f"{one:g}" for one in chosen if one is not None]


def _cell(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "–"
    loss = f"{entry['validation_loss']['mean']:.3f}"
    return f"{loss}; {with_interval(entry['gap'])}" if entry["gap"] else loss


def scale() -> str:
    """Loss by width, and the exponents of the fits."""
    found = read(_SCALE)
    widths = [point["width"] for point in found["entries"][0]["points"]]
    rows = []
    for entry in found["entries"]:
        losses = [f"{point['validation_loss']['mean']:.3f}" for point in entry["points"]]
        fits = [_exponent(entry[axis]) for axis in ("flops", "seconds")]
        rows.append([f"`{entry['name']}`", *losses, *fits])
    return table(["entry", *(f"width {width}" for width in widths), "exponent, FLOPs", "exponent, time"], rows)


def _exponent(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "–"
    low, high = found["fit"]["b_interval"]
    return f"{found['fit']['b']:.3f} [{low:.3f}, {high:.3f}]"


def verdicts() -> str:
    """Where operators cross dense models, a line each."""
    return "\n".join(f"- {line}" for line in read(_SCALE)["verdicts"])


#: whose the lead of HDPL is: what, an arm of results/plans/hdpl.yaml, and the arm it is less
_WHOSE = (
    ("all of the lead", "hdpl", "dense"),
    ("its start", "dense-from-hdpl", "dense"),
    ("what the start does not give", "hdpl", "dense-from-hdpl"),
    ("noise and divergence", "hdpl", "hdpl-without-noise"),
)


def planned(folder: str, tokens: int) -> dict[str, list[float]]:
    """Arm of a plan of HDPL -> its losses by seed, of those that ended at a budget."""
    entries = {name: _entry(folder, tokens, name) for name in {arm for _, *arms in _WHOSE for arm in arms}}
    return {name: entry["validation_loss"]["values"] for name, entry in entries.items() if entry}


def whose(folder: str, tokens: int) -> dict[str, str]:
    """What -> the difference of two arms of a plan of HDPL over paired seeds, with its interval, where both ended."""
    there = planned(folder, tokens).keys()
    found = {what: apart(folder, tokens, *arms) for what, *arms in _WHOSE if {*arms} <= there}
    return {what: with_interval({"mean": mean(one["values"])} | one) for what, one in found.items()}


def apart(folder: str, tokens: int, ours: str, theirs: str) -> dict[str, Any]:
    """The differences of two arms of a plan of HDPL by seed, and the standard error of the held-out text.

    The error as far as losses by block were kept: gaps to the reference have it, and final runs.
    """
    losses, found = planned(folder, tokens), read(_BUDGETS[folder])
    values = [a - b for a, b in zip(losses[ours], losses[theirs], strict=True)]
    if theirs == found["reference"]:
        return {"values": values, "standard_error": _entry(folder, tokens, ours)["gap"]["standard_error"]}
    return {"values": values, "standard_error": of_text(found["runs"], ours, theirs)}


def whose_table(folder: str, tokens: int) -> str:
    """The same as a table."""
    return arms_apart(_WHOSE, whose(folder, tokens), "token")


def by_warmup(folder: str) -> str:
    """Of each arm the losses of tuning at its best rate and start, by the warm-up's share of the steps."""
    losses: dict[str, dict[float, float]] = {}
    for name, runs in read(_BUDGETS[folder])["tuning"].items():
        ended = [run for run in runs if run["validation_loss"] is not None]
        best = min(ended, key=lambda run: run["validation_loss"])
        alike = [run for run in ended if all(run[key] == best[key] for key in ("learning_rate", "initializer_range"))]
        losses[name] = {round(run["warmup"] / run["steps"], 1): run["validation_loss"] for run in alike}
    shares = sorted({share for found in losses.values() for share in found})
    cells = {
        name: [f"{found[share]:.3f}" if share in found else "" for share in shares] for name, found in losses.items()
    }
    return table(["warm-up", *map(str, shares)], [[f"`{name}`", *row] for name, row in cells.items()])


#: folder -> part -> what makes it
PARTS: dict[str, dict[str, Callable[[], str]]] = {
    folder: {"curve_command": functools.partial(commands, name), "curve_gaps": functools.partial(gaps, folder)}
    for folder, name in _BUDGETS.items()
    if not folder.endswith("-plan")
} | {
    "scale": {
        "scale_command": functools.partial(commands, _SCALE),
        "scale_table": scale,
        "scale_verdicts": verdicts,
    }
}
PARTS["hdpl"] |= {
    "plan_command": functools.partial(commands, _BUDGETS["hdpl-plan"]),
    "plan_gaps": functools.partial(gaps, "hdpl-plan"),
    "plan_whose": functools.partial(whose_table, "hdpl-plan", 300_000),
    "longer_gaps": functools.partial(gaps, "hdpl-5M-plan"),
    "longer_whose": functools.partial(whose_table, "hdpl-5M-plan", 1_000_000),
    "longer_warmups": functools.partial(by_warmup, "hdpl-5M-plan"),
    "longer_command": functools.partial(commands, _BUDGETS["hdpl-5M-plan"]),
    "longest_gaps": functools.partial(gaps, "hdpl-5M-seeds-plan"),
    "longest_whose": functools.partial(whose_table, "hdpl-5M-seeds-plan", 5_000_000),
    "longest_command": functools.partial(commands, _BUDGETS["hdpl-5M-seeds-plan"]),
}
PARTS["transponder"] |= {
    "curve_gaps_plan": functools.partial(gaps, "transponder-plan"),
    "longer_gaps": functools.partial(gaps, "transponder-5M-plan"),
    "longer_command": functools.partial(commands, _BUDGETS["transponder-5M-plan"]),
}
PARTS["transponder"]["curve_shared"] = functools.partial(shared, "transponder", "transponder-rank-2")
