"""Exports of SmolLM2 as programs without relinear read them: size, logits, greedy tokens, and tokens per second.

    python results/compress/exports.py models/smollm2 --out results/compress/exports.jsonl

Layers become integers by rounding to nearest, in groups of 64: 4 bits, values and ``down_proj`` 8. In the last row the
MLPs become pivoted low rank, of rank 544 of 576. One row for each export, all in bfloat16. A fresh process that cannot
import relinear reads it by transformers, with the package compressed-tensors where that is the format. Both sides
compute in float32 on one thread, and continue a prompt by 64 greedy tokens; seconds are the processor's, of two turns
the fewer. ``logits`` is the largest difference over the prompts of ``llama_cpp.py``, ``spread`` the standard deviation
of those logits. ``greedy`` counts the prompts, of ten, with 24 equal tokens.

GGUF files are read by llama.cpp (``pip install xllamacpp``), with caches in float32, once as they are and once of the
same weights in float32. Its server gives log-probabilities and no logits: ``logits`` are those after each prompt.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

if __name__ == "__main__" and sys.argv[1:2] == ["read"]:
    sys.modules["relinear"] = None  # whoever imports it here fails
    from transformers import AutoModelForCausalLM
else:
    from transformers import AutoModelForCausalLM

    import relinear
    from llama_cpp import PROMPTS, asking
    from relinear.compression import export_compressed_tensors, export_gguf
    from relinear.compression.budget import stored_bytes
    from relinear.data.tokenizers import load_tokenizer
    from relinear.hf.half_precision import at_half_precision, round_to_half_
    from relinear.system.machine import provenance

    #: what layers become -> their operators
    FOUR = relinear.Quantized(bits=4, group=64, symmetric=True)
    SYMMETRIC = {r".*\.(q|k|o|gate|up)_proj": FOUR, r".*\.(v|down)_proj": dataclasses.replace(FOUR, bits=8)}
    FACTORS = {r".*\.(gate|up|down)_proj": relinear.PivotedLowRank(rank=544)}
    EVEN = "4 bits, v and down 8, group 64, symmetric"
    MLPS = "of the MLPs pivoted low rank 544, low rank"
    LAYERS = {EVEN: SYMMETRIC, MLPS: FACTORS}
    EXPORTS = (
        ("plain", EVEN),
        ("compressed-tensors", EVEN),
        ("gguf", EVEN),
        ("gguf in float32", EVEN),
        ("plain", MLPS),
    )


@torch.no_grad()
def folded(model, folder: Path) -> Path:
    """Write a copy of the model as a stock checkpoint."""
    model = copy.deepcopy(model)
    relinear.fold_(model, verbose=False)
    model.save_pretrained(folder)
    return folder


def observed(model, prompts: list[list[int]]) -> dict:
    """Logits of all prompts in a row, and 24 greedy tokens after each; tokens a second of 64 greedy ones."""
    torch.set_num_threads(1)
    found = {"logits": torch.cat([model(torch.tensor([ids])).logits[0] for ids in prompts])}
    how = {"do_sample": False, "pad_token_id": 0}
    found["made"] = [model.generate(torch.tensor([ids]), max_new_tokens=24, **how)[0].tolist() for ids in prompts]
    seconds = []
    for _ in range(2):
        start = time.process_time()  # of a thread alone: what else the machine does hardly counts
        model.generate(torch.tensor([prompts[0]]), max_new_tokens=64, min_new_tokens=64, **how)
        seconds.append(time.process_time() - start)
    return found | {"speed": 64 / min(seconds)}


def read(directory: str, prompts: str, out: str) -> None:
    """What the process without relinear does."""
    trust = (Path(directory) / "modeling_factorized.py").is_file()  # that the model has factors needs code of its own
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=trust).eval()
    found = observed(model, json.loads(prompts))
    save_file({"logits": found.pop("logits")}, f"{out}.safetensors")
    Path(f"{out}.json").write_text(json.dumps(found), encoding="utf-8")


def by_transformers(folder: Path, prompts: list[list[int]], work: str) -> dict:
    """What ``read`` finds of an export in a process of its own."""
    command = [sys.executable, __file__, "read", str(folder), json.dumps(prompts), f"{work}/read"]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return json.loads(Path(f"{work}/read.json").read_text(encoding="utf-8")) | load_file(f"{work}/read.safetensors")


def by_llama_cpp(file: Path, prompts: list[list[int]], vocabulary: int) -> dict:
    """The same by llama.cpp, with the log-probabilities after each prompt for logits."""
    ask, logits, seconds = asking(file), torch.full((len(prompts), vocabulary), torch.nan), []
    for ids, row in zip(prompts, logits, strict=True):
        for one in ask(ids, n_predict=1, n_probs=vocabulary)["completion_probabilities"][0]["top_logprobs"]:
            row[one["id"]] = one["logprob"]
    made = [ids + ask(ids, n_predict=24)["tokens"] for ids in prompts]
    for _ in range(2):
        start = time.process_time()
        ask(prompts[0], n_predict=64, ignore_eos=True)
        seconds.append(time.process_time() - start)
    return {"logits": logits, "made": made, "speed": 64 / min(seconds)}


def main() -> None:
    """Export, have it read, and write the rows behind those that are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, nargs="+", default=range(len(EXPORTS)), help="places in EXPORTS")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    tokenizer, rows = load_tokenizer(given.model), []
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]

    def text(ids: list[int]) -> list[int]:
        return [one for one in ids if one != tokenizer.eos_token_id]  # llama.cpp leaves it away

    for export, layers in [EXPORTS[place] for place in given.rows]:
        model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
        relinear.replace_(model, LAYERS[layers], init="from_weight")
        round_to_half_(model)
        own = observed(model, prompts)
        with tempfile.TemporaryDirectory() as work, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if export.startswith("gguf"):
                if export != "gguf":
                    relinear.fold_(model)
                file = export_gguf(model, Path(work) / "model.gguf", tokenizer=tokenizer)
                reader = "xllamacpp"
                theirs, size = by_llama_cpp(file, prompts, model.config.vocab_size), file.stat().st_size
                ends = torch.tensor([len(ids) for ids in prompts]).cumsum(0) - 1
                own["logits"] = own["logits"][ends].log_softmax(-1)
            else:
                plain = export == "plain"
                write, reader = (folded, "transformers") if plain else (export_compressed_tensors, export)
                with at_half_precision(model):
                    folder = write(model, Path(work) / "export")
                theirs = by_transformers(folder, prompts, work)
                size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        rows.append(
            {
                "export": export,
                "integers": layers,
                "bytes": size,
                "bytes_relinear": stored_bytes(model),
                "logits": float((own["logits"] - theirs["logits"]).abs().max()),
                "spread": float(theirs["logits"].std()),
                "greedy": sum(text(a) == text(b) for a, b in zip(own["made"], theirs["made"], strict=True)),
                "tokens_per_second": {"export": round(theirs["speed"], 2), "relinear": round(own["speed"], 2)},
                "said": [str(one.message) for one in said if "compressed-tensors holds" in str(one.message)],
                "read_by": f"{reader} {version(reader)}",
            }
            | provenance()
        )
        print(json.dumps(rows[-1], indent=1))
    with given.out.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["read"]:
        read(*sys.argv[2:])
    else:
        main()
