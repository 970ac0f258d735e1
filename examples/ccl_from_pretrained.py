"""Put context-conditioned layers into a pretrained model's MLPs and train only what is new.

    python examples/ccl_from_pretrained.py models/smollm2 books/ --rank 256 --steps 200 --out runs/ccl-smollm2

Prints the perplexity of the stock model, of the model right after the replacement (the best low-rank fit of every MLP
matrix, gates open), and after training the new parameters on the corpus. Started again, it goes on where it was.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import relinear
from relinear.data import DataSettings, prepare_data
from relinear.training import FitSettings, fit


def main() -> None:
    """Replace, measure, train, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of a pretrained Llama-like model with its tokenizer")
    parser.add_argument("data", help="text to train and evaluate on")
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--layers", type=int, nargs="*", help="decoder layers; all by default")
    parser.add_argument("--mixer", default="ema")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--validation-tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=Path("runs/ccl-pretrained"))
    args = parser.parse_args()

    relinear.system.allocator.tune_allocator()
    torch.manual_seed(0)
    budget = {"max_documents": 20, "max_validation_tokens": args.validation_tokens}
    data = prepare_data(DataSettings(data=args.data, tokenizer=args.model, sequence_length=128, **budget))
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    before = model.num_parameters()
    print(f"stock: perplexity {relinear.perplexity(model, data.validation).perplexity:.2f}", flush=True)

    relinear.attach_(model, relinear.ContextManager(dim=64, source="embeddings", mixer=args.mixer))
    mlp = {r".*\.mlp\.(gate|up|down)_proj": relinear.CCL(rank=args.rank, norm=False)}
    relinear.replace_(model, mlp, layers=args.layers, init="from_weight")
    new = [name for name, module in model.named_modules() if type(module).__name__ == "CCLLinear"]
    trained = relinear.surgery.train_only_(model, [*new, "relinear_context"])
    print(f"{before:,} parameters before, {model.num_parameters():,} after, {trained:,} of them new and trained")
    print(f"replaced: perplexity {relinear.perplexity(model, data.validation).perplexity:.2f}", flush=True)

    rate = {"learning_rate": args.learning_rate, "weight_decay": 0.0}
    settings = FitSettings(steps=args.steps, batch_size=2, save_every=20, **rate)
    fit(model, (data.train, None), settings, out_dir=args.out)
    print(f"trained: perplexity {relinear.perplexity(model, data.validation).perplexity:.2f}")


if __name__ == "__main__":
    main()
