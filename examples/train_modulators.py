"""Fine-tune a pretrained model by input-aware gates alone; all else is frozen, and it starts with the same logits.

    python examples/train_modulators.py models/smollm2 books/ --steps 100 --out runs/modulators

Beside LoRA and (IA)^3, at equal parameters: results/transponder/finetune.py.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer

import relinear
from relinear.data import DataSettings, prepare_data
from relinear.training import FitSettings, fit


def main() -> None:
    """Attach gates, train them, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of a pretrained model with its tokenizer")
    parser.add_argument("data", help="text to train and evaluate on")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/modulators"))
    args = parser.parse_args()

    relinear.system.allocator.tune_allocator()
    torch.manual_seed(0)
    budget = {"sequence_length": 128, "max_documents": 20, "max_validation_tokens": 8192}
    data = prepare_data(DataSettings(data=args.data, tokenizer=args.model, **budget))
    model = relinear.from_pretrained(args.model, dtype=torch.float32)
    relinear.replace_(model, {"all-linear": relinear.Transponder(rank=args.rank, init="identity")})
    print(f"{relinear.surgery.train_only_(model, 'modulator'):,} parameters to train")
    result = fit(model, data, FitSettings(steps=args.steps, batch_size=2, learning_rate=3e-3, weight_decay=0.0))
    print(f"perplexity {result.initial_perplexity:.2f} -> {result.perplexity:.2f}")
    relinear.save_pretrained(model, args.out, tokenizer=AutoTokenizer.from_pretrained(args.model))


if __name__ == "__main__":
    main()
