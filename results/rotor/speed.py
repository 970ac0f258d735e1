"""Rotor layers against nn.Linear of the same shape: ratios of median times, interleaved in one process.

    python results/rotor/speed.py

One double rotor (width=1, depth=0), in inference at every width, and forward and backward at 2048. Writes
speed.json in --out and prints it as it goes. The allocator is set up first (``tune_allocator``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch

import relinear
from relinear.system.machine import describe_machine


def ratio(dense, ours, seconds: float) -> dict[str, float]:
    """Median of dense, median ratio of neighbouring timings, and the ratio of the least disturbed timings."""
    dense(), ours()
    start = time.perf_counter()
    dense()
    once = time.perf_counter() - start
    inner = max(1, int(2e-3 / max(once, 1e-6)))
    times: list[tuple[float, float]] = []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times) < 3:
        pair = []
        for function in (dense, ours):
            start = time.perf_counter()
            for _ in range(inner):
                function()
            pair.append((time.perf_counter() - start) / inner)
        times.append((pair[0], pair[1]))
    return {
        "dense_ms": 1e3 * statistics.median(a for a, _ in times),
        "ratio": statistics.median(b / a for a, b in times),
        "ratio_of_minima": min(b for _, b in times) / min(a for a, _ in times),
    }


def saved_bytes(module: torch.nn.Module, x: torch.Tensor) -> int:
    """Memory that the graph of one forward keeps beside the parameters and the input, plus that of gradients."""
    kept: dict[int, int] = {}
    own = {p.data_ptr() for p in module.parameters()} | {x.data_ptr()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x).sum()
    return sum(kept.values()) + 2 * sum(p.numel() * p.element_size() for p in module.parameters())


def training(add, seconds: float) -> None:
    """Forward and backward at width 2048, and the memory that they need."""
    x = torch.randn(4096, 2048, requires_grad=True)
    dense = torch.nn.Linear(2048, 2048, bias=False)
    ours = relinear.Rotor(width=1, depth=0).build(2048, 2048, bias=False)
    grad = torch.randn(4096, 2048)
    times = ratio(lambda: dense(x).backward(grad), lambda: ours(x).backward(grad), 4 * seconds)
    memory = saved_bytes(ours, x) / saved_bytes(dense, x)
    row = {"what": "forward and backward", "width": 2048, "tokens": 4096, "dtype": "float32", "basis": "spinor"}
    add(**row, **times, memory_ratio=memory)


def main() -> None:
    """Measure what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each comparison")
    parser.add_argument("--widths", default="64,128,256,512,1024,2048,4096")
    parser.add_argument("--tokens", default="1,4096")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/rotor"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    allocator = relinear.system.allocator.tune_allocator()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    file = options.out / "speed.json"
    rows = json.loads(file.read_text())["rows"] if file.is_file() else []  # widths may be measured one after another
    key = ("what", "width", "tokens", "dtype", "basis")

    def add(**row) -> None:
        rows[:] = [other for other in rows if any(other[k] != row[k] for k in key)] + [row]
        values = {"machine": describe_machine(), "allocator": allocator, "seconds": options.seconds, "rows": rows}
        file.write_text(json.dumps(values, indent=2) + "\n")
        print(json.dumps(row), flush=True)

    if "2048" in options.widths.split(","):
        training(add, options.seconds)
    for dtype in (torch.float32, torch.bfloat16):
        for width in map(int, options.widths.split(",")):
            for tokens in map(int, options.tokens.split(",")):
                x = torch.randn(tokens, width, dtype=dtype)
                dense = torch.nn.Linear(width, width, bias=False, dtype=dtype)
                for basis in ("spinor", "blade"):
                    ours = relinear.Rotor(width=1, depth=0, basis=basis).build(width, width, bias=False, dtype=dtype)
                    relinear.for_inference_(ours)
                    with torch.no_grad():
                        exact = ours.to_dense().double() @ x[:4].double().T
                        error = (ours(x[:4]).double().T - exact).norm() / exact.norm()
                        assert error < (1e-5 if dtype == torch.float32 else 2e-2), (width, basis, float(error))
                        times = ratio(partial(dense, x), partial(ours, x), options.seconds)
                    add(what="inference", width=width, tokens=tokens, dtype=str(dtype).removeprefix("torch."),
                        basis=basis, **times)  # fmt: skip


if __name__ == "__main__":
    main()
