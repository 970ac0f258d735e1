"""Hidden-coefficient arithmetic: the columns of Table 1 of the CGT paper at a size that learns in minutes on a CPU.

    python results/cgt/arithmetic.py run --column aux --seed 0 --out results/cgt/arithmetic
    python results/cgt/arithmetic.py collect --out results/cgt/arithmetic
    python results/cgt/arithmetic.py plan --out results/cgt/arithmetic-planned

``run`` trains one model and writes its settings, its curve and its measurements to COLUMN-SEED.json, and the model to
models/COLUMN-SEED/ with --save; ``collect`` makes the table and the figures of what is there. What is not given is the
small task above; ``--paper`` starts from the paper's sizes, task, loss and schedule (Section 4.2 and Appendix B.2)
instead, and the other options change that. ``plan`` carries out ``results/plans/cgt-arithmetic.yaml``, by as many
processes as are started.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import torch
from transformers import TrainerCallback

import relinear
from cgt_study import contexts, measures, planned, plots
from cgt_study.baselines import plain_gpt2
from cgt_study.schedule import add_schedule, fit_settings, parse_options
from cgt_study.tasks import ArithmeticTask
from relinear.compare.gaps import gap
from relinear.compare.settings import read_plan
from relinear.models.cgt.objective import CGTObjective, GuidedTraining
from relinear.pages.matplotlib_figures import save_figure
from relinear.system.files import write_json, write_text
from relinear.system.machine import describe_machine
from relinear.train import fit

#: for each column of Table 1, and of Figure 17, which terms of the loss it has; None for plain GPT-2
COLUMNS = {
    "baseline": None,
    "baseline-equal": None,
    "no-aux": (),
    "reg": ("regularisers",),
    "aux": ("auxiliary",),
    "aux+reg": ("auxiliary", "regularisers"),
    "vae": ("auxiliary", "kl"),
    "vae-0.01": ("auxiliary", "kl"),
    "vae-0.3": ("auxiliary", "kl"),
}
#: what ``--paper`` sets: Section 4.2 and Appendix B.2 of the paper
PAPER_SETTINGS = {
    "tasks": 4,
    "examples": 4,
    "digits": 3,
    "a": (0.0, 10.0),
    "b": (-10.0, 10.0),
    "real": True,
    "loss": "all",
    "splits": "anywhere",
    "layers": 6,
    "width": 112,
    "heads": 7,
    "context_layer": 4,
    "context_size": 64,
    "context_heads": 4,
    "rank": 4,
    "templates": 16,
}
_PLAN = Path(__file__).resolve().parents[1] / "plans" / "cgt-arithmetic.yaml"
#: of a plan: samples that are answered together, and how many such blocks
_BLOCK, _BLOCKS = 64, 32
PUBLISHED = {
    "baseline": "77.7 %",
    "no-aux": "79.0 / 15.3 %",
    "aux": "77.5 / 77.0 %",
    "aux+reg": "78.6 / 77.5 %",
}


class Accuracies(TrainerCallback):
    """Measures the model now and then; the curve of the results."""

    def __init__(self, model, task, every):
        self.model, self.task, self.every, self.rows = model, task, every, []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0:
            measured = measures.answer_accuracy(self.model, self.task, 128)
            row = {name: dataclasses.asdict(value) for name, value in measured.items()}
            self.rows.append({"step": state.global_step, **row})
            print(state.global_step, {k: round(v["symbols"], 3) for k, v in row.items()}, flush=True)
            self.model.train()


def make_task(options, split, size):
    return ArithmeticTask(
        tasks=options.tasks,
        examples=options.examples,
        digits=options.digits,
        a_range=tuple(options.a),
        b_range=tuple(options.b),
        integers=not options.real,
        answers_only=options.loss == "answers",
        size=size,
        seed=options.seed if split == "train" else 0,
        split=split,
    )


def make_model(options, task, column):
    shared = {
        "vocab_size": task.vocab_size,
        "n_positions": task.length,
        "n_layer": options.layers,
        "activation_function": "gelu_pytorch_tanh",
        "initializer_range": options.initializer_range,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    wanted = None
    if column == "baseline-equal":
        wanted = sum(p.numel() for p in make_model(options, task, "aux").parameters())
    torch.manual_seed(options.seed)
    if COLUMNS[column] is None:
        return plain_gpt2(options.width, options.heads, parameters=wanted, **shared)
    return relinear.CGTForCausalLM(
        relinear.CGTConfig(
            n_embd=options.width,
            n_head=options.heads,
            context_layer=options.context_layer,
            context_size=options.context_size,
            context_heads=options.context_heads,
            rank=options.rank,
            templates=options.templates,
            mixing=options.mixing,
            variational=column.startswith("vae"),
            context_norm=not column.startswith("vae"),
            **shared,
        )
    )


def make_objective(options, task):
    """The loss of a column: Eq. 3, or Eq. 2 in the VAE form."""
    terms = COLUMNS[options.column]
    if terms is None:
        return None
    examples = options.splits == "examples"
    weights = {}
    if "regularisers" in terms:
        half = options.continuity / 2
        weights["continuity"] = options.continuity
        weights["decorrelation"] = half if options.decorrelation is None else options.decorrelation
    if "kl" in terms:
        weights["kl"] = float(options.column.partition("-")[2] or options.kl)
    return CGTObjective(
        eta=options.eta if "auxiliary" in terms else 1.0,
        splits=tuple(range(task.example_length, task.length, task.example_length)) if examples else None,
        shared_split=examples,
        horizon=options.horizon,
        profile=options.profile,
        kernel=options.kernel,
        kl_reduction=options.kl_reduction,
        **weights,
    )


def run(options, path=None, tuning=False):
    """Train and measure a model; its record is ``path``, which for ``tuning`` has the share of wrong symbols alone."""
    torch.set_num_threads(options.threads)
    train = make_task(options, "train", options.steps * options.batch_size)
    test = make_task(options, "test", 512)
    model = make_model(options, train, options.column)
    curve = Accuracies(model, make_task(options, "validation", 128), options.every)
    settings = fit_settings(options)
    objective = make_objective(options, train)
    began = time.time()
    result = fit(model if objective is None else GuidedTraining(model, objective), train, settings, callbacks=[curve])
    if tuning:  # by samples that are none of the final ones
        right = measures.answer_accuracy(model, make_task(options, "validation", 512), 512)["dynamic"]
        write_json(path, {"column": options.column, "loss": 1 - right.symbols, "answers": right.answers})
        print(path.stem, right, flush=True)
        return
    report = measures.arithmetic_report(model, test, 512) | {"guessing": measures.guessing_accuracy(test, 512)}
    if objective is None:
        for token in "=|":
            layers = measures.task_vector_accuracy(model, test, token, 256)
            report[f"task_vectors {token}"] = [dataclasses.asdict(layer) for layer in layers]
    print(options.column, options.seed, json.dumps(report), flush=True)
    blocks = {}
    if path is not None:
        many = make_task(options, "test", _BLOCK * _BLOCKS)
        blocks = {"answers": measures.answers_by_block(model, many, _BLOCK, _BLOCKS)}
    write_json(
        path or options.out / f"{options.column}-{options.seed}.json",
        blocks
        | {
            "column": options.column,
            "seed": options.seed,
            "report": report,
            "curve": curve.rows,
            "losses": result.curve,
            "parameters": sum(p.numel() for p in model.parameters()),
            "seconds": round(time.time() - began, 1),
            "task": {k: v for k, v in vars(train).items() if k not in ("size", "seed", "split")},
            "objective": None if objective is None else dataclasses.asdict(objective),
            "settings": settings.model_dump(mode="json"),
            "model": model.config.to_diff_dict(),
            "machine": describe_machine(),
        },
    )
    if options.save:
        model.save_pretrained(options.out / "models" / f"{options.column}-{options.seed}")


def carry_out(options):
    """Run what is left of a plan; the last process sums up."""
    study = read_plan(options.plan).study
    options = argparse.Namespace(**vars(options) | study.settings["options"])

    def one(given, path, tuning):
        run(argparse.Namespace(**vars(options) | given | {"column": given["name"]}), path, tuning)

    planned.carry_out(study, list(study.arms), options.out, one, lambda: sum_up(study, options.out))


def sum_up(study, out):
    """Write the report and the table of a plan: shares of right answers, and their differences by seed and block."""
    runs = {arm: [json.loads((out / f"{arm}-{seed}.json").read_text()) for seed in study.seeds] for arm in study.arms}
    right = {
        (arm, kind): [np.array(one["answers"][kind]) for one in found]
        for arm, found in runs.items()
        for kind in found[0]["answers"]
    }
    report = {"guessing": runs["aux"][0]["report"]["guessing"], "arms": {}, "differences": {}}
    for arm, found in runs.items():
        report["arms"][arm] = {
            "parameters": found[0]["parameters"],
            "seeds": len(found),
            **{key: found[0]["settings" if key == "learning_rate" else "model"][key] for key in study.grid},
            "answers": {kind: float(np.mean(values)) for (name, kind), values in right.items() if name == arm},
            "probe": [one["report"]["probe"] for one in found if "probe" in one["report"]],
        }
    pairs = [((arm, "dynamic"), ("baseline-equal", "dynamic")) for arm in study.arms if arm != "baseline-equal"]
    pairs += [(each, (each[0], "dynamic")) for each in right if each[1] != "dynamic"]
    pairs += [((arm, "specialized"), ("no-aux", "specialized")) for arm in ("aux", "aux+reg")]
    pairs += [(("aux+reg", kind), ("aux", kind)) for kind in ("dynamic", "specialized")]
    for own, other in pairs:
        report["differences"][f"{' '.join(own)} - {' '.join(other)}"] = gap(right[own], right[other])
    write_json(out / "report.json", report)
    write_text(out / "table.md", planned_table(report))
    print(planned_table(report))


def planned_table(report):
    """The report of a plan as two tables in markdown."""
    kinds = {"dynamic": "y computed", "specialized": "y frozen, examples removed", "specialized_ctx": "y frozen, kept"}
    lines = [f"| model | parameters | start, rate | {' | '.join(kinds.values())} |", "|" + " --- |" * 6]
    for arm, entry in report["arms"].items():
        cells = [f"{entry['answers'][kind]:.1%}" if kind in entry["answers"] else "" for kind in kinds]
        tuned = f"{entry['initializer_range']:g}, {entry['learning_rate']:g}"
        lines.append(f"| `{arm}` | {entry['parameters']:,} | {tuned} | {' | '.join(cells)} |")
    lines += ["", "| difference, in points | mean | 95 % |", "| --- | --- | --- |"]
    for name, found in report["differences"].items():
        mean, low, high = (100 * found[key] for key in ("mean", "low", "high"))
        lines.append(f"| {name} | {mean:+.1f} | {low:+.1f} to {high:+.1f} |")
    return "\n".join(lines) + "\n"


def collect(options):
    runs = [json.loads(path.read_text()) for path in sorted(options.out.glob("*-[0-9].json"))]
    rows = {column: [r for r in runs if r["column"] == column] for column in COLUMNS}
    rows = {column: found for column, found in rows.items() if found}

    def cell(found, *keys):
        """Mean and spread of one entry of the reports."""
        values = []
        for one in found:
            value = one["report"]
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if value is None:
                return "–"
            values.append(value)
        spread = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
        return f"{np.mean(values):.3f}{spread}"

    # Runs of version 0.1 probed the last token alone.
    for one in runs:
        if "probe_error" in one["report"]:
            one["report"]["probe"] = {"last": {"error": one["report"].pop("probe_error")}}
    lines = [
        "| column | seeds | parameters | symbols, dynamic | symbols, specialised | answers, dynamic | "
        "answers, specialised | specialised, examples in context | variation (Eq. 4) | probe error, anywhere | "
        "last token | average | guessing | paper, dynamic / specialised |",
        "|" + " --- |" * 14,
    ]
    for column, found in rows.items():
        cells = [
            column,
            str(len(found)),
            f"{found[0]['parameters']:,}",
            cell(found, "dynamic", "symbols"),
            cell(found, "specialized", "symbols"),
            cell(found, "dynamic", "answers"),
            cell(found, "specialized", "answers"),
            cell(found, "specialized_ctx", "answers"),
            cell(found, "variation"),
            *(cell(found, "probe", where, "error") for where in ("anywhere", "last", "average")),
            cell(found, "guessing"),
            PUBLISHED.get(column, "–"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "– is what no run of the row has measured, or what a model without y cannot have."]
    write_text(options.out / "table.md", "\n".join(lines) + "\n")
    print("\n".join(lines))
    for measure in ("symbols", "answers"):
        figure = plots.accuracy_figure({c: [r["report"] for r in found] for c, found in rows.items()}, measure)
        save_figure(figure, options.out / f"accuracy-{measure}")
    # one kept model of each column that has a context
    kept = {c: sorted((options.out / "models").glob(f"{c}-[0-9]")) for c, given in COLUMNS.items() if given is not None}
    saved = {c: folders[0] for c, folders in kept.items() if folders}
    if not saved:
        return
    test = make_task(options, "test", 512)
    ids = test.batch(range(256))["input_ids"]
    maps, spectra = {}, {}
    for column, folder in saved.items():
        model = relinear.CGTForCausalLM.from_pretrained(folder)
        y = model.context(ids)
        maps[column] = contexts.dot_products(y)
        spectra[column] = contexts.spectrum(y)
        if column == "aux+reg":
            hidden = torch.from_numpy(np.concatenate([test.coefficients(i) for i in range(256)]))
            probe = measures.linear_probe(measures.probe_features(y, test, "average").flatten(0, 1), hidden)
            save_figure(plots.probe_figure(probe.predicted, probe.truth), options.out / "probe")
    joints = range(test.example_length, test.length, test.example_length)
    save_figure(plots.dot_product_figure(maps, joints), options.out / "dot-products")
    save_figure(plots.spectrum_figure(spectra), options.out / "spectra")


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "collect", "plan"))
    parser.add_argument("--plan", type=Path, default=_PLAN, help="what ``plan`` carries out")
    parser.add_argument("--column", choices=list(COLUMNS), default="aux")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/cgt/arithmetic"))
    parser.add_argument("--save", action="store_true", help="keep the model")
    parser.add_argument("--tasks", type=int, default=1)
    parser.add_argument("--examples", type=int, default=4)
    parser.add_argument("--digits", type=int, default=1)
    parser.add_argument("--a", type=float, nargs=2, default=(0, 5), help="interval of a")
    parser.add_argument("--b", type=float, nargs=2, default=(0, 0), help="interval of b")
    parser.add_argument("--real", action="store_true", help="real coefficients, as in the paper")
    parser.add_argument("--loss", choices=("answers", "all"), default="answers", help="symbols that the loss counts")
    parser.add_argument("--splits", choices=("examples", "anywhere"), default="examples", help="where y is frozen")
    parser.add_argument("--horizon", type=int, help="Delta of the auxiliary loss; 10 in some of the paper's runs")
    parser.add_argument("--eta", type=float, default=0.5)
    parser.add_argument("--continuity", type=float, default=0.08, help="w_C, of the columns with regularisers")
    parser.add_argument("--decorrelation", type=float, help="w_D; half of w_C by default, as in the paper")
    parser.add_argument("--profile", default="constant", help="zeta_C = zeta_D, see CGTObjective")
    parser.add_argument("--kernel", choices=("rbf", "exponential", "estimation"), default="rbf", help="the prior of y")
    parser.add_argument("--kl", type=float, default=0.1, help="beta_y, of the column vae")
    parser.add_argument("--kl-reduction", default="mean", help="what beta_y weighs, see CGTObjective")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--context-layer", type=int, default=2)
    parser.add_argument("--context-size", type=int, default=24)
    parser.add_argument("--context-heads", type=int, default=3)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--templates", type=int, default=8)
    parser.add_argument("--initializer-range", type=float, default=0.02)
    parser.add_argument("--mixing", choices=("tanh", "softmax"), default="tanh")
    add_schedule(parser, steps=600, batch_size=64, min_lr_ratio=0.02, weight_decay=0.01, beta2=0.98)
    parser.add_argument("--every", type=int, default=100, help="steps between measurements")
    return parse_options(parser, PAPER_SETTINGS, arguments)


def main():
    options = parse()
    {"run": run, "collect": collect, "plan": carry_out}[options.what](options)


if __name__ == "__main__":
    main()
