"""``relinear bench``: time operators against dense layers on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from relinear_cli import options

if TYPE_CHECKING:
    from relinear.pages.blocks import Section


_PASSES = "<forward | step | prefill | decode>,..."  # with spaces, at which help wraps it
_INFERENCE = "inference after relinear.for_inference_: layers keep what they compute from their weights"
_SHAPES = "2048->2048, 512->2048, 512->1376"


def command(
    out: Path = typer.Option(Path("runs/bench"), help="Directory for bench.json and bench.png."),
    operators: list[str] | None = typer.Option(
        None, "--operator", "-o", metavar="KIND:KEY=VALUE", help="Operators to time; by default all."
    ),
    model: str | None = typer.Option(
        None, "--model", "-m", help="A preset: time whole models, eager and in fp32 by default."
    ),
    passes: str | None = typer.Option(
        None, metavar=_PASSES, help="What to time; by default all, with --model the last three."
    ),
    sequence_length: int | None = typer.Option(
        None, min=2, help="Tokens per sequence, with --model.", show_default="512"
    ),
    batch_size: int | None = typer.Option(
        None, min=1, help="Sequences per training step, with --model.", show_default="1"
    ),
    inference_batches: str | None = typer.Option(
        None, help="Sequences at once in prefill and decode, with --model.", show_default="1,8"
    ),
    shapes: list[str] | None = typer.Option(None, help="Sizes of layers, as IN->OUT or INxOUT.", show_default=_SHAPES),
    tokens: str | None = typer.Option(None, help="Tokens per input.", show_default="1,64,4096"),
    dtypes: str | None = typer.Option(None, metavar="<fp32|bf16>,...", help="Data types.", show_default="fp32,bf16"),
    modes: str | None = typer.Option(
        None, metavar="<eager|compiled>,...", help="How layers run.", show_default="eager,compiled"
    ),
    rounds: int | None = typer.Option(
        None, min=1, metavar="N", help="How often each layer is timed.", show_default="11"
    ),
    repeats: int | None = typer.Option(
        None, min=1, metavar="N", help="Runs of the whole bench, to see how figures vary.", show_default="1"
    ),
    threads: options.Threads = None,
    overrides: options.Overrides = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Time layers against dense nn.Linear in one process; figures are ratios of time, below 1 is faster.

    A layer with a wrong output is reported and not timed. Inference uses relinear.for_inference_.

    With --model it times training, prefill and decoding of a stock model, with and without each --operator. An operator
    may name its layers: PATTERN=KIND:KEY=VALUE.

    **Example:** `relinear bench --operator hdpl:rank=128 --shapes 2048x2048 --tokens 1,4096 --dtypes fp32`

    **Example:** `relinear bench --model llama-60m --operator transponder --passes step`
    """
    from relinear.pages.blocks import Table
    from relinear.pages.page import write_page
    from relinear_cli.progress import watch
    from relinear_cli.terminal import print_table

    lists = {"shapes": ",".join(shapes or ()), "tokens": tokens, "passes": passes, "dtypes": dtypes, "modes": modes}
    lists["inference_batches"] = inference_batches
    values: dict[str, Any] = {name: options.parse_names(text) for name, text in lists.items()}
    values |= {"operators": operators, "rounds": rounds, "repeats": repeats, "threads": threads}
    values |= {"sequence_length": sequence_length, "batch_size": batch_size}
    chosen = options.chosen_settings(values, overrides)
    with watch() as on_progress:
        running = {"out_dir": out, "overwrite": overwrite, "on_progress": on_progress}
        if model is None:
            section, remarks = _bench_layers(chosen, running)
        else:
            section, remarks = _bench_models(chosen | {"preset": model}, operators or [], running)
    print_table(next(block for block in section.blocks if isinstance(block, Table)))
    print("\n".join(remarks))
    print(f"written: {out.resolve()}, {write_page(out / 'report.html', [section])}")


def _bench_layers(chosen: dict[str, Any], running: dict[str, Any]) -> tuple[Section, list[str]]:
    """Return the page's section about single layers, and remarks for the terminal."""
    from relinear.bench.report import layers_section
    from relinear.bench.run import BenchSettings, run_bench

    of_models = {name: chosen.get(name) for name in ("sequence_length", "batch_size", "inference_batches")}
    options.refuse(of_models, "is about whole models: add --model, or take --tokens")
    settings = BenchSettings.load(chosen, "command line")
    result = run_bench(settings, **running)
    failed = {
        f"not timed: {row['contender']}, {row['in_features']} -> {row['out_features']}, {row['dtype']}: {row['error']}"
        for row in result["rows"]
        if row["error"]
    }
    remarks = [f"forward: {_INFERENCE}"] if "forward" in settings.passes else []
    return layers_section(result), [*sorted(failed), *remarks]


def _bench_models(chosen: dict[str, Any], operators: list[str], running: dict[str, Any]) -> tuple[Section, list[str]]:
    """Return the page's section about whole models, and remarks for the terminal."""
    from relinear.bench.models import ModelBenchSettings, run_model_bench
    from relinear.bench.report import models_section

    of_layers = {name: chosen.get(name) for name in ("shapes", "tokens", "repeats")}
    options.refuse(of_layers, "is about single layers; with --model use --sequence-length and --batch-size")
    settings = ModelBenchSettings.load({k: v for k, v in chosen.items() if k != "operators"}, "command line")
    if not operators:
        raise ValueError("--model needs at least one --operator to compare with the stock model")
    variants = {text: options.operator_mapping([text]) for text in operators}
    result = run_model_bench(settings, variants, **running)
    inference = [f"prefill and decode: {_INFERENCE}"] if set(settings.passes) - {"step"} else []
    return models_section(result), [*inference, "speed is relative to the stock model, above 1 is faster"]
