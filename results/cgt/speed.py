"""What generated operators cost and what a specialised model saves.

python results/cgt/speed.py --out results/cgt/speed
"""

import argparse
from pathlib import Path

import torch

from cgt_study.speed import modulation_cost, prefix_cost, specialized_speed
from relinear.system.allocator import tune_allocator
from relinear.system.files import write_json, write_text
from relinear.system.machine import describe_machine


def table(rows):
    def show(value):
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(show(row[name]) for name in names) + " |" for row in rows])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/cgt/speed"))
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    allocator = tune_allocator()
    cost = [modulation_cost(width, rounds=options.rounds) for width in (128, 768)]
    speed = specialized_speed(options.width, options.layers, rounds=options.rounds)
    prefix = prefix_cost(options.width, options.layers, rounds=options.rounds)
    write_json(
        options.out / "speed.json",
        {
            "modulation": cost,
            "speed": speed,
            "prefix": prefix,
            "options": {key: str(value) for key, value in vars(options).items()},
            "allocator": allocator,
            "machine": describe_machine(),
        },
    )
    text = "\n\n".join(
        [
            "T relative to the MLP that follows, forward, 4,096 tokens, fp32:\n\n" + table(cost),
            f"Forward, width {options.width}, {options.layers} layers, against a stock GPT-2 of that width:\n\n"
            + table([{"model": name, **row} for name, row in speed.items()]),
            "Cost of a prefix with every query of 64 tokens, and with every further token:\n\n" + table(prefix),
        ]
    )
    write_text(options.out / "speed.md", text + "\n")
    print(text)


if __name__ == "__main__":
    main()
