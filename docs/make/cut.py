"""Tables of comparisons that were cut off, from the records of results/unfinished.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from measured import arms_apart, commands, gap, less, mean, of_text, read, signed, table, with_interval

__all__ = ["PARTS", "against", "best", "controls_apart", "cut_short", "ended", "evaluated", "later", "on_the_way"]
__all__ += ["printed_gap", "printed_loss", "shared", "trained", "turned", "typed"]

#: folder of results/ -> its record
RECORDS = {
    "ccl": "ccl/claims-20M/runs.json",
    "hdpl": "hdpl/claims-5M/runs.json",
    "transponder": "transponder/claims-20M/runs.json",
    "hdpl-warmup": "hdpl/warmup/runs.json",
    "ccl-plan": "ccl/plan/runs.json",
    "transponder-plan": "transponder/plan/runs.json",
    "rotor": "rotor/scratch/runs.json",
    "rotor-control": "rotor/control/runs.json",
    "rotor-1M": "rotor/control-1M/runs.json",
}


#: head of a column
_GAP = "gap [95 %]"


def against(folder: str, entry: str, part: str) -> str:
    """An entry's gap to the reference with its interval; part: ``tuning_gaps`` or ``gaps``."""
    return with_interval(read(RECORDS[folder])[part][entry])


def turned(folder: str, entry: str) -> str:
    """The reference less an entry, with its interval."""
    found = read(RECORDS[folder])["gaps"][entry]
    return with_interval(found | {"mean": -found["mean"], "values": [-one for one in found["values"]]})


def _rows_of(found: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    return [run for run in found["tuning"].get(name, ()) if run["validation_loss"] is not None]


def best(folder: str, name: str) -> dict[str, Any]:
    """An entry's best tuning run."""
    return min(_rows_of(read(RECORDS[folder]), name), key=lambda run: run["validation_loss"])


def shared(folder: str, ours: str, theirs: str) -> dict[tuple[float, float], float]:
    """(rate, start) -> loss of one entry less the other's, where a tuning run of both ended."""
    found = read(RECORDS[folder])
    ended = [
        {(run["learning_rate"], run["initializer_range"]): run["validation_loss"] for run in _rows_of(found, name)}
        for name in (ours, theirs)
    ]
    return less(*ended)


def cut_short(folder: str, name: str) -> dict[tuple[float, float], str]:
    """(rate, start) -> steps of an entry's tuning runs that did not end."""
    runs = read(RECORDS[folder])["tuning"][name]
    return {
        (run["learning_rate"], run["initializer_range"]): f"{run['steps_taken']:,} of {run['steps']:,}"
        for run in runs
        if run["validation_loss"] is None
    }


def trained(folder: str, name: str) -> str:
    """Differences of training losses of runs that were cut off."""
    return ", ".join(f"{one['mean']:+.3f}" for one in read(RECORDS[folder])["training_gaps"][name])


def tuned(folder: str) -> str:
    """The best tuning run of every entry: a whole run on fewer tokens."""
    found = read(RECORDS[folder])
    chosen = {name: best(folder, name) for name in found["tuning"] if _rows_of(found, name)}
    lines = []
    for name, run in sorted(chosen.items(), key=lambda pair: pair[1]["validation_loss"]):
        start = run["initializer_range"]
        gap = with_interval(found["tuning_gaps"][name]) if name in found["tuning_gaps"] else "–"
        gap = "reference" if name == found["reference"] else gap
        lines.append(
            [
                f"`{name}`",
                f"{run['parameters']:,}",
                f"{run['learning_rate']:g}" + ("" if start is None else f", {start:g}"),
                str(len(_rows_of(found, name))),
                f"{run['validation_loss']:.3f}",
                gap,
            ]
        )
    return table(["entry", "parameters", "rate, start", "tuning runs", "validation loss", _GAP], lines)


def _gap_of(folder: str, name: str) -> str:
    found = read(RECORDS[folder])
    if name == found["reference"]:
        return "reference"
    if name in found["gaps"]:
        return with_interval(found["gaps"][name])
    cut = found["training_gaps"].get(name, ())
    each = ", ".join(f"{one['mean']:+.3f} (steps {one['from']:,} to {one['to']:,})" for one in cut)
    return f"training loss {each}" if each else "–"


def final(folder: str) -> str:
    """Final runs: those that ended, and how far the others came."""
    found = read(RECORDS[folder])
    lines = []
    for name, seeds in found["runs"].items():
        ended = [run["validation_loss"] for run in seeds.values() if run["validation_loss"] is not None]
        cut = [f"{run['steps_taken']:,}" for run in seeds.values() if run["validation_loss"] is None]
        some = next(iter(seeds.values()))
        start = some["initializer_range"]
        lines.append(
            [
                f"`{name}`",
                f"{some['learning_rate']:g}" + ("" if start is None else f", {start:g}"),
                f"{len(ended)} ended"
                + (f", {len(cut)} cut off at step {' and '.join(cut)} of {some['steps']:,}" if cut else ""),
                f"{mean(ended):.3f}" if ended else "–",
                _gap_of(folder, name),
            ]
        )
    return table(["entry", "rate, start", "runs", "validation loss", _GAP], lines)


def printed_gap(folder: str, name: str) -> str:
    """An entry's gap as its plan's own table has it."""
    return "{mean:+.3f} [{low:+.3f}, {high:+.3f}]".format(**read(RECORDS[f"{folder}-plan"])["printed"]["gaps"][name])


def printed_loss(folder: str, name: str) -> float:
    """An entry's mean loss as its plan's own table has it."""
    return read(RECORDS[f"{folder}-plan"])["printed"]["entries"][name]["mean"]


def ended(folder: str, name: str) -> list[float]:
    """Losses of an entry's final runs that ended."""
    runs = read(RECORDS[folder])["runs"][name].values()
    return [run["validation_loss"] for run in runs if run["validation_loss"] is not None]


def as_printed(folder: str) -> str:
    """Final runs as the command's own table has them, where the runs themselves were lost."""
    found = read(RECORDS[folder])
    lines = []
    for name, loss in found["printed"]["entries"].items():
        run = next(iter(found["runs"][name].values()))
        chosen = f"{run['learning_rate']:g}, {run['initializer_range']:g}, {run['warmup'] / run['steps']:.1f}"
        gap = printed_gap(folder.removesuffix("-plan"), name) if name in found["printed"]["gaps"] else "reference"
        parameters = f"{found['tuning'][name][0]['parameters']:,}"
        lines.append([f"`{name}`", parameters, chosen, f"{loss['mean']:.3f} ± {loss['deviation']:.3f}", gap])
    return table(["entry", "parameters", "rate, start, warm-up", "validation loss", _GAP], lines)


def counting(folder: str) -> str:
    """What n-grams come to on as many tokens."""
    short, whole = (read(RECORDS[folder])["ngrams"][part] for part in ("tuning", "runs"))
    return (
        f"Counting, for comparison: Kneser-Ney {short['order']}-grams reach {short['validation_loss']:.3f} on the "
        f"{short['tokens']:,} tokens of a tuning run and {whole['validation_loss']:.3f} on the {whole['tokens']:,} of "
        "a final run."
    )


def typed(folder: str) -> str:
    """The command."""
    return read(RECORDS[folder])["command"]


def later(folder: str) -> list[str]:
    """The commands whose runs were added."""
    return read(RECORDS[folder])["later"]


def evaluated(folder: str, name: str, step: int) -> float:
    """The validation loss of an entry's first final run at a step."""
    run = next(iter(read(RECORDS[folder])["runs"][name].values()))
    return dict(map(tuple, run["evaluations"]))[step]


def on_the_way(folder: str, name: str, reference: str, step: int) -> list[float]:
    """Gaps of held-out losses at a step of final runs, of every seed of which both entries came that far."""
    runs = read(RECORDS[folder])["runs"]
    at = [
        {seed: dict(map(tuple, run["evaluations"])).get(step) for seed, run in runs[n].items()}
        for n in (name, reference)
    ]
    return [ours - theirs for seed, ours in at[0].items() if None not in (ours, theirs := at[1].get(seed))]


def halfway(folder: str) -> str:
    """Gaps of held-out losses before the end of final runs, where there are any."""
    found = read(RECORDS[folder])
    runs = [run for seeds in found["runs"].values() for run in seeds.values()]
    steps = sorted({step for run in runs for step, _ in run["evaluations"] if 0 < step < 0.95 * run["steps"]})
    lines = []
    for name in found["runs"]:
        if name != found["reference"]:
            gaps = [on_the_way(folder, name, found["reference"], step) for step in steps]
            lines.append([f"`{name}`", *(", ".join(signed(one, 3) for one in each) or "–" for each in gaps)])
    return table(["entry", *(f"step {step:,}" for step in steps)], lines)


#: a question of results/plans/rotor.yaml -> the two arms whose difference answers it
_WHOSE = (
    ("all of the lead", "rotor", "low_rank"),
    ("the fixed network, low rank", "low_rank-network", "low_rank"),
    ("the input added, low rank", "low_rank-identity", "low_rank"),
    ("rotors beside low rank with the network", "rotor", "low_rank-network"),
    ("rotors started as random maps", "rotor-random", "rotor"),
    ("rotors with the input added", "rotor-identity", "rotor"),
    ("the fixed network, block-Hadamard", "block_hadamard-network", "block_hadamard"),
    ("the input added, block-Hadamard", "block_hadamard-identity", "block_hadamard"),
    ("rotors beside block-Hadamard with the network", "rotor", "block_hadamard-network"),
    ("the fixed network, dense", "dense-network", "dense"),
    ("the input added, dense", "dense-identity", "dense"),
    ("rotors beside dense", "rotor", "dense"),
    ("rotors beside dense with the network", "rotor", "dense-network"),
    ("rotors beside dense with its input added", "rotor", "dense-identity"),
)


def controls(name: str) -> dict[str, list[float]]:
    """Entry -> final losses, of those in a plan of rotors whose seeds all ended."""
    runs = read(RECORDS[name])["runs"]
    found = {name: [run["validation_loss"] for run in seeds.values()] for name, seeds in runs.items()}
    return {name: losses for name, losses in found.items() if len(losses) == 3 and None not in losses}


def whose(name: str) -> str:
    """What a plan of rotors asks, as differences over paired seeds."""
    known = controls(name).keys()
    apart = {what: controls_apart(ours, theirs, name) for what, ours, theirs in _WHOSE if {ours, theirs} <= known}
    return arms_apart(_WHOSE, apart, "byte")


def controls_apart(ours: str, theirs: str, name: str = "rotor-control") -> str:
    """The difference of two arms of a plan of rotors, with its interval."""
    found, runs = controls(name), read(RECORDS[name])["runs"]
    return gap(found[ours], found[theirs], error=of_text(runs, ours, theirs))


#: folder -> part -> what makes it
PARTS: dict[str, dict[str, Callable[[], str]]] = {
    folder: {
        "cut_command": functools.partial(commands, RECORDS[folder]),
        "cut_tuned": functools.partial(tuned, folder),
        "cut_final": functools.partial(final, folder),
        "cut_halfway": functools.partial(halfway, folder),
        "cut_counting": functools.partial(counting, folder),
    }
    for folder in ("ccl", "hdpl", "transponder")
}
PARTS["hdpl"] |= {
    "warmup_command": functools.partial(commands, RECORDS["hdpl-warmup"]),
    "warmup_final": functools.partial(final, "hdpl-warmup"),
}
for _folder in ("ccl", "transponder"):
    PARTS[_folder] |= {
        "plan_command": functools.partial(commands, RECORDS[f"{_folder}-plan"]),
        "plan_printed": functools.partial(as_printed, f"{_folder}-plan"),
    }
PARTS["rotor"] = {
    "scratch_command": functools.partial(commands, RECORDS["rotor"]),
    "scratch_final": functools.partial(final, "rotor"),
    "control_command": functools.partial(commands, RECORDS["rotor-control"]),
    "control_tuned": functools.partial(tuned, "rotor-control"),
    "control_final": functools.partial(final, "rotor-control"),
    "control_whose": functools.partial(whose, "rotor-control"),
    "later_command": functools.partial(commands, RECORDS["rotor-1M"]),
    "later_final": functools.partial(final, "rotor-1M"),
    "later_whose": functools.partial(whose, "rotor-1M"),
}
