"""Which sizes are faster through a dense matrix: the measurement behind the operators' ``DenseLimits``.

    python results/speed/dense_or_structured.py > results/speed/dense_or_structured.txt

Prints the time of each structured form relative to dense nn.Linear (median of interleaved rounds; above 1 is slower).
"""

import functools
import sys

import torch
from torch import nn

import relinear
from relinear.kernels.dense import DenseLimits
from relinear.system.machine import describe_machine
from relinear.system.timing import interleave

CONFIGS = {
    "low_rank": lambda size: relinear.LowRank(rank=min(64, size // 4)),
    "pivoted_low_rank": lambda size: relinear.PivotedLowRank(rank=min(64, size // 4)),
    "block_hadamard": lambda size: relinear.BlockHadamard(),
    "monarch": lambda size: relinear.Monarch(),
}


SIZES = 64, 128, 256, 512, 1024, 2048
#: what has no layer made dense
NEVER = DenseLimits({})


def inference(dtype: torch.dtype, tokens: int, size: int) -> str:
    """Ratios of the structured forms, without gradients."""
    x = torch.randn(tokens, size).to(dtype)
    modules: dict[str, nn.Module] = {"dense": nn.Linear(size, size, bias=False)}
    modules |= {kind: make(size).build(size, size, bias=False) for kind, make in CONFIGS.items()}
    for module in modules.values():
        bounded(module, NEVER)
    calls = {kind: functools.partial(module.to(dtype).eval(), x) for kind, module in modules.items()}
    with torch.no_grad():
        timings = interleave(calls, "dense", rounds=25, min_seconds=0.01)
    return "  ".join(f"{kind} {timings[kind].ratio:5.2f}" for kind in CONFIGS)


def bounded(module: nn.Module, bounds: DenseLimits) -> None:
    """Have layers of this kind go by such bounds."""
    if not isinstance(module, nn.Linear):
        sys.modules[type(module).__module__]._DENSE_LIMITS = bounds


def main() -> None:
    """Print one line a dtype, number of tokens and size."""
    relinear.system.allocator.tune_allocator()
    machine = describe_machine()
    print(f"# {machine['processor']}, {machine['threads']} threads, torch {machine['torch']}, allocator tuned")
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in (1, 1024):
            for size in SIZES:
                ratios = inference(dtype, tokens, size)
                print(f"{str(dtype).removeprefix('torch.'):9} {tokens:5} tokens  {size:5}  {ratios}", flush=True)


if __name__ == "__main__":
    main()
