"""Tables of results/rotor/biased.json: fits whose biases start at the mean."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from measured import commands, read, table, with_interval

__all__ = ["CONSTANT", "FRESH", "PARTS", "over", "typed"]

_RECORD = "rotor/biased.json"
#: where low rank starts from fresh matrices
FRESH = "rotor/fresh.json"
_TOGETHER = "q, k and v"
#: the mean output in place of a projection
CONSTANT = "constant"


def _rows(projection: str, record: str = _RECORD) -> list[Mapping[str, Any]]:
    return [row for row in read(record)["rows"] if row["projection"] == projection]


def over(projection: str, method: str, reference: str, record: str = _RECORD) -> str:
    """How far a method's loss on WikiText-2 is above that of the original, of the constant or of another method."""
    row = next(row for row in _rows(projection, record) if row["method"] == method)
    return with_interval(row["wikitext2"][reference])


def _fit(row: Mapping[str, Any]) -> str:
    if "errors" not in row:
        return ""
    each = ", ".join(f"{error:.3f}" for error in row["errors"])
    return f"{each}; together {row['joint_error']:.3f}" if "joint_error" in row else each


def fits(record: str = _RECORD) -> str:
    """A table for each projection of a record, and for all three where they were trained together."""
    head = ["method", "parameters", "rate", "fit error", "WikiText-2", "PTB", "WikiText-2, over the constant"]
    parts = []
    for projection in dict.fromkeys(row["projection"] for row in read(record)["rows"]):
        lines = []
        for row in _rows(projection, record):
            rate = f"{row['rate']:g}{'*' * row['edge']}" if "rate" in row else ""
            texts = [with_interval(row[text]["original"]) for text in ("wikitext2", "ptb")]
            beyond = with_interval(row["wikitext2"][CONSTANT]) if CONSTANT in row["wikitext2"] else ""
            count = f"{row['parameters']:,}" if "parameters" in row else ""
            lines.append([row["method"], count, rate, _fit(row), *texts, beyond])
        name = "q, k and v, trained together" if projection == _TOGETHER else projection[0]
        parts.append(f"**{name}**\n\n{table(head, lines)}")
    return "\n\n".join(parts)


def typed(record: str = _RECORD) -> str:
    """The command."""
    return read(record)["command"]


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "rotor": {
        "biased_command": functools.partial(commands, _RECORD),
        "biased_fits": fits,
        "fresh_command": functools.partial(commands, FRESH),
        "fresh_fits": functools.partial(fits, FRESH),
    }
}
