"""Which sizes are faster through a dense matrix in inference: the measurement behind relinear.kernels.choice.

    python results/speed/dense_or_structured.py > results/speed/dense_or_structured.txt

Prints the time of each structured form relative to dense nn.Linear (median of interleaved rounds; above 1 is slower).
"""

import torch

import relinear
from relinear.kernels import choice
from relinear.system.machine import describe_machine
from relinear.system.timing import interleave

CONFIGS = {
    "low_rank": lambda size: relinear.LowRank(rank=min(64, size // 4)),
    "pivoted_low_rank": lambda size: relinear.PivotedLowRank(rank=min(64, size // 4)),
    "block_hadamard": lambda size: relinear.BlockHadamard(),
    "monarch": lambda size: relinear.Monarch(),
}


def main() -> None:
    """Print one line a dtype, number of tokens and size."""
    choice.LARGEST_DENSE.clear()  # the structured forms, whatever the table says
    relinear.tune_allocator()
    machine = describe_machine()
    print(f"# {machine['processor']}, {machine['threads']} threads, torch {machine['torch']}, allocator tuned")
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in (1, 1024):
            for size in (64, 128, 256, 512, 1024, 2048):
                x = torch.randn(tokens, size).to(dtype)
                linear = torch.nn.Linear(size, size, bias=False).to(dtype).eval()
                calls = {"dense": lambda x=x, linear=linear: linear(x)}
                for kind, make in CONFIGS.items():
                    module = make(size).build(size, size, bias=False).to(dtype).eval()
                    calls[kind] = lambda x=x, module=module: module(x)
                with torch.no_grad():
                    timings = interleave(calls, "dense", rounds=25, min_seconds=0.01)
                ratios = "  ".join(f"{kind} {timings[kind].ratio:5.2f}" for kind in CONFIGS)
                print(f"{str(dtype).removeprefix('torch.'):9} {tokens:5} tokens  {size:5}  {ratios}", flush=True)


if __name__ == "__main__":
    main()
