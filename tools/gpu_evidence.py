"""On a machine with an NVIDIA GPU: the plans of results/plans that take one, as a queue in calls of nine minutes.

``python tools/gpu_evidence.py`` (``make gpu-evidence``) runs plans by ``relinear compare --preregistration``, with
as many runs at once as there are processors but two: small models wait for operations to start, not for the GPU. At the
end of its time it stops what is under way, which keeps its state; the next call goes on. ``--rehearse`` takes every
plan through all of its steps on a CPU, at sizes that say nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from relinear.compare import CompareSettings, compare
from relinear.compare.settings import read_preregistration
from relinear.contract.plugins import IMPORT_VARIABLE, import_from_environment

__all__ = ["QUEUE", "carry_out", "rehearse"]

ROOT = Path(__file__).resolve().parents[1]
PLANS = ROOT / "results" / "plans"
#: the command, where relinear need not be installed
RELINEAR = [sys.executable, "-c", "from relinear_cli.main import run; run()"]
#: those that are open, in the order of the questions; the first few are begun at once
QUEUE = ("hdpl-5M-warmup", "hdpl-67M", "transponder-20M", "transponder-5M")
AT_ONCE = 2
#: with ``dense_start``, an operator of plans
OPERATORS = ROOT / "results" / "hdpl"
#: seconds that a stopped comparison has to save its state, and what a plan is started for at least
SAVING, LEAST = 25, 20
#: what a rehearsal makes of a plan
TINY: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
SHORT = {"batch_size": 2, "device": "cpu", "dtype": "float32", "threads": 1, "eval_every": 0}


def _finished(out: Path) -> bool:
    return (out / "results.json").is_file()


def _command(name: str, out: Path, workers: int) -> list[str]:
    """What carries a plan out."""
    return [
        *RELINEAR,
        "compare",
        "--preregistration",
        str(PLANS / f"{name}.yaml"),
        "--workers",
        str(workers),
        "--out",
        str(out),
    ]


def _stop(running: Any) -> None:
    """Have a process save its state and end; it is killed where that takes longer than there is time for."""
    running.send_signal(signal.SIGTERM)
    try:
        running.wait(SAVING)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait()


def carry_out(
    out: Path, minutes: float, workers: int | None = None, start: Callable[..., Any] = subprocess.Popen
) -> list[str]:
    """Run plans for so many minutes; return the names of those that are not done yet."""
    ends = time.monotonic() + 60 * minutes - SAVING
    workers = workers or max(1, (os.cpu_count() or 1) - 2)
    at_once = min(AT_ONCE, workers)

    def work(first: int) -> None:
        for name in QUEUE[first:] + QUEUE[:first]:
            left = ends - time.monotonic()
            if _finished(out / name) or left < LEAST:
                continue
            running = start(_command(name, out / name, max(1, workers // at_once)), cwd=ROOT)
            try:
                running.wait(left)
            except subprocess.TimeoutExpired:
                _stop(running)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(work, range(at_once)))
    return [name for name in QUEUE if not _finished(out / name)]


def _tiny(settings: CompareSettings, text: str) -> CompareSettings:
    """The same comparison of models and budgets that take seconds; entries lose the widths of their plan."""
    values = settings.model_dump(mode="json", exclude_unset=True)
    budget = {"budgets": [256, 512]} if settings.budgets else {"tokens": 512}
    values = {key: value for key, value in values.items() if key not in ("tokens", "budgets")} | budget
    sizes = (
        {key: size for key, size in TINY.items() if key != "intermediate_size"}
        if "gpt2" in settings.train.model
        else TINY
    )
    data = {"data": text, "tokenizer": "bytes", "sequence_length": 32, "max_validation_tokens": 128}
    values["train"] |= SHORT | {"data": data, "model_overrides": sizes}
    for entry in values["entries"].values():
        own = entry.get("set", {})
        for key in [key for key in own if key.startswith("model_overrides")]:
            del own[key]
    values["tune"] |= {"extensions": 0, "fraction": 1.0}
    return CompareSettings.load(values)


def rehearse(out: Path, text: str) -> list[str]:
    """Take every plan through its steps; return the names of those that did not end."""
    for name in QUEUE:
        compare(_tiny(read_preregistration(PLANS / f"{name}.yaml").comparison, text), out / name, workers=0)
        print(f"{name}: every step is there", flush=True)
    return [name for name in QUEUE if not _finished(out / name)]


def main() -> int:
    """Run as the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--workers", type=int, help="runs at once; by default two fewer than there are processors")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu-evidence")
    parser.add_argument("--rehearse", metavar="TEXT", help="on a CPU, on this text")
    given = parser.parse_args()
    os.chdir(ROOT)
    sys.path.append(str(OPERATORS))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(OPERATORS)]))
    os.environ[IMPORT_VARIABLE] = "dense_start"
    if given.rehearse:
        import_from_environment()
        left = rehearse(given.out, given.rehearse)
    else:
        left = carry_out(given.out, given.minutes, given.workers)
    print(f"left for the next call: {', '.join(left)}" if left else "every plan is done")
    return 1 if left and given.rehearse else 0


if __name__ == "__main__":
    sys.exit(main())
