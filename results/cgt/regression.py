"""Linear regression in context: the error against the number of examples, with y computed and with y frozen.

    python results/cgt/regression.py --out results/cgt/regression

Ridge regression with the true noise is the optimal predictor of this task. The horizontal axis of the figure counts the
examples that a prediction may use, in the context or through the frozen y. ``--paper`` starts from the paper's sizes,
vectors, loss and schedule (Section 4.3, Appendices B.2 and D.2), and the other options change that.
"""

import argparse
import dataclasses
import time
from pathlib import Path

import torch
from transformers import GPT2Config

import relinear
from cgt_study import measures, plots
from cgt_study.baselines import PlainRegression
from cgt_study.schedule import add_schedule, fit_settings, parse_options
from cgt_study.tasks import RegressionTask
from relinear.models.cgt.objective import CGTObjective, GuidedTraining
from relinear.pages.matplotlib_figures import save_figure
from relinear.system.files import write_json, write_text
from relinear.system.machine import describe_machine
from relinear.train import fit

#: what ``--paper`` sets; eta = 0.5 without regularisers, the base experiments of Appendix D.2
PAPER_SETTINGS = {
    "inputs": 16,
    "pairs": 64,
    "noise": 0.1,
    "layout": "shared",
    "vectors": "padded",
    "layers": 8,
    "context_layer": 7,
    "width": 128,
    "heads": 8,
    "context_size": 64,
    "context_heads": 4,
    "rank": 4,
    "templates": 8,
    "initializer_range": 0.02,
}


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/cgt/regression"))
    parser.add_argument("--inputs", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=26)
    parser.add_argument("--noise", type=float, default=1.0)
    parser.add_argument("--layout", choices=("separate", "shared"), default="separate", help="features of x and y")
    parser.add_argument("--vectors", choices=("learned", "padded"), default="learned", help="how vectors enter")
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
    parser.add_argument("--continuity", type=float, default=0.0, help="w_C")
    parser.add_argument("--decorrelation", type=float, help="w_D; half of w_C by default, as in the paper")
    parser.add_argument("--profile", default="constant", help="zeta_C = zeta_D, see CGTObjective")
    parser.add_argument("--kernel", choices=("rbf", "exponential", "estimation"), default="rbf", help="the prior of y")
    add_schedule(parser, steps=2000, batch_size=64, min_lr_ratio=0.01, weight_decay=0.0, beta2=0.98)
    parser.add_argument("--baseline", action="store_true", help="train a plain GPT-2 of the same width too (Figure 4)")
    parser.add_argument("--freeze-after", type=int, nargs="+", default=[5, 10, 20])
    parser.add_argument("--samples", type=int, default=2048, help="sequences of the measurement")
    parser.add_argument("--seed", type=int, default=0)
    return parse_options(parser, PAPER_SETTINGS, arguments)


def make_tasks(options):
    sizes = {name: getattr(options, name) for name in ("inputs", "pairs", "noise", "layout")}
    train = RegressionTask(**sizes, size=options.steps * options.batch_size, seed=options.seed)
    return train, RegressionTask(**sizes, size=options.samples, split="test")


def make_config(options, task):
    return relinear.CGTConfig(
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
        input_features=task.features,
        output_features=task.outputs,
        vector_input=options.vectors,
        activation_function="gelu_pytorch_tanh",
        bos_token_id=None,
        eos_token_id=None,
    )


def make_baseline(options, task):
    """A plain Transformer of the CGT's width and layers, without its y."""
    sizes = {"n_positions": 2 * options.pairs, "n_embd": options.width, "n_head": options.heads}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        n_layer=options.layers,
        initializer_range=options.initializer_range,
        activation_function="gelu_pytorch_tanh",
        vocab_size=1,
        **sizes,
        **off,
    )
    return PlainRegression(config, task.features, task.outputs, options.vectors)


def make_objective(options):
    # Splits between pairs: the rest begins with an x, as a specialised model's input does. Positions start again there,
    # and where x and y share their features nothing else would tell a rest that begins with a y.
    half = options.continuity / 2
    return CGTObjective(
        eta=options.eta,
        shared_split=True,
        splits=tuple(range(2, 2 * options.pairs - 1, 2)),
        continuity=options.continuity,
        decorrelation=half if options.decorrelation is None else options.decorrelation,
        profile=options.profile,
        kernel=options.kernel,
    )


def main():
    options = parse()
    torch.set_num_threads(options.threads)
    train, test = make_tasks(options)
    torch.manual_seed(options.seed)
    config = make_config(options, train)
    model = relinear.CGTForRegression(config)
    objective = make_objective(options)
    settings = fit_settings(options, log_every=50)
    began = time.time()
    result = fit(GuidedTraining(model, objective), train, settings)
    errors = measures.regression_errors(model, test, options.freeze_after, options.samples)
    if options.baseline:
        torch.manual_seed(options.seed)
        plain = make_baseline(options, train)
        fit(plain, train, settings)
        errors["baseline"] = measures.regression_errors(plain, test, (), options.samples)["dynamic"]
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
