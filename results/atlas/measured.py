"""Points of an atlas beside measured losses: python results/atlas/measured.py MODEL ATLAS DATA --out measured.jsonl

Layers and operators are drawn by a fixed seed, each at the smallest of its sizes, whose cost is the most that can be
seen. One layer is replaced, and the rise of the loss on held-out windows stands beside the atlas's cost.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import torch

import relinear
from relinear.compression import CompressSettings
from relinear.compression.corpus import read_elsewhere
from relinear.compression.evaluation import predict
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.contract.linear_layers import dense_weight, linear_features, linear_of
from relinear.contract.operator import OperatorConfig
from relinear.data import DataSettings, iter_texts
from relinear.data.tokenizers import load_tokenizer

sys.path.append(str(Path(__file__).resolve().parents[1] / "compress"))
from saved_statistics import SavedStatistics


@torch.no_grad()
def main() -> None:
    """Replace, measure, and write a row a point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("atlas", type=Path)
    parser.add_argument("data")
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    record = json.loads((given.atlas / "atlas.json").read_text(encoding="utf-8"))
    calibration, model = SavedStatistics(given.atlas / "moments"), relinear.from_pretrained(given.model).float().eval()
    judged = CompressSettings(sequence_length=256, evaluation_tokens=given.windows * 256)
    texts = {"": iter_texts(DataSettings(data=given.data), "validation")}
    ids = read_elsewhere(texts, load_tokenizer(given.model), judged)[""]
    original = predict(model, ids)
    there = [
        (n, kind) for n, layer in record["layers"].items() for kind, points in layer["operators"].items() if points
    ]
    for name, kind in random.Random(0).sample(there, given.points):
        point = record["layers"][name]["operators"][kind][0]
        layer, moments = model.get_submodule(name), calibration.moments(name)
        setting = point["setting"].partition("(")[2].rstrip(")").replace(" ", "")
        config, weight = OperatorConfig.read(f"{kind}:{setting}".rstrip(":")), dense_weight(layer).clone()
        operator = config.build(*linear_features(layer), bias=False)
        single = CalibrationStatistics(moments.input_moment.float(), moments.gradient_moment.float())
        operator.fit_to_calibration_(linear_of(weight), single, steps=record["settings"]["steps"])
        layer.weight.copy_(operator.to_dense())
        found = predict(model, ids).compared_with(original)
        layer.weight.copy_(weight)
        row = {
            "layer": name,
            "setting": point["setting"],
            "parameters": point["parameters"],
            "predicted": point["nats"],
        }
        row |= {key: found[key] for key in ("nats", "interval", "tokens", "windows")}
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
