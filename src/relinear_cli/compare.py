"""``relinear compare``: compare operators under one budget."""

from pathlib import Path
from typing import Any, Literal

import typer

from relinear_cli import options


def command(
    recipe: str | None = typer.Option(None, help="A YAML file, or a name such as `quick`."),
    plan: Path | None = typer.Option(None, exists=True, help="A preregistered comparison; it takes no other settings."),
    operators: list[str] | None = typer.Option(
        None, "--operator", "-o", metavar="KIND:KEY=VALUE", help="An entry, or `dense`; may be repeated."
    ),
    match: Literal["width", "parameters", "flops", "bytes"] | None = typer.Option(
        None,
        metavar="<width | parameters | flops | bytes>",
        help="What to make equal: `width` keeps sizes; the others resize operators, and dense by its width.",
        show_default="width",
    ),
    size: str | None = typer.Option(
        None, help="Size of the stored model, for `--match bytes`: 500KB, or several: 250KB,1MB; else the recipe's."
    ),
    model: options.TrainingModel = None,
    data: options.TrainingData = None,
    text_column: options.TextColumn = None,
    tokens: str | None = typer.Option(
        None, help="Training tokens, such as 20.5M, in place of steps and of the recipe's budgets."
    ),
    steps: int | None = typer.Option(
        None, min=1, help="Optimiser steps, in place of the recipe's budget.", show_default="1000"
    ),
    seeds: str | None = typer.Option(None, help="Every entry runs once per seed.", show_default="0"),
    tune: bool = typer.Option(False, "--tune", help="Tune each entry's learning rate: short runs, then full length."),
    out: Path = typer.Option(Path("runs/compare"), help="Directory of the comparison."),
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    compile: options.Compile = None,
    threads: options.Threads = None,
    overrides: options.Overrides = None,
    workers: options.Workers = None,
    executor: options.Executor = None,
    partition: str | None = typer.Option(None, help="SLURM partition.", show_default="the cluster's"),
    slurm: options.Slurm = None,
) -> None:
    """Train operators side by side on one corpus and budget; ends with a table and report.html.

    A recipe with `sizes` compares at several widths and fits loss against compute.

    If it is killed, start the command again: it resumes.

    **Example:** `relinear compare --recipe quick --out runs/demo`

    **Example:** `relinear compare --recipe quick --match bytes --size 100KB --out runs/bytes`

    **Example:** `relinear compare -o dense -o low_rank:rank=48 -o hdpl:rank=16,blocks=4 --match parameters --steps 300`
    """
    from relinear.compare.folder import comparison_folder
    from relinear.compare.recipe import apply_overrides, change_recipe, read_recipe
    from relinear.compare.report import write_report
    from relinear.compare.requirements import compare_requirements
    from relinear.compare.run import compare
    from relinear.compare.settings import CompareSettings, read_plan
    from relinear_cli.progress import watch
    from relinear_cli.terminal import print_requirements, print_results

    overridden = {
        "match.by": match,
        "match.to": size and size.split(","),
        "train.model": model,
        "train.data.data": data,
        "train.data.text_column": text_column,
        "tokens": tokens,
        "train.steps": steps,
        "seeds": options.parse_numbers("--seeds", seeds),
        "train.compile": compile,
        "train.threads": threads,
    }
    changes = options.chosen_settings(overridden, overrides)
    if plan is not None and (recipe is not None or operators or tune or changes):
        raise ValueError("--plan fixes all settings: combine it only with --out, --workers and --executor")
    placement = options.placement(workers, executor, slurm, partition)
    if plan is recipe is None and not operators:
        raise ValueError("nothing to compare: add --recipe, or --operator at least once; see relinear compare --help")
    values = {} if recipe is None else read_recipe(recipe)
    for entry in values.get("entries", {}).values() if match == "bytes" else ():
        if isinstance(entry, dict) and entry.get("resize") == "fixed":  # fixed for the recipe's match
            del entry["resize"]
    if operators:  # they replace the recipe's entries, and settings that name one of those
        entries: dict[str, Any] = dict(options.named_entries(operators))
        changes = {"entries": entries} | changes
        for parent, key in ((values, "reference"), (values.get("match"), "to")):
            if isinstance(parent, dict) and isinstance(named := parent.get(key), str) and named not in entries:
                del parent[key]
    if match in ("parameters", "flops"):  # dense is resized by its width to match the others
        named = changes.get("entries") or values.get("entries", {})
        named |= {name: {"resize": "width"} for name, setting in named.items() if setting == "dense"}
    if tune and not values.get("tune"):  # otherwise the recipe's tuning stays
        changes = {"tune": {}} | changes
    values = apply_overrides(values, changes) if recipe is None else change_recipe(values, changes)
    settings = CompareSettings.load(values, recipe or "settings") if plan is None else read_plan(plan).comparison
    options.prepare_process()
    if dry_run or comparison_folder(out).check(settings.model_dump(mode="json"), overwrite=overwrite) is None:
        print_requirements(compare_requirements(settings, workers, timed=executor is None))
    if dry_run:
        return
    with watch(resumable=True) as on_progress:
        results = compare(settings, out, overwrite=overwrite, **placement, on_progress=on_progress)
    report = write_report(out)
    print_results(results)
    print(f"\nreport: {report.resolve()}")
