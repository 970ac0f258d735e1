"""The directory of a comparison: what it was made with, and one process at a time in it."""

from __future__ import annotations

import contextlib
import datetime
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relinear.compare.plan import Planned
from relinear.compare.settings import CompareSettings
from relinear.system.files import write_json
from relinear.system.machine import describe_machine

__all__ = ["BLOCK_LOSSES", "FORMAT", "RESULTS", "RUN", "SPEED", "check_same", "locked", "now", "record_start"]

RUN, RESULTS, SPEED = "run.json", "results.json", "speed.json"
BLOCK_LOSSES = "block_losses.npy"
FORMAT = 1


def check_same(out_dir: Path, described: Mapping[str, Any]) -> None:
    """Refuse a directory that holds a comparison with another recipe, with every setting in which they differ."""
    path = out_dir / RUN
    if not path.is_file():
        if (out_dir / RESULTS).is_file():
            raise ValueError(f"{out_dir} holds {RESULTS} but no {RUN}; give another directory")
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["recipe"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is no record of a comparison ({error}); give another directory") from error
    differing = list(_differences(CompareSettings.completed(before), json.loads(json.dumps(described))))
    if differing:
        lines = "\n  ".join(differing)
        raise ValueError(
            f"{out_dir} holds a comparison with another recipe; give another --out, or go back to the old settings:"
            f"\n  {lines}"
        )


def _differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """``a.b: old -> new`` for every value in which two trees of JSON differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            inner = f"{path}.{key}" if path else key
            if key not in now:
                yield f"{inner}: {before[key]!r} -> (gone)"
            elif key not in before:
                yield f"{inner}: (not there) -> {now[key]!r}"
            else:
                yield from _differences(before[key], now[key], inner)
        if list(before) != list(now) and set(before) == set(now) and path == "entries":
            yield f"entries: order {', '.join(before)} -> {', '.join(now)}"
    elif before != now:
        yield f"{path}: {before!r} -> {now!r}"


@contextlib.contextmanager
def locked(out_dir: Path) -> Iterator[None]:
    """One process at a time in ``out_dir``."""
    from filelock import FileLock, Timeout

    out_dir.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out_dir / ".lock", timeout=0):
            yield
    except Timeout:
        raise ValueError(f"another process is at work in {out_dir}; wait for it, or give another directory") from None


def record_start(out_dir: Path, described: Mapping[str, Any], planned: list[Planned]) -> dict[str, Any]:
    """``run.json`` of the directory, written now unless it is there: the recipe, its entries, machine and command."""
    if (out_dir / RUN).is_file():
        return json.loads((out_dir / RUN).read_text(encoding="utf-8"))
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
    record |= {"command": _command(), "started": now()}
    write_json(out_dir / RUN, record)
    return record


def _command() -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def now() -> str:
    """The time, to the second, with its zone."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
