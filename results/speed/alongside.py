"""Times that `relinear bench` does not take: expanded gradients into a rotor layer, the start, the demonstration.

    python results/speed/alongside.py

Five runs of each but the last, whose command takes minutes and runs once (--demo 0: not at all). Writes alongside.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import relinear
from relinear.system.allocator import tune_allocator
from relinear.system.files import write_json
from relinear.system.machine import command_line, describe_machine
from relinear.system.timing import interleave

RELINEAR = [str(Path(sys.executable).parent / "relinear")]
DEMO = ["compare", "--recipe", "quick"]


def expanded_gradient(width: int, tokens: int) -> float:
    """Time of a default rotor's step with the gradient of a sum, to that with a contiguous one."""
    torch.manual_seed(0)
    layer = relinear.Rotor().build(width, width).train()
    x, upstream = torch.randn(tokens, width, requires_grad=True), torch.ones(tokens, width)

    def step(gradient: torch.Tensor) -> None:
        layer(x).backward(gradient)
        x.grad = None
        layer.zero_grad(set_to_none=True)

    expanded = torch.ones(()).expand(tokens, width)
    calls = {"contiguous": lambda: step(upstream), "expanded": lambda: step(expanded)}
    return interleave(calls, "contiguous", rounds=5)["expanded"].ratio


def seconds_of(arguments: list[str]) -> float:
    """Wall-clock time of a command of relinear's."""
    start = time.perf_counter()
    subprocess.run([*RELINEAR, *arguments], check=True, capture_output=True)
    return time.perf_counter() - start


def demonstration() -> dict[str, list[float]]:
    """Minutes of what `make demo` runs, and the training speed of its rotors relative to dense."""
    with tempfile.TemporaryDirectory() as folder:
        minutes = seconds_of([*DEMO, "--out", folder]) / 60
        entries = json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))["entries"]
    ratios = [entry["speed"]["train_ratio"] for entry in entries if "rotor" in entry["name"] and entry.get("speed")]
    return {"demo_minutes": [minutes], "quick_rotor_training": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--demo", type=int, choices=(0, 1), default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/speed/alongside.json"))
    options = parser.parse_args()
    tune_allocator()
    seconds_of(["--help"])  # files are read from disk once
    result = {
        "command": command_line(),
        "machine": describe_machine(),
        "expanded_gradient": [expanded_gradient(options.width, options.tokens) for _ in range(options.runs)],
        "help_seconds": [seconds_of(["--help"]) for _ in range(options.runs)],
        **(demonstration() if options.demo else {}),
    }
    write_json(options.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
