"""Time twenty-four small runs on a GPU three ways: one after the other, stacked, and shared by processes.

    python results/gpu/many.py OUT [--processes 14] > results/gpu/many.json

Every way is the command that a user types, with its start, once the text is prepared. One after the other is three
runs: the time of 24 is reckoned from the last two of them, by when each was written, and from the start that is left.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from relinear.system.machine import describe_machine

RECIPE = Path(__file__).with_name("many.yaml")
RUNS = 24
COMMAND = [sys.executable, "-c", "from relinear_cli.main import run; run()", "compare", "--recipe", str(RECIPE)]


def timed(out: Path, *more: str, processes: int = 1) -> float:
    """Seconds that the command takes in so many processes at once."""
    start = time.perf_counter()
    running = [
        subprocess.Popen([*COMMAND, "--out", str(out), *more], stdout=subprocess.DEVNULL) for _ in range(processes)
    ]
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit(f"{out}: the command ended with {codes}")
    return time.perf_counter() - start


def written(out: Path) -> list[float]:
    """When each run was written last, in order."""
    return sorted(path.stat().st_mtime for path in out.rglob("block_losses.npy"))


def main() -> None:
    """Print the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--processes", type=int, default=14)
    given = parser.parse_args()
    timed(given.out / "first", "--seeds", "0")  # makes the tokenizer and reads the text
    three = timed(given.out / "alone", "--seeds", "0,1,2")
    ends = written(given.out / "alone")
    one = (ends[2] - ends[0]) / 2
    found: dict[str, Any] = {"machine": describe_machine(), "runs": RUNS, "seconds_of_a_run": one}
    found["one_by_one"] = three + (RUNS - 3) * one
    found["stacked"] = timed(given.out / "stacked", "--parallel", "auto")
    runs = [json.loads(path.read_text()) for path in (given.out / "stacked").rglob("run.json")]
    found["runs_stacked"] = sum("stacked" in run for run in runs)
    found["step"] = next((run["stacked"] for run in runs if "stacked" in run), None)
    found["processes"] = given.processes
    found["shared"] = timed(given.out / "shared", "--share", processes=given.processes)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
