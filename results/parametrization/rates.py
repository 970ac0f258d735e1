"""The best learning rate at two widths, in both parametrisations: short runs over a grid with factors of 2.

    python results/parametrization/rates.py OUT.json NAME=PATTERN=KIND:... [NAME=...] [--widths 64,256] [--steps 120]

NAME alone is the dense model. Results are written after every run, and runs that are there are not done again.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from widths import at_heads

from relinear.data import prepare_data
from relinear.system.machine import describe_machine
from relinear.training import NonFiniteLossError, TrainSettings, build_model, fit
from relinear_cli.options import parse_operators

GRID = [2.0**power for power in range(-11, -5)]  # 0.0005 to 0.016


def settings_of(text: str, steps: int) -> TrainSettings:
    """Settings of one entry, at the preset's own width."""
    _, _, operators = text.partition("=")
    conditioned = "ccl" in operators
    return TrainSettings.load(
        {
            "model": "tiny",
            "model_overrides": {"num_hidden_layers": 2},
            "operators": parse_operators([operators]) if operators else {},
            "attachments": [{"kind": "context_manager"}] if conditioned else [],
            "steps": steps,
            "batch_size": 8,
            "eval_batch_size": 32,
            "dtype": "float32",
            "device": "cpu",
            "threads": 1,
            "data": {"data": "stdlib", "sequence_length": 64, "max_validation_tokens": 16_384},
        }
    )


def run(settings: TrainSettings, data) -> float | None:
    """The validation loss after training; None where training broke."""
    model = build_model(settings, data.vocab_size)
    try:
        return fit(model, data, settings).validation_loss
    except NonFiniteLossError:
        return None


def best(losses: dict[str, float | None]) -> str:
    """The rate of the lowest loss."""
    return min(losses, key=lambda rate: math.inf if losses[rate] is None else losses[rate])


def main() -> None:
    """Carry out what is not there yet, and say what is best where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("entries", nargs="+")
    parser.add_argument("--widths", default="64,256")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--initializer-range", type=float, help="of the weights at the base width")
    options = parser.parse_args()
    torch.set_num_threads(1)
    widths = [int(width) for width in options.widths.split(",")]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    found = json.loads(options.out.read_text()) if options.out.exists() else {"entries": {}}
    found |= {"machine": describe_machine(), "steps": options.steps, "batch": [8, 64], "seeds": seeds}
    for entry in options.entries:
        settings = settings_of(entry, options.steps)
        if options.initializer_range is not None:
            changed = settings.model_overrides | {"initializer_range": options.initializer_range}
            settings = settings.replace(model_overrides=changed)
        data = prepare_data(settings.data)
        rows = found["entries"].setdefault(entry, {})
        for width in widths:
            # at the base width both are the same
            for name in ("mup", "standard") if width != widths[0] else ("mup",):
                losses = rows.setdefault(f"{name} {width}", {})
                for rate in GRID:
                    if f"{rate:.6g}" in losses:
                        continue
                    start, values = time.process_time(), []
                    for seed in seeds:
                        one = at_heads(settings, width).replace(
                            parametrization=name, parametrization_base_width=widths[0], learning_rate=rate, seed=seed
                        )
                        values.append(run(one, data))
                    losses[f"{rate:.6g}"] = None if None in values else sum(values) / len(values)
                    options.out.write_text(json.dumps(found, indent=2) + "\n")
                    seconds = time.process_time() - start
                    print(f"{entry} {name} {width} {rate:.5f}: {losses[f'{rate:.6g}']} ({seconds:.0f} s)", flush=True)
                print(f"{entry} {name} {width}: best at {best(losses)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
