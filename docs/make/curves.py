"""Tables of comparisons at several budgets and at several sizes, from their results.json and scale.json."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from measured import RESULTS, read, signed, table

__all__ = ["PARTS", "gap_at", "gaps", "loss_at"]

#: folder of results/ -> its record at several budgets
_BUDGETS = {"ccl": "ccl/budgets/results.json", "rotor": "rotor/budgets/results.json"}
_SCALE = "scale/scale.json"


def with_interval(gap: Mapping[str, Any]) -> str:
    """-0.105 [-0.149, -0.062]."""
    return f"{signed(gap['mean'])} [{signed(gap['low'])}, {signed(gap['high'])}]"


def _entry(folder: str, tokens: int, name: str) -> dict[str, Any]:
    budget = next(one for one in read(_BUDGETS[folder])["budgets"] if one["tokens"] == tokens)
    return next(entry for entry in budget["entries"] if entry["name"] == name)


def gap_at(folder: str, tokens: int, name: str) -> str:
    """An entry's gap to the reference at a budget, with its interval."""
    return with_interval(_entry(folder, tokens, name)["gap"])


def loss_at(folder: str, tokens: int, name: str) -> float:
    """An entry's mean validation loss at a budget."""
    return _entry(folder, tokens, name)["validation_loss"]["mean"]


def gaps(folder: str) -> str:
    """Losses and gaps by budget, with rate and start, and what counting comes to."""
    found = read(_BUDGETS[folder])
    budgets = found["budgets"]
    head = ["entry", "parameters", "rate, start"]
    head += [f"{budget['tokens']:,} tokens" for budget in budgets]
    sizes = {entry["name"]: entry["parameters"] for entry in found["entries"]}
    rows = []
    for name, size in sizes.items():
        entries = [_entry(folder, budget["tokens"], name) for budget in budgets]
        chosen = dict.fromkeys(f"{entry['learning_rate']:g}, {entry['initializer_range']:g}" for entry in entries)
        cells = [
            f"{entry['validation_loss']['mean']:.3f}" + (f"; {with_interval(entry['gap'])}" if entry["gap"] else "")
            for entry in entries
        ]
        rows.append([f"`{name}`", f"{size:,}", "; then ".join(chosen), *cells])
    counted = [budget["ngram"] for budget in budgets]
    order = counted[0]["order"]
    rows.append([f"counting: Kneser-Ney {order}-grams", "", "", *(f"{one['validation_loss']:.3f}" for one in counted)])
    return table(head, rows)


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


def command(name: str) -> str:
    """The command as a block."""
    return f"    {read(name)['command']}"


#: folder -> part -> what makes it
PARTS: dict[str, dict[str, Callable[[], str]]] = {
    folder: {"curve_command": functools.partial(command, name), "curve_gaps": functools.partial(gaps, folder)}
    for folder, name in _BUDGETS.items()
    if (RESULTS / name).is_file()
}
if (RESULTS / _SCALE).is_file():
    PARTS["scale"] = {
        "scale_command": functools.partial(command, _SCALE),
        "scale_table": scale,
        "scale_verdicts": verdicts,
    }
