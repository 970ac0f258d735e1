"""``relinear compare``: operators side by side on one budget."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from relinear_cli.fields import from_settings
from relinear_cli.options import ShareWork, named_entries, prepare_process


@from_settings(
    "compare",
    *("train.model", "train.data.data", "train.data.text_column", "train.steps", "train.compile"),
    *("tokens", "seeds", "train.threads"),
    match="match.by",
)
def command(
    given: dict[str, Any],
    recipe: Annotated[str | None, typer.Option(help="A YAML file, or a name such as `quick`.")] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan; it takes no other settings.")] = None,
    operators: Annotated[
        list[str] | None,
        typer.Option("--operator", "-o", metavar="KIND:KEY=VALUE", help="An entry, or `dense`; repeat it."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory of the comparison.")] = Path("runs/compare"),
    tune: Annotated[bool, typer.Option("--tune", help="Give each entry its own learning rate.")] = False,
    share: ShareWork = False,
    parallel: Annotated[
        Literal["never", "auto"],
        typer.Option(help="`auto` trains runs of one architecture at once where it is faster."),
    ] = "never",
) -> None:
    """Train operators side by side on one corpus and budget; ends with a table and report.html.

    Killed and started again with the same arguments, it goes on where it was.

    **Example:** `relinear compare --recipe quick --out runs/demo`

    **Example:** `relinear compare -o dense -o low_rank:rank=48 -o hdpl:rank=16,blocks=4 --match parameters --steps 300`
    """
    from relinear.compare.recipe import apply_overrides, read_recipe
    from relinear_cli.progress import watch_comparison
    from relinear_cli.terminal import print_results

    if plan is not None and (recipe is not None or operators or tune or given):
        raise ValueError("--plan goes with --out, --share and --parallel alone: what it says was fixed beforehand")
    if plan is recipe is None and not operators:
        raise ValueError("nothing to compare: give --recipe, or --operator at least once; see relinear compare --help")
    values = {} if recipe is None else read_recipe(recipe)
    written: dict[str, Any] = {"entries": named_entries(operators)} if operators else {}
    if operators:  # the recipe's entries go, and with them what is to be like one of them
        for place, key in ((values, "reference"), (values.get("match"), "to")):
            if isinstance(place, dict) and isinstance(named := place.get(key), str) and named not in written["entries"]:
                del place[key]
    if tune and not values.get("tune"):  # else as the recipe tunes
        written["tune"] = True
    values = apply_overrides(values, written | given)

    from relinear.compare.report import write_report
    from relinear.compare.run import compare
    from relinear.compare.settings import CompareSettings, planned

    settings = CompareSettings.load(values, recipe or "settings") if plan is None else planned(plan)
    prepare_process()
    with watch_comparison() as on_event:
        results = compare(settings, out, shared=share, parallel=parallel, on_event=on_event)
    report = write_report(out)
    print_results(results)
    print(f"\nreport: {report.resolve()}")
