"""Runs the fuzz: ``python -m fuzz.run --cases 100000 --out results/fuzz.json`` from tests/. Every case has a seed.

Cases run in a child process, which is started again after a case that hangs or kills it. Of every case it is noted how
it ended: "accepted", "refused" (an error in words, as a command would show it), or a failure: "traceback", "hang",
"memory" (more than 2 GB), "crash", "outside" (a file outside of the case's folder was touched).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

__all__ = ["FAILURES", "run"]

MEMORY = 2 << 30
FAILURES = ("traceback", "hang", "memory", "crash", "outside", "long")
#: characters that a message may have
_LONGEST = 4_000


class _Hang(BaseException):
    pass


def _alarm(*_: Any) -> None:
    raise _Hang


def schedule(seed: int, cases: int, names: list[str] | None = None) -> list[str]:
    """The kind of every case."""
    from fuzz.kinds import KINDS

    chosen = names or list(KINDS)
    return random.Random(seed).choices(chosen, [KINDS[name][0] for name in chosen], k=cases)


def one(name: str, index: int, seed: int, seconds: float) -> tuple[str, str]:
    """How a case ended, and for a failure where."""
    from fuzz.kinds import KINDS
    from relinear_cli.errors import is_user_error, one_message

    folder = Path(tempfile.mkdtemp(prefix="case-"))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        KINDS[name][1](random.Random(f"{seed} {name} {index}"), folder)
        return "accepted", ""
    except _Hang:
        return "hang", _where(sys.exc_info()[2])
    except (Exception, KeyboardInterrupt) as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return "memory", _where(error.__traceback__)
        if not is_user_error(error):
            return "traceback", f"{type(error).__name__}: {str(error)[:200]} | {_where(error.__traceback__)}"
        if len(str(error)) > _LONGEST:
            return "long", f"{len(str(error))}: {one_message(error)[:200]} | {_where(error.__traceback__)}"
        return "refused", ""
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        shutil.rmtree(folder, ignore_errors=True)


def _where(trace: Any) -> str:
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if "/relinear/" in frame.filename and "/tests/" not in frame.filename]
    last = frames[-1]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in [last, *own[::-1][:3]])


def _work(pipe: Any, names: list[str], first: int, seed: int, seconds: float, limit: bool) -> None:
    """Cases from ``first`` on, each told before and after it."""
    import torch

    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _alarm)
    logging.disable(logging.CRITICAL)
    quiet = open(os.devnull, "w")  # noqa: SIM115
    home = Path(tempfile.mkdtemp(prefix="fuzz-home-"))
    os.chdir(home)
    with contextlib.redirect_stderr(quiet), contextlib.redirect_stdout(quiet):
        one(names[first], -1, seed, 600)  # what is built once is no part of a case
        if limit:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
        for index in range(first, len(names)):
            pipe.send((index, "begun", ""))
            outcome = one(names[index], index, seed, seconds)
            if list(home.iterdir()):
                outcome = ("outside", ", ".join(path.name for path in home.iterdir()))
                shutil.rmtree(home)
                home.mkdir()
                os.chdir(home)
            pipe.send((index, *outcome))
    shutil.rmtree(home, ignore_errors=True)


def run(
    cases: int, seed: int = 0, *, seconds: float = 20.0, kinds: list[str] | None = None, limit: bool = True
) -> dict[str, Any]:
    """Try so many cases; counts by kind and outcome, and the failures with what repeats them."""
    from fuzz import kinds as _  # noqa: F401  imported once, for every child

    names = schedule(seed, cases, kinds)
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    failures: list[dict[str, Any]] = []
    begun, index = time.monotonic(), 0
    context = multiprocessing.get_context("fork")
    while index < cases:
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_work, args=(theirs, names, index, seed, seconds, limit))
        child.start()
        theirs.close()
        patience = 700.0
        while index < cases:
            try:
                if not ours.poll(patience):
                    outcome = ("hang", "killed")
                else:
                    _at, *told = ours.recv()
                    patience = seconds + 30
                    if told[0] == "begun":
                        continue
                    outcome = tuple(told)
            except EOFError:
                outcome = ("crash", f"exit code {child.exitcode}")
            counts[names[index]][outcome[0]] += 1
            if outcome[0] in FAILURES:
                failures.append({"kind": names[index], "case": index, "outcome": outcome[0], "where": outcome[1]})
            index += 1
            if outcome[0] == "crash" or outcome == ("hang", "killed"):
                break
        child.kill()
        child.join()
    total = collections.Counter()
    for found in counts.values():
        total += found
    return {
        "seed": seed,
        "cases": cases,
        "seconds": round(time.monotonic() - begun, 1),
        "outcomes": dict(sorted(total.items())),
        "by_kind": {name: dict(sorted(found.items())) for name, found in sorted(counts.items())},
        "failures": failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20.0, help="longest that a case may take")
    parser.add_argument("--kind", action="append", help="of the cases; all by default")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = run(given.cases, given.seed, seconds=given.seconds, kinds=given.kind)
    text = json.dumps(found, indent=1)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text + "\n")
    print(json.dumps({key: found[key] for key in ("cases", "seconds", "outcomes", "by_kind")}, indent=1))
    groups = collections.Counter(f"{f['outcome']} {f['kind']} {f['where']}" for f in found["failures"])
    for where, count in groups.most_common(40):
        print(count, where)


if __name__ == "__main__":
    main()
