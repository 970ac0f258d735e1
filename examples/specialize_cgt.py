"""Train a small Contextually Guided Transformer on text, and turn a prefix into a plain GPT-2 that no longer reads it.

python examples/specialize_cgt.py books/ --prefix "Chapter I" --steps 500 --out runs/specialized
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2LMHeadModel

import relinear
from relinear.data import DataSettings, prepare_data
from relinear.models.cgt import CGTObjective
from relinear.training import FitSettings, fit


def main() -> None:
    """Train, specialise, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="text to train on")
    parser.add_argument("--prefix", default="Once upon a time")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("runs/specialized"))
    args = parser.parse_args()

    torch.manual_seed(0)
    data = prepare_data(DataSettings(data=args.data, tokenizer="bytes", sequence_length=128))
    config = relinear.CGTConfig(
        vocab_size=data.vocab_size, n_positions=256, n_layer=4, n_embd=args.width, n_head=4,
        context_layer=2, context_size=32, context_heads=2,
    )  # fmt: skip
    model = relinear.CGTForCausalLM(config)
    objective = CGTObjective(eta=0.5, continuity=0.08, decorrelation=0.04)
    fit(model, data.train, FitSettings(steps=args.steps, batch_size=8, learning_rate=1e-3), objective=objective)

    prefix = torch.tensor(data.tokenizer(args.prefix).input_ids)
    gpt2 = relinear.specialize(model.eval(), prefix)
    gpt2.save_pretrained(args.out)
    data.tokenizer.save_pretrained(args.out)
    print(f"{model.num_parameters():,} parameters -> {GPT2LMHeadModel.from_pretrained(args.out).num_parameters():,}")


if __name__ == "__main__":
    main()
