"""Errors of llama.cpp's K types, rounded by us and by llama.cpp, of a Llama's layers under their second moments.

    g++ -O2 -std=c++17 -I LLAMA/ggml/include results/compress/k_types.cpp -o k_types \\
        BUILD/ggml/src/libggml{,-cpu,-base}.a -fopenmp -lpthread -ldl
    python results/compress/k_types.py MODEL --calibrate TEXT [TEXT ...] --program ./k_types \\
        --out results/compress/k_types.json

The widths of the model's layers are multiples of 256. All errors are tr(E A E^T), without gradients: what llama.cpp's
importance matrix, the diagonal of A, knows a part of. Each is a share of tr(W A W^T), summed over layers.

    compress   scales by the diagonal of A, then GPTQ and a descent under A
    nearest    the same scales, weights rounded to nearest
    llama.cpp  its own rounding with the diagonal of A as importance matrix
    predicted  what compress plans by: the error that is expected of GPTQ
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

import gguf
import numpy
import torch

import relinear
from frontier import texts
from relinear.compression import CompressSettings
from relinear.compression.calibrate import Calibration
from relinear.compression.corpus import read_corpus
from relinear.compression.inputs import by_decoder_layer, linear_layers
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.contract.operator import dense_weight, linear_of
from relinear.data.tokenizers import load_tokenizer
from relinear.functional.rounding import round_to_nearest
from relinear.system.machine import provenance
from saved_statistics import SavedStatistics


def by_llama(
    weight: torch.Tensor, kind: gguf.GGMLQuantizationType, matrix: torch.Tensor, program: Path
) -> torch.Tensor:
    """Return what llama.cpp makes of ``weight`` (O, I) with mean squares ``matrix`` (I,)."""
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / name for name in ("weight", "matrix", "out")]
        for place, values in zip(places[:2], (weight, matrix), strict=True):
            values.float().contiguous().numpy().tofile(place)
        subprocess.run([program, *map(str, (int(kind), *weight.shape)), *places], check=True)
        rows = numpy.fromfile(places[2], numpy.uint8).reshape(len(weight), -1)
    return torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType(kind)))


@torch.no_grad()
def main() -> None:
    """Round every layer in every way, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--calibrate", nargs="+", required=True, metavar="TEXT")
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    model = relinear.from_pretrained(given.model, dtype=torch.float32).eval()
    settings = CompressSettings(tokens=given.tokens, sequence_length=given.window, evaluate=False)
    corpora = {path: texts(path) for path in given.calibrate}
    blocks = read_corpus(corpora, load_tokenizer(given.model), settings, plan_only=True).blocks
    layers, errors = linear_layers(model), defaultdict[str, dict[str, float]](lambda: defaultdict(float))
    with tempfile.TemporaryDirectory() as folder, torch.enable_grad():
        in_layers = by_decoder_layer(model, layers)
        calibration = Calibration(model, blocks, in_layers, Path(folder) / "calibration", settings)
        moments = SavedStatistics.of(calibration, Path(folder) / "moments")
        known = {name: CalibrationStatistics(moments.moments(name).input_moment) for name in layers}
    for name, layer in layers.items():
        weight, statistics = dense_weight(layer), known[name]
        whole = float(statistics.error(weight.double()))
        for config, predicted in relinear.Quantized(group=32, levels="k").candidate_errors(layer, statistics):
            kind, grid = gguf.GGMLQuantizationType[f"Q{config.bits}_K"], config.grid(weight, statistics)
            ours = config.convert(layer).fit_to_calibration_(linear_of(weight), statistics)
            rounded = {
                "compress": ours.to_dense(),
                "nearest": grid.values(round_to_nearest(weight, grid, config.group), config.group),
                "llama.cpp": by_llama(weight, kind, statistics.input_moment.diagonal(), given.program),
            }
            found = {way: float(statistics.error((values - weight).double())) for way, values in rounded.items()}
            for way, error in (found | {"predicted": predicted}).items():
                errors[kind.name][way] += error / whole / len(layers)
        print(name, flush=True)
    values = {kind: {way: float(f"{error:.4g}") for way, error in row.items()} for kind, row in errors.items()}
    record = {"model": given.model, "layers": len(layers), "tokens": given.tokens, "errors": values}
    given.out.write_text(json.dumps(record | provenance(), indent=1) + "\n", encoding="utf-8")
    print(json.dumps(values, indent=1))


if __name__ == "__main__":
    main()
