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
from relinear.system.files import write_json
from relinear.train import FitSettings, fit


def main() -> None:
    """Replace, measure, train, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of a pretrained Llama-like model with its tokenizer")
    parser.add_argument("data", help="text to train and evaluate on")
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--layers", help="first and last decoder layer, such as 10-19; all by default")
    parser.add_argument("--mixer", default="ema")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--validation-tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=Path("runs/ccl-pretrained"))
    args = parser.parse_args()

    relinear.tune_allocator()
    torch.manual_seed(0)
    data = prepare_data(
        DataSettings(
            data=args.data,
            tokenizer=args.model,
            sequence_length=args.length,
            max_documents=20,
            max_validation_tokens=args.validation_tokens,
        )
    )
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    results = {"settings": {k: str(v) for k, v in vars(args).items() if k not in ("model", "data", "out")}}

    def measure(stage: str) -> None:
        results[stage] = relinear.perplexity(model, data.validation).perplexity
        print(f"{stage}: perplexity {results[stage]:.2f}", flush=True)

    measure("stock")
    before = model.num_parameters()
    relinear.attach_(model, relinear.ContextManager(dim=64, source="embeddings", mixer=args.mixer))
    first, _, last = (args.layers or "").partition("-")
    chosen = range(int(first), int(last or first) + 1) if args.layers else None
    mlp = r".*\.mlp\.(gate|up|down)_proj"
    relinear.replace_(model, {mlp: relinear.CCL(rank=args.rank, norm=False)}, layers=chosen, init="from_weight")
    new = [name for name, module in model.named_modules() if type(module).__name__ == "CCLLinear"]
    trained = relinear.train_only_(model, [*new, "relinear_context"])
    print(f"{before:,} parameters before, {model.num_parameters():,} after, {trained:,} of them new and trained")
    results |= {"parameters_before": before, "parameters": model.num_parameters(), "trained": trained}
    measure("replaced")
    settings = FitSettings(
        steps=args.steps,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        save_every=20,
        weight_decay=0.0,
        save_model=False,
    )
    fit(model, (data.train, None), settings, out_dir=args.out / "fit")
    measure("trained")
    write_json(args.out / "results.json", results)


if __name__ == "__main__":
    main()
