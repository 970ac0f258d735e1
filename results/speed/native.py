"""Layers with and without the C++ kernels, and dense nn.Linear, in turns: what the kernels save."""

import sys
from unittest import mock

import torch

import relinear
from relinear.kernels import hdpl, native
from relinear.kernels.choice import against_native
from relinear.system.timing import interleave

TOKENS, ROUNDS = 4096, 15
OPERATORS = {
    "hdpl": relinear.HDPL(rank=128, blocks=8),
    "ccl": relinear.CCL(rank=64, context_dim=64),
    "transponder": relinear.Transponder(rank=8),
}


def call(module, x, upstream, training, kernels):
    """Inference, or forward and backward, of one contender."""
    entries = native.FEWEST_NATIVE_ENTRIES if kernels else sys.maxsize

    def run():
        with (
            mock.patch.object(native, "FEWEST_NATIVE_ENTRIES", entries),
            mock.patch.object(hdpl, "FEWEST_NATIVE_LATENTS", entries),
        ):
            module.train(training)
            if not training:
                with torch.no_grad():
                    return module(x)
            module(x).backward(upstream)
        for leaf in (x, *module.parameters()):
            leaf.grad = None
        return None

    return run


def main() -> None:
    """Print one line a shape and operator."""
    relinear.tune_allocator()
    if against_native(torch.zeros(native.FEWEST_NATIVE_ENTRIES)):
        sys.exit("no C++ compiler, or RELINEAR_COMPILE_KERNELS=0: nothing to compare")
    print(f"ratio to dense nn.Linear with / without the C++ kernels, float32, {TOKENS} tokens, {ROUNDS} rounds, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}")  # fmt: skip
    for inputs, outputs in ((2048, 2048), (512, 2048), (512, 1376), (512, 512)):
        x, upstream = torch.randn(TOKENS, inputs, requires_grad=True), torch.randn(TOKENS, outputs)
        dense = torch.nn.Linear(inputs, outputs, bias=False)
        for name, config in OPERATORS.items():
            layer = config.build(inputs, outputs, bias=False)
            cells = []
            for training in (False, True):
                contenders = {"dense": call(dense, x, upstream, training, True)}
                contenders |= {str(on): call(layer, x, upstream, training, on) for on in (True, False)}
                with relinear.context(torch.randn(TOKENS, 64)):
                    found = interleave(contenders, "dense", rounds=ROUNDS)
                cells.append(f"{found['True'].ratio:.2f} / {found['False'].ratio:.2f}")
            print(f"{inputs} -> {outputs}  {name:<12} forward {cells[0]}   step {cells[1]}", flush=True)


if __name__ == "__main__":
    main()
