"""Linear regression in context: the error against the number of examples, with y computed and with y frozen.

    python examples/cgt_regression.py --out results/cgt/regression

Ridge regression with the true noise is the optimal predictor of this task. The horizontal axis of the figure counts the
examples that a prediction may use, in the context or through the frozen y. At the paper's size: --inputs 16 --pairs 64
--noise 0.1 --layers 8 --context-layer 7 --width 128 --context-size 64 --steps 400000 --batch-size 128.
"""

import argparse
import dataclasses
import time
from pathlib import Path

import torch

import relinear
from relinear.analysis.plots import save_figure
from relinear.models.cgt.objective import CGTObjective, GuidedTraining
from relinear.studies.cgt import measures, plots
from relinear.studies.cgt.tasks import RegressionTask
from relinear.system.files import write_json, write_text
from relinear.system.machine import describe_machine
from relinear.train import FitSettings, fit


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/cgt/regression"))
    parser.add_argument("--inputs", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=26)
    parser.add_argument("--noise", type=float, default=1.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context-layer", type=int, default=3)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context-size", type=int, default=32)
    parser.add_argument("--context-heads", type=int, default=4)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--templates", type=int, default=8)
    parser.add_argument("--initializer-range", type=float, default=0.1, help="GPT-2's 0.02 is for width 768")
    parser.add_argument("--eta", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--freeze-after", type=int, nargs="+", default=[5, 10, 20])
    parser.add_argument("--samples", type=int, default=2048, help="sequences of the measurement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes = {"inputs": options.inputs, "pairs": options.pairs, "noise": options.noise}
    train = RegressionTask(**sizes, size=options.steps * options.batch_size, seed=options.seed)
    test = RegressionTask(**sizes, size=options.samples, split="test")
    torch.manual_seed(options.seed)
    config = relinear.CGTConfig(
        n_positions=2 * options.pairs,
        n_embd=options.width,
        n_head=options.heads,
        n_layer=options.layers,
        context_layer=options.context_layer,
        context_size=options.context_size,
        context_heads=options.context_heads,
        rank=options.rank,
        templates=options.templates,
        initializer_range=options.initializer_range,
        input_features=train.features,
        output_features=train.outputs,
        activation_function="gelu_pytorch_tanh",
        bos_token_id=None,
        eos_token_id=None,
    )
    model = relinear.CGTForRegression(config)
    # Splits between pairs: the rest begins with an x, as a specialised model's input does.
    objective = CGTObjective(eta=options.eta, shared_split=True, splits=tuple(range(2, 2 * options.pairs - 1, 2)))
    settings = FitSettings(
        steps=options.steps,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        warmup_steps=min(50, options.steps // 4),
        min_lr_ratio=0.01,
        weight_decay=0.0,
        betas=(0.9, 0.98),
        dtype="float32",
        seed=options.seed,
        threads=options.threads,
        log_every=50,
        save_every=0,
    )
    began = time.time()
    result = fit(GuidedTraining(model, objective), train, settings)
    errors = measures.regression_errors(model, test, options.freeze_after, options.samples)
    ridge = measures.ridge_errors(test, options.samples)
    rows = [
        "| examples | ridge | dynamic | dynamic / ridge | specialised | specialised / dynamic |",
        "|" + " --- |" * 6,
    ]
    for k in options.freeze_after:
        dynamic, frozen = errors["dynamic"][k], errors[f"frozen_{k}"][0]
        cells = [f"{ridge[k]:.4f}", f"{dynamic:.4f}", f"{dynamic / ridge[k]:.3f}"]
        cells += [f"{frozen:.4f}", f"{frozen / dynamic:.3f}"]
        rows.append(f"| {k} | " + " | ".join(cells) + " |")
    print("\n".join(rows))
    write_text(options.out / "table.md", "\n".join(rows) + "\n")
    save_figure(plots.regression_figure(errors, ridge, noise=options.noise), options.out / "errors")
    write_json(
        options.out / "run.json",
        {
            "errors": {name: values.tolist() for name, values in errors.items()},
            "ridge": ridge.tolist(),
            "curve": result.curve,
            "seconds": round(time.time() - began, 1),
            "parameters": sum(p.numel() for p in model.parameters()),
            "objective": dataclasses.asdict(objective),
            "settings": settings.model_dump(mode="json"),
            "model": config.to_diff_dict(),
            "options": {key: str(value) for key, value in vars(options).items()},
            "machine": describe_machine(),
        },
    )


if __name__ == "__main__":
    main()
