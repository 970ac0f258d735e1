"""What rounding one type of layer to four bits costs, predicted and measured: python results/compress/one_type.py MODEL

    CALIBRATION WIKITEXT2/test.txt --type v_proj --out results/compress/one_type.jsonl

All layers of the type are rounded, all others stay: by GPTQ, and with the descent under gradients behind it.
Predictions are 0.5 tr(G D A D^T) on the calibration's moments; losses are on 12 windows of 256 tokens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import relinear
from frontier import rounded, texts
from relinear.compression import CompressSettings
from relinear.compression.corpus import read_elsewhere
from relinear.compression.evaluation import predict
from relinear.contract.operator import dense_weight
from relinear.data.tokenizers import load_tokenizer
from saved_statistics import SavedStatistics


@torch.no_grad()
def main() -> None:
    """Round, predict, measure, and write a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("text")
    parser.add_argument("--type", default="v_proj")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    calibration, model = SavedStatistics(given.calibration), relinear.from_pretrained(given.model).float().eval()
    windows = CompressSettings(sequence_length=256, evaluation_tokens=12 * 256)
    ids = read_elsewhere({"": texts(given.text)}, load_tokenizer(given.model), windows)[""]
    weights = {n: dense_weight(model.get_submodule(n)).clone() for n in calibration.names if n.endswith(given.type)}
    original, row = predict(model, ids), {"model": Path(given.model).name, "type": given.type, "bits": 4}
    for method in ("gptq", "descent"):
        predicted = 0.0
        for name, weight in weights.items():
            layer, moments = model.get_submodule(name), calibration.moments(name)
            layer.weight.copy_(weight)
            made = rounded(layer, relinear.Quantized(bits=4), moments, method == "descent").to_dense()
            predicted += float(moments.error(made - weight)) / 2
            layer.weight.copy_(made)
        found = predict(model, ids).compared_with(original)
        row[method] = {"predicted": round(predicted, 4), **{k: round(found[k], 4) for k in ("nats", "interval")}}
    with given.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
