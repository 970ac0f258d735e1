"""``relinear check-coordinates``: whether a learning rate can be carried from one width to another."""

from pathlib import Path
from typing import Annotated

import typer

from relinear_cli.options import Attach, PresetFields, Replace, parse_numbers, parse_operators, prepare_process


def command(
    model: Annotated[str, typer.Argument(help="A preset.", metavar="MODEL")],
    replace: Replace = None,
    attach: Attach = None,
    widths: Annotated[str, typer.Option(help="Widths of the model, each a whole number of its heads.")] = (
        "64,128,256,512"
    ),
    base_width: Annotated[int | None, typer.Option(help="Where mup is the standard; the smallest by default.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 6,
    seeds: Annotated[str, typer.Option(help="Seeds of the weights.")] = "0,1,2",
    learning_rate: Annotated[float, typer.Option(help="Of every step.")] = 4e-3,
    data: Annotated[str, typer.Option(help="`stdlib`, a file or folder, or a Hub name.")] = "stdlib",
    tokenizer: Annotated[str, typer.Option(help="`bytes`, `bpe:8000`, or an AutoTokenizer name.")] = "bytes",
    sequences: Annotated[int, typer.Option(min=1, help="Sequences in the batch.")] = 4,
    length: Annotated[int, typer.Option(min=2, help="Tokens in each.")] = 32,
    out: Annotated[Path, typer.Option(help="Directory for JSON, figure and page.")] = Path("runs/coordinates"),
    overrides: PresetFields = None,
) -> None:
    """Plot how large activations are against the model's width, over the first steps.

    Both parametrisations are trained at every width, with heads of one size. Where activations are flat, within a
    factor of 2, a learning rate can be carried from one width to another. See docs/training.md.

    **Example:** `relinear check-coordinates tiny --replace all-linear=hdpl --set num_hidden_layers=2`
    """
    from relinear.compare.coordinates import FILE, check_coordinates, coordinates_text, write_plot
    from relinear.compare.recipe import parse_overrides
    from relinear.system.files import list_written, write_json
    from relinear.system.machine import circumstances
    from relinear.system.written import check_ours
    from relinear.train.settings import TrainSettings
    from relinear_cli.report import write_report_of

    check_ours(out, "coordinates")
    sizes = parse_numbers("--widths", widths) or []
    drawn = parse_numbers("--seeds", seeds) or []
    settings = TrainSettings.load(
        {
            "model": model,
            "model_overrides": parse_overrides(overrides or []),
            "operators": parse_operators(replace or []),
            "attachments": attach or [],
            "learning_rate": learning_rate,
            "batch_size": sequences,
            "parametrization_base_width": min(sizes) if base_width is None else base_width,
            "data": {"data": data, "tokenizer": tokenizer, "sequence_length": length},
        }
    )
    prepare_process()
    found = check_coordinates(settings, sizes, steps=steps, seeds=drawn, on_progress=_told) | circumstances()
    write_json(out / FILE, found)
    write_plot(found, out)
    list_written(out, "coordinates")
    print(coordinates_text(found))
    print(f"\nnumbers and figure: {out.resolve()}")
    print(f"report: {write_report_of([out])}")


def _told(done: int, total: int) -> None:
    print(f"\r{done} of {total} models", end="\n" if done == total else "")
