"""A few rows, as in decoding, through low-rank layers at 0.7 of a dense layer's parameters: microseconds a call.

    python results/speed/few_rows.py [float32|bfloat16] [THREADS]

Dense ``nn.Linear``, torch's two products, and the C++ kernel, over enough layers that no weight comes from a cache:
what ``MOST_FEW_ROWS`` and ``FEWEST_CHAIN_WEIGHTS`` (kernels/native) and the tables of ``kernels/choice.py`` stand on.
"""

import sys
import time

import torch
from torch import nn

import relinear
from relinear.kernels import native
from relinear.kernels.native import build

KEEP, BYTES, REPEATS = 0.7, 1.5e8, 9
SHAPES = ((128, 128), (256, 256), (512, 512), (576, 576), (576, 1536), (1536, 576), (1024, 1024), (2048, 2048))


def microseconds(layers: list, x: torch.Tensor) -> float:
    """Of one call, one layer after another: the best of some rounds."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        for layer in layers:
            layer(x)
        best = min(best, (time.perf_counter() - start) / len(layers))
    return best * 1e6


def configs(inputs: int, outputs: int) -> list:
    """Both low-rank operators at the rank that keeps ``KEEP`` of the parameters, to the next multiple of 8 below."""
    plain = int(KEEP * inputs * outputs / (inputs + outputs)) // 8 * 8
    total = inputs + outputs
    pivoted = int((total - (total**2 - 4 * KEEP * inputs * outputs) ** 0.5) / 2) // 8 * 8
    return [relinear.LowRank(rank=plain), relinear.PivotedLowRank(rank=pivoted)]


@torch.no_grad()
def main() -> None:
    """Print a table in Markdown."""
    dtype = getattr(torch, sys.argv[1] if len(sys.argv) > 1 else "float32")
    torch.set_num_threads(int(sys.argv[2]) if len(sys.argv) > 2 else torch.get_num_threads())
    if not build.is_loaded():
        sys.exit("the C++ kernels cannot be built here")
    native.FEWEST_CHAIN_WEIGHTS = 0
    print(f"{dtype}, {torch.get_num_threads()} threads: dense / torch's products / kernel\n")
    rows = (1, 2, 4, 8, 16)
    print("| in, out, operator | " + " | ".join(map(str, rows)) + " |\n|" + " --- |" * (len(rows) + 1))
    for inputs, outputs in SHAPES:
        count = max(2, int(BYTES / (inputs * outputs * 4)))
        dense = [nn.Linear(inputs, outputs, bias=False, dtype=dtype) for _ in range(count)]
        for config in configs(inputs, outputs):
            layers = [config.build(inputs, outputs, bias=False).to(dtype).eval() for _ in range(count)]
            cells = []
            for tokens in rows:
                x = torch.randn(tokens, inputs, dtype=dtype)
                times = [microseconds(dense, x)]
                for most in (0, tokens):
                    native.MOST_FEW_ROWS[dtype] = most
                    times.append(microseconds(layers, x))
                cells.append(" / ".join(f"{t:.0f}" for t in times))
            print(f"| {inputs}, {outputs}, {config} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
