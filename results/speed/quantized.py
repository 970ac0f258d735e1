"""A few rows through integers of few bits beside a dense product and torch's own packed kernels, from cold memory.

    OMP_NUM_THREADS=1 python results/speed/quantized.py > results/speed/quantized.txt

Every call takes another copy of the weights, more of them than caches hold; contenders take turns in one process.
Figures are times of the float32 dense product over a contender's: above 1 is faster. Each is the least of its rounds:
other work on a machine only adds to times. torch's packed kernels take bfloat16 inputs, its dynamic int8 float32
ones.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

import relinear
from relinear.contract.inference import caching_for_inference
from relinear.system.machine import describe_machine

SHAPES = ((576, 576), (576, 1536), (1536, 576), (2048, 2048), (4096, 4096))
#: bytes of a contender's copies, and how many there are at most
COLD, MOST = 160e6, 300
CALLS, ROUNDS = 20, 25


def copies(make: Callable[[], Callable], stored: float) -> list[Callable]:
    """Return layers of ``stored`` bytes each, as many as are to be cycled through."""
    return [make() for _ in range(min(MOST, int(COLD / stored) + 2))]


def packed_int4(inputs: int, outputs: int) -> Callable:
    """torch's own, groups of 64."""
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32)
    weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    grid = torch.rand(inputs // 64, outputs, 2).bfloat16()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), weight, 64, grid)


def packed_int8(inputs: int, outputs: int) -> Callable:
    """torch's own, a scale for each row."""
    weight, scale = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8), torch.rand(outputs).bfloat16()
    return lambda x: torch.ops.aten._weight_int8pack_mm(x.bfloat16(), weight, scale)


def dynamic_int8(inputs: int, outputs: int) -> Callable:
    """torch's own, which rounds the inputs, too."""
    layer = nn.Sequential(nn.Linear(inputs, outputs, bias=False))
    return torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, dtype=torch.qint8)


def contenders(inputs: int, outputs: int) -> dict[str, list[Callable]]:
    """Name -> copies of every layer of this size."""
    size = inputs * outputs
    found = {"dense": copies(lambda: nn.Linear(inputs, outputs, bias=False).eval(), 4 * size)}
    for bits in (2, 3, 4, 5, 6, 8):
        config = relinear.Quantized(bits=bits)
        found[f"{bits} bits"] = copies(lambda c=config: c.build(inputs, outputs, False).eval(), size * bits / 8)
        rounded = copies(lambda c=config: relinear.for_inference_(c.build(inputs, outputs, False)), size * bits / 8)
        found[f"{bits} bits, rounded inputs"] = rounded
    found["int4pack"] = copies(lambda: packed_int4(inputs, outputs), size / 2)
    found["int8pack"] = copies(lambda: packed_int8(inputs, outputs), size)
    found["dynamic int8"] = copies(lambda: dynamic_int8(inputs, outputs), size)
    return found


@torch.no_grad()
def main() -> None:
    """Measure and print a line for every shape and number of rows."""
    warnings.filterwarnings("ignore")
    print(describe_machine(), f"torch's threads: {torch.get_num_threads()}")
    with caching_for_inference(relinear.Quantized().build(64, 64)):
        pass  # builds the kernels
    for inputs, outputs in SHAPES:
        every = contenders(inputs, outputs)
        for rows in (1, 8, 256):
            x, calls = torch.randn(rows, inputs), CALLS if rows < 100 else 2
            times: dict[str, list[float]] = {name: [] for name in every}
            for turn in range(ROUNDS):
                for name, layers in every.items():
                    start = time.perf_counter()
                    for i in range(calls):
                        layers[(turn * calls + i) % len(layers)](x)
                    times[name].append((time.perf_counter() - start) / calls)
            base = min(times.pop("dense"))
            ratios = "  ".join(f"{name} {base / min(found):.2f}" for name, found in times.items())
            print(f"{inputs} -> {outputs}, {rows} rows: dense {base * 1e6:.0f} us;  {ratios}", flush=True)


if __name__ == "__main__":
    main()
