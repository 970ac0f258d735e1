"""``python -m kills.shared``: two workers share one sweep, one is killed in the middle, a third one joins."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from pathlib import Path

import torch

from kills.works import settings
from relinear.compare.sweep import parse_parameter, sweep
from relinear.compare.tune import open_study

TRIALS = 6


def worker(data: Path, out: Path) -> int:
    """A process that works on the sweep; its number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        base = settings(data, steps=8, save_every=1, save_model=False)
        sweep(base, [parse_parameter("learning_rate=1e-4..1e-2:log")], out, trials=TRIALS, isolate=False, shared=True)
        code = 0
    finally:
        os._exit(code)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="shared-") as folder:
        out, data = Path(folder) / "out", Path(folder) / "text.txt"
        os.environ["RELINEAR_CACHE"] = str(Path(folder) / "cache")
        data.write_text("\n\n".join(f"paragraph {i} says {i * i} and {i % 7}" for i in range(60)))
        first, second = worker(data, out), worker(data, out)
        deadline = time.monotonic() + 200
        while not list(out.glob("trials/*/checkpoints/checkpoint-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        third = worker(data, out)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in (second, third)]
        ended = [t for t in open_study(out, "sweep", shared=True).get_trials() if t.state.name == "COMPLETE"]
        runs = [json.loads(path.read_text())["status"] for path in sorted(out.glob("trials/*/run.json"))]
        table = json.loads((out / "sweep.json").read_text())["trials"]
        numbers = sorted(trial.user_attrs["number"] for trial in ended)
        print(json.dumps({"codes": codes, "ended": numbers, "runs": runs, "table": len(table)}))


if __name__ == "__main__":
    main()
