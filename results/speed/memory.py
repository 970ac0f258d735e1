"""Activations that a training step keeps, and memory that it takes in a fresh process, relative to a dense layer's.

    OMP_NUM_THREADS=1 python results/speed/memory.py > results/speed/memory.txt

Kept is what tensors saved for the backward pass take, parameters apart, with input and output. The peak is that of a
process that runs one step, beyond what it held before: input, output, gradients and scratch space.
"""

import argparse
import os
import subprocess
import sys

import torch

import relinear
from relinear.bench.run import DEFAULT_OPERATORS
from relinear.contract.operator import OperatorConfig
from relinear.kernels.native import build
from relinear.system.machine import PeakMemory, describe_machine

WIDTH, DTYPES = 1024, ("float32", "bfloat16")


def layer_of(name: str, dtype: torch.dtype) -> torch.nn.Module:
    """A layer, and nn.Linear for "dense"."""
    make = torch.nn.Linear if name == "dense" else OperatorConfig.read(name).build
    return make(WIDTH, WIDTH, bias=False).to(dtype)


def kept(name: str, dtype: torch.dtype, tokens: int) -> int:
    """Bytes."""
    layer, stored = layer_of(name, dtype), {}
    x = torch.randn(tokens, WIDTH, dtype=dtype, requires_grad=True)
    parameters = {tensor.untyped_storage().data_ptr() for tensor in layer.state_dict().values()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            stored[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    context = relinear.activations.context(torch.randn(tokens, 64, dtype=dtype))
    with context, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        pack(layer(x))
    pack(x)
    return sum(size for _, size in stored.values())


def peak(name: str, dtype: torch.dtype, tokens: int) -> int:
    """Bytes, in this process, of the second step: the first one loads libraries."""
    build.library()
    relinear.system.allocator.tune_allocator()
    layer, memory = layer_of(name, dtype), PeakMemory()
    for rows in (64, tokens):
        memory.reset()
        before = memory.read()
        x = torch.randn(rows, WIDTH, dtype=dtype, requires_grad=True)
        with relinear.activations.context(torch.randn(rows, 64, dtype=dtype)):
            layer(x).square().mean().backward()
    return memory.read() - before


def main() -> None:
    """Print a line for every operator."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--peak", nargs=2)
    parser.add_argument("--operators", default="+".join(name for name in DEFAULT_OPERATORS if name != "quantized"))
    args = parser.parse_args()
    if args.peak:
        print(peak(args.peak[0], getattr(torch, args.peak[1]), args.tokens))
        return
    print(describe_machine(), f"{args.tokens} tokens, {WIDTH} -> {WIDTH}")
    base: dict[str, tuple[int, int]] = {}
    for name in ("dense", *args.operators.split("+")):
        figures = []
        for dtype in DTYPES:
            command = [sys.executable, __file__, "--peak", name, dtype, "--tokens", str(args.tokens)]
            found = int(subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout)
            both = kept(name, getattr(torch, dtype), args.tokens), found
            first = base.setdefault(dtype, both)
            figures.append(f"{dtype} kept {both[0] / first[0]:.2f} peak {both[1] / first[1]:.2f}")
        print(f"{name:28} {'   '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()
