"""``relinear scale``: loss against compute over sizes, and where operators cross dense models."""

from pathlib import Path
from typing import Annotated, Any

import typer

from relinear_cli.fields import from_settings
from relinear_cli.options import ShareWork, prepare_process


@from_settings("compare", "train.data.data", sizes="sizes.widths")
def command(
    given: dict[str, Any],
    recipe: Annotated[str, typer.Argument(help="A YAML file with `sizes`, or a name such as `scale`.")],
    out: Annotated[Path, typer.Option(help="Directory of the whole.")] = Path("runs/scale"),
    share: ShareWork = False,
) -> None:
    """Compare at several widths, and fit loss against training FLOPs and training time.

    A narrower and a shallower dense model are always among the entries. Killed and started again with the same
    arguments, it goes on where it was.

    **Example:** `relinear scale scale --out runs/scale`
    """
    from relinear.compare.recipe import apply_overrides, read_recipe
    from relinear_cli.progress import watch_comparison
    from relinear_cli.terminal import print_scale

    values = apply_overrides(read_recipe(recipe), given)

    from relinear.compare.scaling import scale
    from relinear.compare.settings import CompareSettings
    from relinear_cli.report import write_report_of

    settings = CompareSettings.load(values, recipe)
    prepare_process()
    with watch_comparison() as on_event:
        results = scale(settings, out, shared=share, on_event=on_event)
    print_scale(results)
    print(f"\nreport: {write_report_of([out]).resolve()}")
