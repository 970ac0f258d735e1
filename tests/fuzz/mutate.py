"""Seeded damage to texts, bytes and trees of JSON values."""

from __future__ import annotations

import copy
import random
import string
from typing import Any

DEEP = 3_000

#: what somebody's file may hold in place of what was meant
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 10**6, 10**9, 10**15, 2**63, 10**30, -(10**15), 0.0, 0.5, -0.5, 1e-300, 1e308,
    float("inf"), float("-inf"), float("nan"), "", " ", "x", "0", "1e9", "none", "../../x", "/etc/passwd", "\x00",
    "é" * 50, "x" * 20_000, [], {}, [[]], [None], [1, "x", None], {"kind": "low_rank"}, {"": {}}, {"a": 1},
    [{"a": []}], [0] * 1_000,
)  # fmt: skip


def nested(rng: random.Random) -> Any:
    """A value within a value within a value."""
    value: Any = rng.choice([1, None, "x"])
    for _ in range(rng.choice([5, 40, 150, 400])):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def strange(rng: random.Random) -> Any:
    return nested(rng) if rng.random() < 0.05 else copy.deepcopy(rng.choice(STRANGE))


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a tree."""
    found, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            found.append((node, key))
            waiting.append(node[key])
    return found


def tree(rng: random.Random, value: Any) -> Any:
    """A copy of a tree of JSON values with a few of them changed."""
    value = {"": copy.deepcopy(value)}
    for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
        spots = places(value)
        if not spots:
            break
        holder, key = rng.choice(spots)
        what = rng.randrange(8)
        if what == 0 and holder is not value:
            del holder[key]
        elif what == 1 and isinstance(holder, dict) and holder is not value:
            holder[text(rng, str(key))] = holder.pop(key)
        elif what == 2:
            other, place = rng.choice(spots)
            holder[key] = copy.deepcopy(other[place])
        elif what == 3 and isinstance(holder, dict) and holder is not value:
            holder[rng.choice(["x", "kind", "", "__class__", "format", "a.b"])] = strange(rng)
        elif what == 4 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = rng.choice([-1, 0, 1, 2, 0.5, 1000, 10**7, 10**13]) * holder[key]
        elif what == 5 and isinstance(holder[key], str):
            holder[key] = text(rng, holder[key])
        else:
            holder[key] = strange(rng)
    return value.get("")


def text(rng: random.Random, value: str) -> str:
    """A text with a few of its characters changed."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(value) + 1)
        what = rng.randrange(9)
        if what == 0:
            value = value[:at]
        elif what == 1:
            end = min(len(value), at + rng.randrange(1, 20))
            value = value[:at] + value[end:]
        elif what == 2:
            end = min(len(value), at + rng.randrange(1, 40))
            value = value[:at] + value[at:end] * rng.choice([2, 3, 50]) + value[end:]
        elif what == 3:
            value = value[:at] + rng.choice("([{<\"'") * rng.choice([1, 40, DEEP]) + value[at:]
        elif what == 4:
            value = value[:at] + rng.choice(")]}>\"'") + value[at:]
        elif what == 5:
            value = (
                value[:at]
                + rng.choice(["9" * 30, "9" * 5_000, "-1", "1e999", "nan", "null", "~", "&a *a", "!!int x"])
                + value[at:]
            )
        elif what == 6:
            value = value[:at] + rng.choice(string.punctuation + "\x00\n\t\r ﻿é") + value[at:]
        elif what == 7:
            other = rng.randrange(len(value) + 1)
            value = value[:at] + value[other : other + 60] + value[at:]
        else:
            value = value[:at] + "".join(rng.choices(string.printable, k=rng.randrange(1, 8))) + value[at:]
    return value


def data(rng: random.Random, value: bytes) -> bytes:
    """Bytes with a few of them changed, cut off or added."""
    value_ = bytearray(value)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(value_) + 1)
        what = rng.randrange(5)
        if what == 0:
            del value_[at:]
        elif what == 1:
            del value_[at : at + rng.randrange(1, 50)]
        elif what == 2:
            value_[at:at] = rng.randbytes(rng.randrange(1, 50))
        elif value_:
            value_[at % len(value_)] ^= 1 << rng.randrange(8)
    return bytes(value_)
