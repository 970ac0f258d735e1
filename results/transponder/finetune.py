"""Fine-tune a pretrained model by its modulators alone, and by PEFT's LoRA and (IA)^3, at equal trainable parameters.

    python results/transponder/finetune.py models/smollm2 books/ --steps 200 --seeds 0 1 2 --out runs/finetune

All start from the same model's exact logits. The modulators' rank sets the number of parameters. LoRA takes the rank
that comes nearest on the same projections; (IA)^3, whose size is fixed, is given as it is. Each method gets the best of
its learning rates on the first seed at a quarter of the steps. Started again, it takes finished runs as they are.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import relinear
from relinear.data import DataSettings, prepare_data
from relinear.system.files import write_json
from relinear.training import FitSettings, fit

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RATES = {"modulators": (1e-3, 3e-3, 1e-2), "lora": (3e-4, 1e-3, 3e-3), "ia3": (3e-3, 1e-2, 3e-2, 1e-1)}


def prepare(method: str, directory: str, rank: int, lora_rank: int, seed: int):
    """The pretrained model with ``method`` in it and all else frozen."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    torch.manual_seed(seed)
    if method == "modulators":
        relinear.replace_(model, {"all-linear": relinear.Transponder(rank=rank, init="identity")})
        relinear.surgery.train_only_(model, "modulator")
    elif method == "lora":
        model = get_peft_model(model, LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules=PROJECTIONS))
    else:
        model = get_peft_model(
            model, IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
        )
    return model


def trainable(model: torch.nn.Module) -> int:
    """Number of parameters that will be trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def main() -> None:
    """Tune, train, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of a pretrained Llama-like model with its tokenizer")
    parser.add_argument("data", help="text to train and evaluate on")
    parser.add_argument("--rank", type=int, default=8, help="of the modulators")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--validation-tokens", type=int, default=8192)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"))
    args = parser.parse_args()

    relinear.system.allocator.tune_allocator()
    data = prepare_data(
        DataSettings(
            data=args.data,
            tokenizer=args.model,
            sequence_length=args.length,
            max_documents=20,
            max_validation_tokens=args.validation_tokens,
        )
    )
    goal = trainable(prepare("modulators", args.model, args.rank, 1, 0))
    per_rank = trainable(prepare("lora", args.model, 1, 1, 0))
    lora_rank = max(1, round(goal / per_rank))
    results: dict = {"steps": args.steps, "tokens_a_step": args.batch_size * args.length, "methods": {}}

    asked = {k: v for k, v in vars(args).items() if k not in ("out", "seeds", "steps")}

    def run(method: str, rate: float, steps: int, seed: int) -> dict:
        out = args.out / method / f"{rate:g}-{steps}-{seed}"
        finished = out / "result.json"
        if finished.is_file():
            row = json.loads(finished.read_text())
            if row["asked"] != asked:
                parser.error(f"{args.out} holds runs of {row['asked']}, not of {asked}; use another --out")
            return row
        model = prepare(method, args.model, args.rank, lora_rank, seed)
        settings = FitSettings(
            steps=steps,
            batch_size=args.batch_size,
            learning_rate=rate,
            weight_decay=0,
            dtype="float32",
            seed=seed,
            save_every=0,
        )
        count, result = trainable(model), fit(model, data, settings, out_dir=out)
        row = {"trainable": count, "before": math.log(result.initial_perplexity), "after": result.validation_loss}
        row["asked"] = asked
        write_json(finished, row)
        return row

    for method, rates in RATES.items():
        short = max(1, args.steps // 4)
        tuned = {rate: run(method, rate, short, args.seeds[0])["after"] for rate in rates}
        best = min(tuned, key=lambda rate: tuned[rate])
        rows = [run(method, best, args.steps, seed) for seed in args.seeds]
        count, before, losses = rows[0]["trainable"], rows[0]["before"], [row["after"] for row in rows]
        results["methods"][method] = {
            "trainable": count,
            "learning_rate": best,
            "tuning": {f"{rate:g}": loss for rate, loss in tuned.items()},
            "validation_loss_before": before,
            "validation_loss": losses,
        }
        write_json(args.out / "results.json", results)
        mean = sum(losses) / len(losses)
        print(f"{method}: {count:,} parameters, rate {best:g}, validation loss {before:.4f} -> {mean:.4f}", flush=True)


if __name__ == "__main__":
    main()
