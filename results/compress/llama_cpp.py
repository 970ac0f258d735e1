"""A GGUF file of integers run by llama.cpp: does it write what transformers writes of the same model?

    python results/compress/llama_cpp.py DIR/model DIR/model.gguf --out results/compress/llama_cpp.jsonl

Needs ``pip install xllamacpp``, which is llama.cpp built for Python. Both continue ten prompts greedily. llama.cpp
rounds a layer's inputs to eight bits before it multiplies by integers, so tokens whose logits nearly tie may change
places: where texts part, the distance of the two likeliest logits in transformers is noted. ``--round-inputs`` rounds
them in transformers, too, as llama.cpp does. A file of the same weights in float32 is the other control.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import torch
from gguf import GGUFReader

import relinear
from relinear.data.tokenizers import load_tokenizer

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time there was a",
    "The three primary colours are",
    "To make a cup of tea, first",
    "Photosynthesis is the process by which",
    "In the year 1969, the first",
    "The opposite of hot is",
    "A triangle has three",
    "My favourite season is autumn because",
)


def asking(file: Path):
    """A function (token ids, what else is asked) -> the answer of llama.cpp's server, on one thread."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.cpuparams.n_threads, params.warmup = 512, 1, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)

    def ask(ids: list[int], **more) -> dict:
        asked = {"prompt": ids, "temperature": 0, "return_tokens": True, "cache_prompt": False} | more
        where = urllib.request.Request(f"{server.listening_address}/completion", json.dumps(asked).encode())
        with urllib.request.urlopen(where) as answer:
            return json.load(answer)

    return ask


def rounded(_, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Inputs of a layer as blocks of 32 integers of eight bits with a scale in half precision (ggml's Q8_0)."""
    blocks = given[0].unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / scale.clamp_min(1e-30)).round() * scale.half().float()).flatten(-2).to(given[0]), *given[1:]


@torch.no_grad()
def by_transformers(model, ids: list[int], tokens: int) -> tuple[list[int], list[float]]:
    """The same by transformers, and of each token how far its logit is above the next."""
    made = model.generate(
        torch.tensor([ids]),
        max_new_tokens=tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    margins = [float(-logits[0].topk(2).values.diff()) for logits in made.logits]
    return made.sequences[0, len(ids) :].tolist(), margins


def main() -> None:
    """Continue the prompts by both, and write a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="relinear's checkpoint")
    parser.add_argument("file", type=Path, help="the GGUF file of it")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--round-inputs", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    tokenizer = load_tokenizer(given.model)
    model = relinear.from_pretrained(given.model).float().eval()
    for module in model.modules() if given.round_inputs else ():
        if isinstance(module, relinear.Operator):
            module.register_forward_pre_hook(rounded)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    ask = asking(given.file)
    theirs = [ask(ids, n_predict=given.tokens)["tokens"] for ids in prompts]
    rows = []
    for prompt, ids, other in zip(PROMPTS, prompts, theirs, strict=True):
        own, margins = by_transformers(model, ids, given.tokens)
        end = tokenizer.eos_token_id
        own, other = ([i for i in some if i != end] for some in (own, other))
        same = next(
            (at for at, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), min(len(own), len(other))
        )
        row = {"prompt": prompt, "tokens": len(own), "same": same, "least_margin": round(min(margins), 4)}
        rows.append(row | ({} if own == other else {"margin_where_they_part": round(margins[same], 4)}))
    types = Counter(tensor.tensor_type.name for tensor in GGUFReader(given.file).tensors if len(tensor.shape) > 1)
    about = {"file": given.file.parent.name, "types": dict(types), "llama.cpp": f"xllamacpp {version('xllamacpp')}"}
    about["inputs_rounded"] = given.round_inputs
    about["prompts_alike"] = sum(row["tokens"] == row["same"] for row in rows)
    with given.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(about | {"rows": rows}) + "\n")
    print(json.dumps(about | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
