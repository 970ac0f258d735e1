"""The three files that `relinear compress` writes: sizes beside what was asked, and logits as their readers give them.

    python results/compress/shipped.py models/unrounded/model --data TEXT --data TEXT --program ./llama_files \\
        --work runs/shipped --out results/compress/shipped.jsonl

compressed-tensors is read by transformers in a process that cannot import relinear, relinear's own file by
``relinear.from_pretrained``, both beside the model that ``compress`` leaves in memory; GGUF by llama.cpp
(``llama_files.cpp``), beside the same weights as a GGUF file in float32. All compute in float32 on one thread.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy
import torch

import relinear
from exports import by_transformers, observed
from frontier import texts
from llama_cpp import PROMPTS
from llama_files import judged
from relinear.compression import compress, export_gguf
from relinear.data.tokenizers import load_tokenizer
from relinear.system.machine import provenance

#: reader -> share of the original's bytes, and the file
ASKED = {"relinear": (0.3, "model/model.safetensors"), "llama.cpp": (0.3, "model.gguf")} | {
    "vllm": (0.45, "compressed-tensors/model.safetensors")
}


def main() -> None:
    """Compress for each reader, have it read, and write a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--data", action="append", required=True, metavar="TEXT")
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    tokenizer = load_tokenizer(given.model)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    settings = {"tokens": 8192, "sequence_length": 256, "evaluate": False}
    for reader, (share, name) in ASKED.items():
        model, folder = relinear.from_pretrained(given.model, dtype=torch.float32).eval(), given.work / reader
        asked = int(share * 2 * sum(p.numel() for p in model.parameters()))
        corpora = {path: texts(path) for path in given.data}
        settings["reader"] = reader
        compress(model, corpora, size=asked, tokenizer=tokenizer, settings=settings, out_dir=folder, overwrite=True)
        row = {"reader": reader, "asked_bytes": asked, "bytes": (folder / name).stat().st_size}
        own = observed(model, prompts)
        with tempfile.TemporaryDirectory() as work:
            if reader == "llama.cpp":
                relinear.fold_(model, verbose=False)
                dense = export_gguf(model, Path(work) / "dense.gguf", tokenizer=tokenizer)
                ids = torch.tensor(tokenizer(next(iter(texts(given.data[0]))))["input_ids"][: 24 * 256])
                ids.numpy().astype(numpy.int32).tofile(place := Path(work) / "ids")
                files = {"the same weights in float32": dense, "shipped": folder / name}
                found = judged(files, place, 256, given.program, 12)[1]
                row |= {key: sum(found[key]) / len(found[key]) for key in ("kl", "same_token")}
            else:
                if reader == "vllm":
                    theirs = by_transformers((folder / name).parent, prompts, work)
                else:
                    theirs = observed(relinear.from_pretrained(folder / "model", dtype=torch.float32).eval(), prompts)
                row["logits"] = float((own["logits"] - theirs["logits"]).detach().abs().max())
                row["spread"] = float(theirs["logits"].std())
                row["greedy"] = sum(a == b for a, b in zip(own["made"], theirs["made"], strict=True))
        print(row, flush=True)
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | {"model": Path(given.model).parent.name} | provenance()) + "\n")


if __name__ == "__main__":
    main()
