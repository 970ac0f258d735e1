"""Prefill and decoding of a compressed model beside the original's, in turns.

    python results/compress/speed.py models/smollm2 runs/compress/model --batch 1 8 --out results/compress/speed.json

Tokens a second are medians over rounds; ``ratio`` is compressed to original, with an interval over rounds.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import relinear
from relinear.compress.beside import measure_speed
from relinear.system.files import write_json
from relinear.system.machine import describe_machine


@torch.no_grad()
def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("original")
    parser.add_argument("compressed")
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    original = AutoModelForCausalLM.from_pretrained(given.original, dtype=torch.float32).eval()
    compressed = relinear.from_pretrained(given.compressed, dtype=torch.float32).eval()
    found = [measure_speed(original, compressed, batch) for batch in given.batch]
    sides = {"original": original, "compressed": compressed}
    parameters = {name: sum(p.numel() for p in model.parameters()) for name, model in sides.items()}
    write_json(given.out, {"machine": describe_machine(), "parameters": parameters, "speed": found})
    for row in found:
        for what in ("prefill", "decode"):
            times = row[what]
            print(
                f"batch {row['batch']}, {what}: {times['ratio']:.2f} times as fast "
                f"({times['ratio_low']:.2f} to {times['ratio_high']:.2f})"
            )


if __name__ == "__main__":
    main()
