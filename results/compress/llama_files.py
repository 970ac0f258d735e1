"""GGUF files of one size, ours and llama.cpp's own, read by llama.cpp: nats a token on texts that calibrate neither.

    g++ -O2 -std=c++17 -I LLAMA/include -I LLAMA/ggml/include results/compress/llama_files.cpp -o llama_files \\
        BUILD/src/libllama.a BUILD/ggml/src/libggml{,-cpu,-base}.a -fopenmp -lpthread -ldl
    relinear compress models/smollm2 --for llama.cpp --size 91MB --data TEXT --data TEXT --tokens 8192 \\
        --set sequence_length=256 --no-evaluate --out DIR
    python results/compress/llama_files.py models/smollm2 --calibrate TEXT TEXT --evaluate NAME=TEXT [...] \\
        --program ./llama_files --ours DIR/model.gguf --work runs/llama-files --out results/compress/llama_files.jsonl

``llama_files.cpp`` is built against libllama. It rounds the model as ``llama-quantize`` does, with an importance matrix
of the tokens that calibrated DIR, and gives the losses of windows that llama.cpp computes of each file. Files are
compared as they are: embedding, tokenizer and all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import Counter
from pathlib import Path

import numpy
import torch
from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
from torch import Tensor, nn

import relinear
from frontier import texts
from relinear.compression import CompressSettings, export_gguf
from relinear.compression.corpus import read_corpus, read_elsewhere
from relinear.compression.task import linear_layers
from relinear.data.tokenizers import load_tokenizer
from relinear.system.confidence import half_width
from relinear.system.machine import provenance

#: llama.cpp's numbers of its mixtures
TYPES = {"IQ4_NL": 25, "IQ4_XS": 30}


@torch.no_grad()
def mean_squares(model: nn.Module, blocks: Tensor) -> dict[str, Tensor]:
    """Mean squares of the inputs of every linear layer, by its name in a GGUF file."""
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    sums: dict[str, Tensor] = {}

    def add(name: str, x: Tensor) -> None:
        sums[name] = sums.get(name, 0) + x.double().square().flatten(0, -2).sum(0)

    for name, layer in linear_layers(model).items():
        key = f"{names.get_name(name)}.weight"
        layer.register_forward_hook(lambda layer, args, output, key=key: add(key, args[0]))
    for ids in blocks.split(1):
        model(input_ids=ids, use_cache=False)
    return {name: (total / blocks.numel()).float() for name, total in sums.items()}


def main() -> None:
    """Round the model by llama.cpp, then write a row of losses for each file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--calibrate", nargs="+", required=True, metavar="TEXT")
    parser.add_argument("--evaluate", nargs="+", required=True, metavar="NAME=TEXT")
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--ours", type=Path, nargs="*", default=[])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--windows", type=int, default=30)
    parser.add_argument("--work", type=Path, required=True, help="directory of the files that are made")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    tokenizer, model = load_tokenizer(given.model), relinear.from_pretrained(given.model, dtype=torch.float32).eval()
    evaluated = given.windows * given.window
    settings = CompressSettings(tokens=given.tokens, sequence_length=given.window, evaluation_tokens=evaluated)
    corpora = {path: texts(path) for path in given.calibrate}
    blocks = read_corpus(corpora, {}, tokenizer, settings, plan_only=True).blocks
    others = {name: texts(path) for name, path in (one.split("=", 1) for one in given.evaluate)}
    windows = read_elsewhere(others, tokenizer, settings)
    files = {"original": given.work / "original.gguf"}
    if not files["original"].exists():
        export_gguf(model, files["original"], tokenizer=tokenizer)
    matrix = given.work / "matrix"
    with matrix.open("wb") as file:
        for name, values in mean_squares(model, blocks).items():
            file.write(f"{name} {len(values)} ".encode() + values.numpy().tobytes())
    for name, number in TYPES.items():
        files[f"llama.cpp, {name}"] = path = given.work / f"{name}.gguf"
        if not path.exists():
            subprocess.run([given.program, "quantize", files["original"], path, str(number), matrix], check=True)
    files |= {f"relinear, {path.stat().st_size / 1e6:.1f} MB": path for path in given.ours}
    before: dict[str, Tensor] = {}
    for name, path in files.items():
        types = Counter[str]()
        for tensor in GGUFReader(path).tensors:
            types[tensor.tensor_type.name] += tensor.n_elements * (len(tensor.shape) > 1)
        row = {"row": name, "file_bytes": path.stat().st_size, "weights": {k: n for k, n in types.items() if n}}
        row |= {
            "tokens": given.tokens,
            "window": given.window,
            "windows": given.windows,
            "loss": {},
            "over_original": {},
        }
        for text, ids in windows.items():
            place = given.work / f"{text}.ids"
            ids.numpy().astype(numpy.int32).tofile(place)
            command = [given.program, "losses", path, place, str(given.window)]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            losses = torch.tensor([float(line) for line in said.split()], dtype=torch.float64)
            rise = losses - before.setdefault(text, losses)
            row["loss"][text] = float(losses.mean())
            row["over_original"][text] = [float(rise.mean()), half_width(rise.tolist()) or 0.0]
            row.setdefault("losses", {})[text] = [round(value, 4) for value in losses.tolist()]
        print({key: row[key] for key in ("row", "file_bytes", "over_original")}, flush=True)
        with given.out.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps(row | {"calibrated_on": [Path(p).parent.name for p in given.calibrate]} | provenance())
                + "\n"
            )


if __name__ == "__main__":
    main()
