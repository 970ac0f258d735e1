"""``relinear train``: train one model."""

import shlex
import sys
from pathlib import Path
from typing import Any

import typer

from relinear_cli import options


def command(
    recipe: str | None = typer.Option(None, help="A YAML file of training settings."),
    model: options.TrainingModel = None,
    out: Path = typer.Option(Path("runs/train"), help="Directory of the run."),
    replace: options.Replace = None,
    attach: list[str] | None = typer.Option(
        None, metavar="KIND:KEY=VALUE", help="A residual method or another part of the whole model."
    ),
    layers: options.ReplaceLayers = None,
    objective: str | None = typer.Option(None, help="Such as `distill:teacher=DIR`; by default the model's own loss."),
    data: options.TrainingData = None,
    text_column: options.TextColumn = None,
    tokenizer: str | None = typer.Option(
        None, help="`bytes`, `bpe:N`, or an AutoTokenizer name.", show_default="bytes"
    ),
    steps: int | None = typer.Option(None, min=1, help="Optimiser steps.", show_default="1000"),
    batch_size: int | None = typer.Option(
        None, min=1, help="Sequences in a forward pass (on each rank).", show_default="16"
    ),
    learning_rate: float | None = typer.Option(None, help="The peak of the schedule.", show_default="0.001"),
    compile: options.Compile = None,
    seed: int | None = typer.Option(None, help="Seed of initialisation, data and noise.", show_default="0"),
    threads: options.Threads = None,
    overrides: options.Overrides = None,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
) -> None:
    """Train one model, with operators in place of its linear layers; leaves metrics, results and the model in --out.

    If it is killed, start the command again: it resumes from its last checkpoint.

    **Example:** `relinear train --model tiny -r all-linear=low_rank:rank=16 --steps 200 --out runs/low-rank`
    """
    from relinear.compare.recipe import find_recipe
    from relinear.compare.requirements import training_requirements
    from relinear.settings.yaml_settings import apply_overrides, read_yaml
    from relinear.system.machine import is_first_rank
    from relinear.training import TrainSettings, train
    from relinear.training.fitting import rank_count
    from relinear.training.report import result_facts
    from relinear.training.run import run_folder
    from relinear_cli.progress import watch
    from relinear_cli.terminal import print_requirements

    changes: dict[str, Any] = {
        "model": model,
        "operators": replace and options.parse_operators(replace),
        "attachments": attach,
        "layers": options.parse_layers(layers),
        "objective": objective,
        "data.data": data,
        "data.text_column": text_column,
        "data.tokenizer": tokenizer,
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "compile": compile,
        "seed": seed,
        "threads": threads,
    }
    values = {} if recipe is None else read_yaml(find_recipe(recipe))
    changed = apply_overrides(values, options.chosen_settings(changes, overrides))
    settings = options.load_changed(TrainSettings, recipe, values, changed)
    options.prepare_process(models=[settings.model])
    if is_first_rank():  # a launcher may have started fewer ranks than expected
        ranks = rank_count()
        sequences = settings.batch_size * settings.accumulation
        description = f"{ranks} rank{'s' if ranks > 1 else ''}, {ranks * sequences:,} sequences per step"
        print(f"{description} ({ranks * settings.tokens_per_step:,} tokens)", file=sys.stderr)
        run_settings = settings.model_dump(mode="json")
        folder = run_folder(out, settings, overwrite)
        if dry_run or (ranks == 1 and folder.check(run_settings, overwrite=overwrite) is None):
            print_requirements(training_requirements(settings))
    if dry_run:
        return
    with watch(settings.model, resumable=True) as on_progress:
        result = train(settings, out, overwrite=overwrite, on_progress=on_progress)
    if not is_first_rank():  # only one of several ranks prints the result
        return
    facts = {"directory": str(out.resolve()), "as a page": f"relinear report {shlex.quote(str(out))}"}
    for name, text in (result_facts(result.to_dict()) | facts).items():
        print(f"{name:<18} {text}")
