"""``relinear compare``: operators side by side on one budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from relinear_cli.options import (
    Corpus,
    RecipeFields,
    RepeatableThreads,
    ShareWork,
    TextColumn,
    named_entries,
    parse_integers,
    prepare_process,
    set_if_given,
)

__all__ = ["command"]


def command(
    recipe: Annotated[str | None, typer.Option(help="A YAML file, or a name such as `quick`.")] = None,
    operators: Annotated[
        list[str] | None,
        typer.Option("--operator", "-o", metavar="KIND:KEY=VALUE", help="An entry, or `dense`; repeat it."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory of the comparison.")] = Path("runs/compare"),
    data: Corpus = None,
    text_column: TextColumn = None,
    model: Annotated[str | None, typer.Option(help="Preset, or directory of a model.")] = None,
    steps: Annotated[int | None, typer.Option(help="Budget in optimiser steps.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Budget in training tokens.")] = None,
    match: Annotated[str | None, typer.Option(help="`width`, `parameters` or `flops`.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, such as 0,1,2.")] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Give each entry its own learning rate.")] = False,
    threads: RepeatableThreads = None,
    share: ShareWork = False,
    overrides: RecipeFields = None,
) -> None:
    """Train operators side by side on one corpus and budget; ends with a table and report.html.

    Killed and started again with the same arguments, it goes on where it was.

    **Example:** `relinear compare --recipe quick --out runs/demo`

    **Example:** `relinear compare -o dense -o low_rank:rank=48 -o hdpl:rank=16,blocks=4 --match parameters --steps 300`
    """
    from relinear.compare.recipe import apply_overrides, parse_overrides, read_recipe
    from relinear_cli.errors import resumable
    from relinear_cli.progress import watch_comparison
    from relinear_cli.table import print_results

    changes: dict[str, Any] = set_if_given(
        {
            "entries": named_entries(operators) if operators else None,
            "train.data.data": data,
            "train.data.text_column": text_column,
            "train.model": model,
            "train.steps": steps,
            "tokens": tokens,
            "match.by": match,
            "seeds": parse_integers("--seeds", seeds),
            "tune": True if tune else None,
            "train.threads": threads,
        }
    )
    if recipe is None and not operators:
        raise ValueError("nothing to compare: give --recipe, or --operator at least once; see relinear compare --help")
    values = {} if recipe is None else read_recipe(recipe)
    if tune and values.get("tune"):
        changes.pop("tune")  # how the recipe tunes
    values = apply_overrides(values, changes | parse_overrides(overrides or []))

    from relinear.compare.report import write_report
    from relinear.compare.run import compare
    from relinear.compare.settings import CompareSettings

    settings = CompareSettings.load(values, recipe or "settings")
    prepare_process()
    with resumable("start the same command again"), watch_comparison() as on_event:
        results = compare(settings, out, shared=share, on_event=on_event)
    report = write_report(out)
    print_results(results)
    print(f"\nreport: {report.resolve()}")
