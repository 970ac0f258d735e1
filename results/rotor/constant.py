"""The constant vector as a baseline: how well the mean output of a projection stands for the projection itself.

    python results/rotor/constant.py --model models/smollm2 --data data

The mean is that of the tokens that smollm2.py fits on, the error (squared, relative to the squares) that of those it
holds out. Rows go to constant.jsonl in --out, and to the screen.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from relinear.distill.record import record, token_blocks
from smollm2 import interleaved

LENGTH, TRAIN, HELD_OUT = 256, 8192, 2048


def main() -> None:
    """Measure q, k and v of two layers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--layers", default="12,20")
    parser.add_argument("--out", type=Path, default=Path("runs/rotor"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = list(itertools.islice(interleaved(options.data), 12))
    blocks = token_blocks(texts, tokenizer, LENGTH, (TRAIN + HELD_OUT) // LENGTH)
    names = [
        f"model.layers.{layer}.self_attn.{part}_proj"
        for layer, part in itertools.product(options.layers.split(","), "qkv")
    ]
    modules = {name: model.get_submodule(name) for name in names}
    with (
        record(model, blocks, modules, batch=8, outputs=names) as recording,
        (options.out / "constant.jsonl").open("w") as out,
    ):
        for name in names:
            values = recording.values(name).double()
            mean, wanted = values[:TRAIN].mean(0), values[TRAIN:]
            error = ((wanted - mean).square().sum() / wanted.square().sum()).item()
            out.write(json.dumps({"name": name, "numbers": len(mean), "error": error}) + "\n")
            print(f"{name}: {error:.4f}", flush=True)


if __name__ == "__main__":
    main()
