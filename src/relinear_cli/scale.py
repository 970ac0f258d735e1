"""``relinear scale``: loss against compute over sizes, and where operators cross dense models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relinear_cli.options import Corpus, RecipeFields, ShareWork, parse_integers, prepare_process, set_if_given

__all__ = ["command"]


def command(
    recipe: Annotated[str, typer.Argument(help="A YAML file with `sizes`, or a name such as `scale`.")],
    out: Annotated[Path, typer.Option(help="Directory of the whole.")] = Path("runs/scale"),
    data: Corpus = None,
    sizes: Annotated[str | None, typer.Option(help="Widths in place of the recipe's, such as 32,48,64,96.")] = None,
    share: ShareWork = False,
    overrides: RecipeFields = None,
) -> None:
    """Compare at several widths, and fit loss against training FLOPs and training time.

    A narrower and a shallower dense model are always among the entries. Killed and started again with the same
    arguments, it goes on where it was.

    **Example:** `relinear scale scale --out runs/scale`
    """
    from relinear.compare.recipe import apply_overrides, parse_overrides, read_recipe
    from relinear_cli.errors import resumable
    from relinear_cli.progress import watch_comparison
    from relinear_cli.table import print_scale

    widths = parse_integers("--sizes", sizes)
    changes = set_if_given({"train.data.data": data, "sizes.widths": widths})
    values = apply_overrides(read_recipe(recipe), changes | parse_overrides(overrides or []))

    from relinear.compare.report import write_scale_plot
    from relinear.compare.scaling import scale
    from relinear.compare.settings import CompareSettings

    settings = CompareSettings.load(values, recipe)
    prepare_process()
    with resumable("start the same command again"), watch_comparison() as on_event:
        results = scale(settings, out, shared=share, on_event=on_event)
    plot = write_scale_plot(out)
    print_scale(results)
    print(f"\nplot: {plot.resolve()}")
