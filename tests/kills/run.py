"""Runs the kills: ``python -m kills.run --kills 200 --out results/kills.json`` from tests/. Every kill has a seed.

A work runs in a child process. Half of the kills fall at an event on disk below its directory (the n-th file opened,
renamed or removed: the same moment on any machine), half after a random time. Then the work is started again, perhaps
killed again, and in the end left to finish: it must come to the same bits as one that was left in peace.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

__all__ = ["run"]

_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree", "tempfile.mkdtemp"}


class _Count:
    """Counts events on disk below a directory, and kills the process at one of them."""

    def __init__(self, out: Path, fatal: int | None) -> None:
        self.out, self.fatal, self.seen = str(out), fatal, 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS and arguments and str(arguments[0]).startswith(self.out):
            self.seen += 1
            if self.seen == self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)


def attempt(
    name: str, data: Path, out: Path, *, event: int | None = None, seconds: float | None = None
) -> tuple[bool, int, float]:
    """Whether the work ended by itself, the events on disk, and the seconds it took. Raises if it failed."""
    from kills.works import COMPRESSIONS, WORKS

    receive, send = os.pipe()
    begun, child = time.monotonic(), os.fork()
    if child == 0:
        code = 1
        try:
            os.close(receive)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            count = _Count(out, event)
            sys.addaudithook(count)
            (WORKS | COMPRESSIONS)[name](data, out)
            os.write(send, str(count.seen).encode())
            code = 0
        except BaseException:
            os.write(send, traceback.format_exc()[-4_000:].encode())
        os._exit(code)
    os.close(send)
    timer = threading.Timer(seconds, os.kill, (child, signal.SIGKILL)) if seconds is not None else None
    if timer:
        timer.start()
    _, status = os.waitpid(child, 0)
    if timer:
        timer.cancel()
    told = os.read(receive, 65_536).decode()
    os.close(receive)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, -signal.SIGKILL):
        raise AssertionError(f"{name} failed:\n{told}")
    return code == 0, int(told or 0) if code == 0 else 0, time.monotonic() - begun


def run(kills: int, seed: int = 0, names: list[str] | None = None, minutes: float = math.inf) -> dict[str, Any]:
    """So many kills over all works in turn; counts by work, and what came out otherwise than in peace.

    The work "compressions" stands for all of ``COMPRESSIONS``, words of their names, with commas, for those that have
    them all; they are counted by each of their axes. After so many ``minutes`` no further work is begun.
    """
    import torch

    from kills.works import COMPRESSIONS, WORKS, come_to

    torch.set_num_threads(1)
    ways = {
        work: [name for name in COMPRESSIONS if {*work.split(",")} <= {"compressions", *name.split()}]
        for work in names or WORKS
    }
    names = [name for work, found in ways.items() for name in ([work] if work in WORKS else found)]
    survived: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        home = Path(folder)
        os.environ["RELINEAR_CACHE"] = str(home / "cache")
        data = home / "text.txt"
        data.write_text("\n\n".join(f"paragraph {i} says {i * i} and {i % 7}" for i in range(60)))
        peace: dict[str, Any] = {}
        number = 0
        while sum(survived.values()) < kills > len(failures) and time.monotonic() - begun < 60 * minutes:
            name = names[number % len(names)]
            rng = random.Random(f"{seed} {number}")
            number += 1
            out = home / f"{name}-{number}"
            moments = []
            try:
                if name not in peace:
                    _, events, took = attempt(name, data, home / f"{name}-peace")
                    peace[name] = (come_to(home / f"{name}-peace"), events, took)
                expected, events, took = peace[name]
                for _ in range(rng.choice([1, 1, 2, 3])):
                    by_event = rng.random() < 0.5
                    at = rng.randrange(1, events + 1) if by_event else rng.uniform(0, took)
                    moments.append(at)
                    ended, *_ = attempt(name, data, out, **{"event" if by_event else "seconds": at})
                    if ended:
                        break
                    survived[name] += 1
                attempt(name, data, out)
                found = come_to(out)
                wrong = {key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)}
                # killed between its end and the removal of its last checkpoint, a run keeps that, which is no result
                wrong -= {key for key in found.keys() - expected.keys() if "checkpoints" in Path(key).parts}
                if wrong:
                    failures.append(f"{name} {number} killed at {moments}: other bits in {sorted(wrong)}")
            except AssertionError as error:
                failures.append(f"{name} {number} killed at {moments}: {error}")
    return {
        "seed": seed,
        "kills": sum(survived.values()),
        "works": number,
        "seconds": round(time.monotonic() - begun, 1),
        "by_work": dict(sorted(_by_words(survived).items())),
        "failures": failures,
    }


def _by_words(survived: collections.Counter[str]) -> collections.Counter[str]:
    words: collections.Counter[str] = collections.Counter()
    for name, count in survived.items():
        words.update(dict.fromkeys(name.split(), count))
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", action="append", help="of the works; all by default")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing after so many")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = run(given.kills, given.seed, given.work, given.minutes)
    text = json.dumps(found, indent=1)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text + "\n")
    print(text)
    sys.exit(1 if found["failures"] else 0)


if __name__ == "__main__":
    main()
