"""Carry out a plan of a script of the study: every arm tuned over the plan's grid, then trained with each seed."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relinear.compare.settings import Study

__all__ = ["carry_out", "claimed"]


def _pieces(study: Study, arms: Sequence[str], out: Path) -> Iterator[tuple[Path, dict[str, Any], bool]]:
    """Yield what a plan has to run, (record, options, whether it tunes); final runs once their arm is tuned."""
    grid = [dict(zip(study.grid, values, strict=True)) for values in itertools.product(*study.grid.values())]
    for arm in arms:
        paths = [
            out / "tuning" / f"{'-'.join([arm, *(f'{value:g}' for value in tried.values())])}.json" for tried in grid
        ]
        for path, tried in zip(paths, grid, strict=True):
            given = {"name": arm, "seed": max(study.seeds) + 1, "steps": study.settings["tuning_steps"], **tried}
            yield path, given, True
        if all(path.exists() for path in paths):
            losses = [json.loads(path.read_text())["loss"] for path in paths]
            best = grid[int(np.argmin(losses))]
            given = {"name": arm, "steps": study.settings["steps"], **best}
            for seed in study.seeds:
                yield out / f"{arm}-{seed}.json", given | {"seed": seed}, False


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether the block has a piece of work to itself; the system lets go of it with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".claimed").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield not path.exists()


def carry_out(
    study: Study,
    arms: Sequence[str],
    out: Path,
    run: Callable[[dict[str, Any], Path, bool], None],
    report: Callable[[], None],
) -> None:
    """Run what is left of a plan and nobody else runs; the last process reports.

    Several processes may carry out the same plan at once, and again: each takes runs that are not there yet.

    Args:
        study: arms, settings (``steps``, ``tuning_steps``), grid and seeds.
        arms: those that are trained.
        out: the folder of the records, ``tuning/`` in it that of the grid's.
        run: makes a record from options; of a tuning run its ``loss`` is what is compared.
        report: writes ``report.json`` and what goes with it.
    """
    while left := [piece for piece in _pieces(study, arms, out) if not piece[0].exists()]:
        for path, given, tuning in left:
            with claimed(path) as mine:
                if mine:
                    run(given, path, tuning)
                    break
        else:
            time.sleep(1)
    with claimed(out / "report.json") as mine:
        if mine:
            report()
