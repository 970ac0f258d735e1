"""``python -m kills.shared compare``: two workers share it, one is killed midway, a third one joins."""

from __future__ import annotations

import collections
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kills.works import come_to, settings
from relinear.compare.run import compare


def share_compare(data: Path, out: Path, shared: bool = True) -> None:
    """Two entries, tuned over three rates and a fourth where the best is at an edge, then trained on two seeds."""
    common = settings(data, steps=6, save_every=1).model_dump(exclude_unset=True)
    del common["operators"]
    recipe = {"entries": {"a": "dense", "b": "low_rank:rank=4"}, "train": common, "seeds": [0, 1]}
    recipe |= {
        "tune": {"learning_rates": [1e-3, 4e-3, 1.6e-2], "fraction": 1, "extensions": 1},
        "speed": {"seconds": 0},
    }
    log = out.with_name(f"{out.name}-steps-{os.getpid()}.jsonl")

    def note(event: Any) -> None:
        if event.stage in ("tune", "train") and event.done and not event.what.endswith(")"):
            with log.open("a") as file:
                file.write(json.dumps([event.what, event.done]) + "\n")

    compare(recipe, out, isolate=False, shared=shared, on_event=note)


def told_of_compare(out: Path, alone: dict[str, Any]) -> dict[str, Any]:
    """Whether it is what one process comes to, and which steps were made by more than one worker."""
    logs = [path.read_text().splitlines() for path in out.parent.glob(f"{out.name}-steps-*.jsonl")]
    made = collections.Counter(line for log in logs for line in {tuple(json.loads(text)) for text in log})
    found = come_to(out)
    return {
        "same": sorted(key for key in alone.keys() | found.keys() if alone.get(key) != found.get(key)) == [],
        "workers": sum(bool(log) for log in logs),
        "twice": sum(count - 1 for count in made.values()),
    }


SHARED: dict[str, tuple[Callable[..., None], Callable[[Path, dict[str, Any]], dict[str, Any]], str]] = {
    "compare": (share_compare, told_of_compare, "*/*/*/checkpoints/checkpoint-*"),
}


def worker(work: Callable[..., None], *arguments: Any) -> int:
    """A process that works on it; its number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work(*arguments)
        code = 0
    finally:
        os._exit(code)


def main(name: str) -> None:
    work, told, begun = SHARED[name]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="shared-") as folder:
        out, data = Path(folder) / "out", Path(folder) / "text.txt"
        os.environ["RELINEAR_CACHE"] = str(Path(folder) / "cache")
        data.write_text("\n\n".join(f"paragraph {i} says {i * i} and {i % 7}" for i in range(60)))
        first, second = worker(work, data, out), worker(work, data, out)
        deadline = time.monotonic() + 200
        while not list(out.glob(begun)) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        third = worker(work, data, out)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in (second, third)]
        alone = Path(folder) / "alone"
        os.waitpid(worker(work, data, alone, False), 0)
        print(json.dumps({"codes": codes} | told(out, come_to(alone))))


if __name__ == "__main__":
    main(sys.argv[1])
