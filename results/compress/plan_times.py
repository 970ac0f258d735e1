"""What a plan says that a token takes, by its table of single layers, beside the whole model on the clock.

    python results/compress/plan_times.py models/smollm2 --plans runs/small/plan.json quantized:bits=4 \\
        --out results/compress/plan_times.json

A plan is a file, or an operator in the place of every linear layer, from the weight alone: times do not depend on how
it was fitted. The whole model's time by the plan is its original's on the clock less what the table saves; ``off`` is
how far that is from the clock, as a share. Decoding at batch 1, float32.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

import relinear
from relinear.compress.beside import measure_speed
from relinear.compress.plan import CompressPlan
from relinear.compress.speed import SpeedConditions, planned_speed, speed_table
from relinear.compress.work import linear_layers
from relinear.core.config import parse_setting
from relinear.core.operator import OperatorConfig, linear_features
from relinear.system.files import write_json
from relinear.system.machine import describe_machine


@torch.no_grad()
def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--plans", nargs="+", required=True, metavar="PLAN")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--out", type=Path, required=True)
    given, rows = parser.parse_args(), []
    original = relinear.from_pretrained(given.model, dtype=torch.float32).eval()
    layers, conditions = linear_layers(original), SpeedConditions("decode", 1, 512)
    for name in given.plans:
        if Path(name).is_file():
            replaced = CompressPlan.load(name, original).replaced
        else:
            replaced = dict.fromkeys(layers, OperatorConfig.from_dict(parse_setting(name)))
        compressed = relinear.from_pretrained(given.model, dtype=torch.float32).eval()
        relinear.replace_(compressed, replaced, init="from_weight")
        sizes = {linear_features(layer): [] for layer in layers.values()}
        for layer, config in replaced.items():
            sizes[linear_features(layers[layer])].append(config)
        for threads in given.threads:
            torch.set_num_threads(threads)
            with tempfile.TemporaryDirectory() as folder:
                table = speed_table(list(layers.values()), sizes, conditions, Path(folder) / "speed.json")
            planned = planned_speed(table, layers, replaced, {})
            decode = measure_speed(original, compressed, 1)["decode"]
            before, after = (1 / decode[f"{which}_tokens_per_second"] for which in ("original", "compressed"))
            told = before - (planned.before - planned.after)
            row = {"plan": Path(name).name, "threads": threads, "layers": [planned.before, planned.after]}
            rows.append(row | {"model": [before, after], "by_the_plan": told, "off": told / after - 1})
            print(rows[-1])
    write_json(given.out, {"machine": describe_machine(), "rows": rows})


if __name__ == "__main__":
    main()
