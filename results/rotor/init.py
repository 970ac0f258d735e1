"""Rotor projections trained from scratch: the spread of fresh bivectors and their learning rate, measured.

    python results/rotor/init.py

The tiny preset on the standard library's source text, q, k and v as the paper's network (width 3, depth 2). Rows go to
init.jsonl in --out as they are measured (a row that is there is not measured again), all of them to the screen.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import relinear
from relinear.system.machine import describe_machine
from relinear.training import TrainSettings, train

CASES = {
    "dense": None,
    "nearly the identity, std 0.02": relinear.Rotor(init_std=0.02),
    "std 0.3": relinear.Rotor(init_std=0.3),
    "nearly uniform rotors, std 1": relinear.Rotor(init_std=1.0),
    "std 0.3, ten times the learning rate": relinear.Rotor(init_std=0.3, lr_multiplier=10.0),
}


def main() -> None:
    """Train and append one row a start and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--out", type=Path, default=Path("runs/rotor"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "init.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    done = {(row["case"], row["seed"], row["steps"]) for row in rows}
    for seed in map(int, options.seeds.split(",")):
        for case, config in CASES.items():
            if (case, seed, options.steps) in done:
                continue
            settings = TrainSettings.load(
                {
                    "model": "tiny",
                    "data": {"data": "stdlib", "sequence_length": 128, "max_validation_tokens": 16384},
                    "operators": {} if config is None else {".*[qkv]_proj": config.to_dict()},
                    "steps": options.steps,
                    "batch_size": 8,
                    "learning_rate": 0.003,
                    "warmup_steps": 15,
                    "eval_every": options.steps,
                    "seed": seed,
                    "threads": 1,
                    "save_model": False,
                }
            )
            with tempfile.TemporaryDirectory() as folder:
                result = train(settings, folder)
            row = {"case": case, "seed": seed, "steps": options.steps, "validation_loss": result.validation_loss}
            row |= {"parameters": result.parameters, "machine": describe_machine()["processor"]}
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")
            rows.append(row)
            print(json.dumps(row), flush=True)
    for row in rows:
        print(f"{row['case']}, seed {row['seed']}, {row['steps']} steps: {row['validation_loss']:.4f}")


if __name__ == "__main__":
    main()
