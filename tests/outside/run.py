"""Runs the suites: ``python -m outside.run --out ../runs/outside.json`` from tests/.

First on stock models without relinear; then on every family. A test that passes on the stock model and fails on a
family stands in ``expected.yaml`` with its reason. One that fails and does not stand there ends the run with status 1,
and so does one that stands there and does not fail.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from outside import sources

HERE = Path(__file__).parent
Outcomes = dict[str, dict[str, dict[str, Any]]]  # family -> test -> outcome, seconds, said


@functools.cache
def expected() -> list[dict[str, Any]]:
    """The entries of the list: ``families`` (a list), ``tests`` (a list; ``*`` for any parameters), ``reason``."""
    return yaml.safe_load((HERE / "expected.yaml").read_text()) or []


def reason_for(family: str, test: str) -> str:
    """Why ``test`` may fail on ``family``; empty where it may not."""
    for entry in expected():
        if family in entry["families"] and any(fnmatch.fnmatchcase(test, pattern) for pattern in entry["tests"]):
            return entry["reason"]
    return ""


def run(what: list[str], *, bare: bool, processes: int, checkpoints: Path) -> Outcomes:
    """The outcomes of the suites ``what`` (node ids, keywords), in a pytest of their own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "OUTSIDE_CHECKPOINTS": str(checkpoints),
            "OUTSIDE_OUTCOMES": file.name,
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        }
        if bare:
            environment["OUTSIDE_BARE"] = "1"
        options = ["-c", os.devnull, "--rootdir", str(HERE.parent), "--noconftest", "-q", "--tb=no", "--timeout=600"]
        plugins = ["-p", "outside.collect", "-p", "no:cacheprovider", "-p", "no:warnings"]
        shared = ["-n", str(processes)] if processes > 1 else []
        command = [sys.executable, "-m", "pytest", *options, *plugins, *shared, *what]
        ended = subprocess.run(command, cwd=HERE.parent, env=environment, stdout=subprocess.PIPE, text=True)
        if ended.returncode not in (0, 1):
            raise SystemExit(f"pytest ended with status {ended.returncode}:\n{ended.stdout[-3000:]}")
        found: Outcomes = {}
        for node, outcome in json.loads(Path(file.name).read_text()).items():
            family, test = _named(node, checkpoints)
            if family != "TestLora":  # a model of PEFT's own choice
                found.setdefault(family, {})[test] = outcome
        return found


def _named(node: str, checkpoints: Path) -> tuple[str, str]:
    """(family, test) of a node id of pytest's; PEFT's tests have a family's checkpoint among their parameters."""
    _, family, test = node.split("::", 2)
    folder = re.search(f"{re.escape(str(checkpoints))}/([a-z0-9_]+)", test)
    return (family, test) if folder is None else (folder[1], f"lora::{test.replace(folder[0], 'MODEL')}")


def make_checkpoints(folder: Path, families: Iterable[str]) -> None:
    """A language model of every family, for PEFT's tests."""
    import torch

    from outside.families import FAMILIES
    from outside.suite import MODELS

    for name in families:
        config_class, settings, classes = MODELS[FAMILIES[name].model]
        torch.manual_seed(0)
        model = classes[1](config_class(**settings))
        FAMILIES[name].put_in_as_trained(model)
        model.save_pretrained(folder / name)


def judge(stock: Outcomes, found: Outcomes, stock_of: dict[str, str]) -> tuple[list[dict[str, Any]], list[str]]:
    """A row of counts for every family, and what is wrong, in words."""
    rows, wrong = [], []
    for family, outcomes in found.items():
        reference = stock[stock_of[family]]
        failed = {test for test, outcome in outcomes.items() if outcome["outcome"] == "failed"}
        with_stock = {test for test in failed if reference.get(test, {}).get("outcome") == "failed"}
        reasons = {test: reason_for(family, test) for test in outcomes}
        for test in sorted(failed - with_stock):
            if not reasons[test]:
                wrong.append(f"{family}: {test} fails: {outcomes[test]['said']}")
        for test, reason in sorted(reasons.items()):
            if reason and test not in failed and reference.get(test, {}).get("outcome") != "skipped":
                wrong.append(f"{family}: {test} is expected to fail and {outcomes[test]['outcome']}: change the list")
        passed = [test for test, outcome in outcomes.items() if outcome["outcome"] == "passed"]
        rows.append(
            {
                "family": family,
                "run": len(failed) + len(passed),
                "passed": len(passed),
                "failed with stock": len(with_stock),
                "failed": len(failed - with_stock),
                "listed": sum(bool(reasons[test]) for test in failed - with_stock),
                "seconds": round(sum(outcome["seconds"] for outcome in outcomes.values())),
            }
        )
    return rows, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the counts go")
    parser.add_argument("--quick", action="store_true", help="a few families, nothing that is compiled")
    parser.add_argument("--families", nargs="*", help="these alone")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    try:
        left_out = sources.fetch()
    except sources.SourcesError as error:
        print(f"Not run: the suites are not here and cannot be fetched ({error}).")
        return 0 if options.quick else 2
    if left_out:
        print(left_out)

    from outside.families import FAMILIES

    chosen = options.families or [name for name, family in FAMILIES.items() if family.quick or not options.quick]
    stock_of = {name: FAMILIES[name].stock for name in chosen}
    stock = list(dict.fromkeys(stock_of.values()))
    leave_out = ["-k", "not compil"] if options.quick else []
    with tempfile.TemporaryDirectory() as temporary:
        sets = {"stock": (stock, True), "families": (chosen, False)}
        found = {}
        for name, (families, bare) in sets.items():
            checkpoints = Path(temporary).resolve() / name
            make_checkpoints(checkpoints, families)
            what = ["outside/lora.py", *(f"outside/suite.py::{family}" for family in families), *leave_out]
            found[name] = run(what, bare=bare, processes=options.processes, checkpoints=checkpoints)
    rows, wrong = judge(found["stock"], found["families"], stock_of)
    for row in [dict.fromkeys(rows[0]), *rows]:
        print("  ".join(f"{value if value is not None else key!s:<18}" for key, value in row.items()))
    print(*wrong, sep="\n")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"rows": rows, "wrong": wrong, "left_out": left_out}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
