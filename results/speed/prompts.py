"""A prompt's rows through quantised layers: ours beside torch's dynamic int8, with the error of each.

    OMP_NUM_THREADS=1 python results/speed/prompts.py > results/speed/prompts.txt

256 rows on one thread, in processor time, contenders in turns: the median of ratios to a dense float32 product. Four of
the inputs are ten times as large as the others, as in the residual stream of a language model. Errors are relative to
the product of the stored weights in float64, in the Frobenius norm. torch's packed form has one scale per row, where
ours have one per group: it is of the weights rounded once more, and a second copy of them, unless made in every call.
"""

import statistics
import time
import warnings

import torch
from torch import Tensor

import relinear
from relinear.system.machine import describe_machine

SHAPES, ROWS, ROUNDS = ((576, 1536), (2048, 2048)), 256, 9


def packed(weight: Tensor):
    """torch's form of a matrix: int8, a scale per row."""
    scales = weight.abs().amax(1).double() / 127
    codes = torch.quantize_per_channel(weight, scales, torch.zeros(len(scales), dtype=torch.long), 0, torch.qint8)
    return torch.ops.quantized.linear_prepack(codes, None)


@torch.inference_mode()
def main() -> None:
    """Print a line for every shape and number of bits."""
    warnings.filterwarnings("ignore")
    relinear.system.allocator.tune_allocator()
    print(describe_machine())
    for inputs, outputs in SHAPES:
        for bits in (4, 8):
            torch.manual_seed(0)
            layer = relinear.Quantized(bits=bits).build(inputs, outputs, False).eval()
            original = torch.randn(outputs, inputs) / inputs**0.5
            layer.fit_to_weight_(original)
            half = relinear.Quantized(bits=bits).build(inputs, outputs, False).bfloat16().eval()
            half.load_state_dict(layer.state_dict())
            weight, x = layer.to_dense(), torch.randn(ROWS, inputs)
            x[:, :4] *= 10
            form, x_half = packed(weight), x.bfloat16()
            relinear.for_inference_(layer), relinear.for_inference_(half)
            contenders = {
                "dense": lambda w=weight, x=x: torch.nn.functional.linear(x, w),
                "ours": lambda layer=layer, x=x: layer(x),
                "ours in bfloat16": lambda half=half, x=x_half: half(x),
                "dynamic int8": lambda form=form, x=x: torch.ops.quantized.linear_dynamic(x, form, False),
                "the same, packed every time": lambda w=weight, x=x: torch.ops.quantized.linear_dynamic(
                    x, packed(w), False
                ),
            }
            exact = x.double() @ weight.double().T
            times: dict[str, list[float]] = {name: [] for name in contenders}
            for _ in range(ROUNDS):
                for name, run in contenders.items():
                    start = time.process_time()
                    run()
                    times[name].append(time.process_time() - start)
            rounding = float((weight - original).norm() / original.norm())
            print(f"{inputs} -> {outputs}, {bits} bits, whose rounding is an error of {rounding:.1e}:")
            for name, run in contenders.items():
                error = float((run().double() - exact).norm() / exact.norm())
                ratio = statistics.median(map(lambda a, b: a / b, times[name], times["dense"]))
                print(f"  {name:28} time {ratio:.2f}  error {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
