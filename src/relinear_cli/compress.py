"""``relinear compress``: from a pretrained model and a budget to a smaller one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from relinear_cli.fields import from_settings
from relinear_cli.options import (
    Exclude,
    PretrainedModel,
    Split,
    TextColumn,
    Tokenizer,
    corpus_of,
    load_model,
    load_model_tokenizer,
    prepare_process,
)


@from_settings(
    "compress",
    *("bits", "keep", "budget_of", "speed", "speed_for", "allow_slower", "menu", "tokens", "fisher", "heal_tokens"),
    *("heal", "evaluate"),
    batch="speed_batch",
)
def command(
    given: dict[str, Any],
    model: PretrainedModel,
    data: Annotated[
        list[str],
        typer.Option(
            help="Corpus to calibrate on: `stdlib`, a file or folder, or a Hub name; several times, to take as many "
            "tokens of each."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory of the result.")] = Path("runs/compress"),
    speed_table: Annotated[
        Path | None,
        typer.Option(help="A DIR/speed.json to go by, such as one of the machine the model is for; else measured."),
    ] = None,
    target: Annotated[list[str] | None, typer.Option(help="Pattern of layers that may be replaced.")] = None,
    exclude: Exclude = None,
    text_column: TextColumn = None,
    tokenizer: Tokenizer = None,
    split: Split = "train",
    plan: Annotated[Path | None, typer.Option(help="A plan to carry out, such as an edited DIR/plan.json.")] = None,
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Print the plan and stop.")] = False,
    frontier: Annotated[
        bool, typer.Option("--frontier", help="Print and draw the loss at many budgets, some measured, and stop.")
    ] = False,
    export: Annotated[
        str | None, typer.Option(help="`plain`: also DIR/plain, which loads without relinear; `gguf`: DIR/model.gguf.")
    ] = None,
    evaluate_on: Annotated[
        list[str] | None, typer.Option(help="Other data to judge the result on, given like --data; several times.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
) -> None:
    """Make a pretrained model smaller: measure its layers on text, decide what each becomes, fit them, save.

    Statistics are kept in DIR/calibration, so that another budget needs no second measurement. Killed and started
    again with the same arguments, it goes on from where it was. The model is saved in DIR/model.

    **Example:** `relinear compress models/smollm2 --bits 4.25 --data stdlib --out runs/compress`
    """
    from relinear.compress import CompressSettings, compress
    from relinear.compress.plan import read_layers
    from relinear.compress.run import proposal
    from relinear.compress.speed import SpeedTable
    from relinear.compress.work import check_directory
    from relinear.core.config import check_choice
    from relinear.data import iter_texts
    from relinear.data.corpora import whole_or_held_out
    from relinear_cli.errors import resumable
    from relinear_cli.progress import watch_compression

    settings = CompressSettings.load(given, "settings")
    corpora = {name: corpus_of(name, text_column) for name in data}
    others = {name: corpus_of(name, text_column) for name in evaluate_on or []}
    judged_on = {name: whole_or_held_out(text) for name, text in others.items()}
    _check_texts(data, judged_on, split)
    check_choice("--export", export or "plain", ["plain", "gguf"])
    check_directory(out)
    if plan is not None:
        read_layers(plan)
    table = None if speed_table is None else SpeedTable.load(speed_table)
    prepare_process(threads, models=[model], texts=[*corpora.values(), *others.values()])
    reader = load_model_tokenizer(model, tokenizer)
    loaded = load_model(model)
    with resumable("start the same command again"), watch_compression() as on_progress:
        report = compress(
            loaded,
            {name: iter_texts(text, split, conversations=True) for name, text in corpora.items()},
            tokenizer=reader,
            targets=target or "all-linear",
            exclude=exclude,
            settings=settings,
            plan_file=plan,
            plan_only=plan_only,
            frontier=frontier,
            speed_table=table,
            evaluate_on={name: iter_texts(text, judged_on[name], conversations=True) for name, text in others.items()},
            export=export,  # type: ignore[arg-type]  # checked by the function
            out_dir=out,
            on_progress=on_progress,
        )
    print(report)
    if plan_only or frontier:
        print(f"plan: {proposal(out, 'plan.json').resolve()}\nreport: {proposal(out, 'report.html').resolve()}")
    else:
        print(f"model: {(out / 'model').resolve()}\nreport: {(out / 'report.html').resolve()}")


def _check_texts(data: list[str], judged_on: dict[str, str], split: str) -> None:
    """Refuse a corpus that is given twice, and one that calibration sees and that is to judge the result."""
    if repeated := sorted({name for name in data if data.count(name) > 1}):
        raise ValueError(f"--data {repeated[0]} is given twice; of every corpus as many tokens are taken")
    if seen := [name for name in judged_on if name in data and judged_on[name] in ("all", split)]:
        raise ValueError(
            f"--evaluate-on {seen[0]} is the text of --data, and what calibration saw judges nothing. Name another: of "
            "--data the part behind what calibration takes is judged on in any case"
        )
