"""The directory of a comparison: what it was made with."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relinear.compare.plan import Planned
from relinear.compare.settings import CompareSettings
from relinear.core.config import shown
from relinear.system.files import read_json, write_json
from relinear.system.machine import command_line, describe_machine
from relinear.system.text import cut

__all__ = ["BLOCK_LOSSES", "FORMAT", "RESULTS", "RUN", "SPEED", "check_same", "now", "record_start"]

RUN, RESULTS, SPEED = "run.json", "results.json", "speed.json"
BLOCK_LOSSES = "block_losses.npy"
FORMAT = 1
#: differences that a message lists
_TOLD = 10


def check_same(out_dir: Path, described: Mapping[str, Any]) -> None:
    """Refuse a directory that holds a comparison with another recipe, with every setting in which they differ."""
    path = out_dir / RUN
    if not path.is_file():
        if (out_dir / RESULTS).is_file():
            raise ValueError(f"{out_dir} holds {RESULTS} but no {RUN}; give another directory")
        return
    try:
        before = read_json(path)["recipe"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is no record of a comparison ({cut(str(error))}); give another directory") from error
    differing = list(_differences(CompareSettings.completed(before), json.loads(json.dumps(described))))
    if differing:
        lines = "\n  ".join(differing[:_TOLD] + ([f"and {len(differing) - _TOLD} more"] if differing[_TOLD:] else []))
        raise ValueError(
            f"{out_dir} holds a comparison with another recipe; give another --out, or go back to the old settings:"
            f"\n  {lines}"
        )


def _differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """``a.b: old -> new`` for every value in which two trees of JSON differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            inner = cut(f"{path}.{key}" if path else key)
            if key not in now:
                yield f"{inner}: {shown(before[key])} -> (gone)"
            elif key not in before:
                yield f"{inner}: (not there) -> {shown(now[key])}"
            else:
                yield from _differences(before[key], now[key], inner)
        if list(before) != list(now) and set(before) == set(now) and path == "entries":
            yield f"entries: order {cut(', '.join(before))} -> {cut(', '.join(now))}"
    elif before != now:
        yield f"{path}: {shown(before)} -> {shown(now)}"


def record_start(out_dir: Path, described: Mapping[str, Any], planned: list[Planned]) -> dict[str, Any]:
    """``run.json`` of the directory, written now unless it is there: the recipe, its entries, machine and command."""
    if (out_dir / RUN).is_file():
        return read_json(out_dir / RUN)
    entries = {
        p.name: {
            "parameters": p.size.parameters,
            "flops_per_token": p.size.flops,
            "deviation": p.deviation,
            "settings": p.settings.model_dump(mode="json"),
        }
        for p in planned
    }
    record = {"format": FORMAT, "recipe": described, "entries": entries, "machine": describe_machine()}
    record |= {"command": command_line(), "started": now()}
    write_json(out_dir / RUN, record)
    return record


def now() -> str:
    """The time, to the second, with its zone."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
