"""Three tiny random mixtures of experts through the command: sizes, share of parameters reached, loss.

python results/compress/experts.py            # writes results/compress/experts.md; a minute or two of one core

Each model is built from a config, saved by transformers, compressed by ``relinear compress`` and loaded in another
process by transformers. Random weights say nothing about what a budget costs a trained model: this shows that experts
are reached, counted and loaded.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from relinear.data.tokenizers import byte_tokenizer

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 256, "initializer_range": 0.1}
QWEN = {"num_experts": 8, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
MODELS = {"mixtral": {"num_local_experts": 4}, "qwen2_moe": QWEN, "gpt_oss": {"num_local_experts": 4, "head_dim": 32}}
OPTIONS = "--bits 4.25 --data stdlib --tokens 4096 --set sequence_length=64 --set batch_size=8"
OPTIONS += " --set evaluation_tokens=4096 --set passages=0 --set self_sampled=false"
COLUMNS = ("model", "experts' share", "parameters reached", "bytes before -> after", "loss on random tokens")

LOSS = """
import sys, torch, transformers
import relinear
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
ids = torch.randint(256, (32, 128), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    print(float(model(input_ids=ids, labels=ids).loss))
"""


def ran(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def loss_of(folder: Path) -> float:
    return float(ran(sys.executable, "-c", LOSS, str(folder)).split()[-1])


def row(kind: str, home: Path) -> str:
    torch.manual_seed(0)
    tokenizer, stock, out = byte_tokenizer(), home / kind, home / f"{kind}-small"
    config = CONFIG_MAPPING[kind](vocab_size=len(tokenizer), **SIZES | MODELS[kind])
    model = AutoModelForCausalLM.from_config(config)
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    model.save_pretrained(stock)
    tokenizer.save_pretrained(stock)
    ran(str(Path(sys.executable).with_name("relinear")), "compress", str(stock), *OPTIONS.split(), "--out", str(out))
    report = json.loads((out / "report.json").read_text())
    replaced = [layer for layer in report["layers"].values() if layer["operator"] is not None]
    reached = sum(layer["parameters_before"] for layer in replaced) / total
    sizes = f"{report['bytes_before']:,} -> {report['bytes']:,} ({report['bytes'] / report['bytes_before']:.3f})"
    losses = f"{loss_of(stock):.4f} -> {loss_of(out / 'model'):.4f}"
    return f"| {kind} | {experts / total:.1%} | {reached:.1%} | {sizes} | {losses} |"


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        rows = [row(kind, Path(home)) for kind in MODELS]
    lines = ["# Experts that transformers holds as one tensor", ""]
    lines += [
        "Tiny random models, each compressed by the command, experts included, and loaded by transformers in another",
        "process. Bytes are those of the whole model at half precision; what is not reached are routers and norms.",
        "",
        f"`relinear compress MODEL {OPTIONS}`",
        "",
    ]
    lines += [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}", *rows, ""]
    lines += [
        "Made by `python results/compress/experts.py > results/compress/experts.md`. Random weights say nothing about "
        "what a budget costs."
    ]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
