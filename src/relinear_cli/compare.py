"""``relinear compare``: compare operators under one budget."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from relinear_cli import options

if TYPE_CHECKING:
    from relinear.compare.settings import CompareSettings


def command(
    recipe: str | None = typer.Option(None, help="A YAML file, or a name such as `quick`."),
    preregistration: Path | None = typer.Option(
        None, exists=True, help="A preregistered comparison; it takes no other settings."
    ),
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

    A recipe with `widths` compares at several widths and fits loss against compute.

    If it is killed, start the command again: it resumes.

    **Example:** `relinear compare --recipe quick --out runs/demo`

    **Example:** `relinear compare --recipe quick --match bytes --size 100KB --out runs/bytes`

    **Example:** `relinear compare -o dense -o low_rank:rank=48 -o hdpl:rank=16,blocks=4 --match parameters --steps 300`
    """
    from relinear.compare.folder import comparison_folder
    from relinear.compare.report import write_report
    from relinear.compare.requirements import compare_requirements
    from relinear.compare.run import compare
    from relinear.compare.settings import read_preregistration
    from relinear_cli.progress import watch
    from relinear_cli.terminal import print_requirements, print_results, print_scale

    chosen = {
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
    changes = options.chosen_settings(chosen, overrides)
    if preregistration is not None and (recipe is not None or operators or tune or changes):
        raise ValueError("--preregistration fixes all settings: combine it only with --out, --workers and --executor")
    execution = options.execution(workers, executor, slurm, partition)
    if preregistration is recipe is None and not operators:
        raise ValueError("nothing to compare: add --recipe, or --operator at least once; see relinear compare --help")
    if preregistration is not None:
        settings = read_preregistration(preregistration).comparison
    else:
        settings = _changed_settings(recipe, changes, operators, match, tune)
    if size is not None and settings.match.by != "bytes":
        raise ValueError("--size is of the stored model: add --match bytes")
    options.prepare_process()
    if dry_run or comparison_folder(out).check(settings.model_dump(mode="json"), overwrite=overwrite) is None:
        print_requirements(compare_requirements(settings, workers, timed=executor is None))
    if dry_run:
        return
    with watch(resumable=True) as on_progress:
        results = compare(settings, out, overwrite=overwrite, **execution, on_progress=on_progress)
    report = write_report(out)
    if settings.widths is None:
        print_results(results)
    else:
        print_scale(results)
    print(f"\nreport: {report.resolve()}")


def _changed_settings(
    recipe: str | None, changes: dict[str, Any], operators: list[str] | None, match: str | None, tune: bool
) -> "CompareSettings":
    """Return a recipe's settings (None: the defaults) with those of the command line.

    Args:
        recipe: name or file of the recipe.
        changes: changed settings by dotted name.
        operators: the option, which replaces all entries.
        match: the option, which may also let entries be resized.
        tune: the option, which keeps the tuning of a recipe that has one.
    """
    from relinear.compare.recipe import change_recipe, read_recipe
    from relinear.compare.settings import CompareSettings
    from relinear.settings.yaml_settings import apply_overrides, without_key

    as_written = values = {} if recipe is None else read_recipe(recipe)
    if operators:  # they replace the recipe's entries, and settings that name one of those
        entries = options.named_entries(operators)
        changes = {"entries": entries} | changes
        target = values["match"].get("to") if isinstance(values.get("match"), dict) else None
        for key, name in (("reference", values.get("reference")), ("match.to", target)):
            if isinstance(name, str) and name not in entries:
                values = without_key(values, key)
    if tune and not values.get("tune"):  # otherwise the recipe's tuning stays
        changes = {"tune": {}} | changes
    values, changes = _resized(values, match), _resized(changes, match)
    changed = apply_overrides(values, changes) if recipe is None else change_recipe(values, changes)
    return options.load_changed(CompareSettings, recipe, as_written, changed)


def _resized(values: dict[str, Any], match: str | None) -> dict[str, Any]:
    """Return ``values`` with entries that ``--match`` may resize, whatever the recipe's own match may."""
    from relinear.settings.config_text import keeps_layer

    def resized(entry: Any) -> Any:
        if match == "bytes" and isinstance(entry, dict) and entry.get("resize") == "fixed":
            return {key: value for key, value in entry.items() if key != "resize"}
        by_width = match in ("parameters", "flops") and isinstance(entry, str) and keeps_layer(entry)
        return {"resize": "width"} if by_width else entry

    entries = values.get("entries")
    if not isinstance(entries, dict):
        return values
    return values | {"entries": {name: resized(entry) for name, entry in entries.items()}}
