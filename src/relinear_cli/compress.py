"""``relinear compress``: compress a pretrained model to a budget."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from relinear_cli import options

_DATA = "Corpus to calibrate on: `stdlib`, a file or folder, or a Hub name; several times: equally many tokens of each."
Corpora = Annotated[list[str] | None, typer.Option(help=_DATA, show_default="stdlib")]


def command(
    model: options.PretrainedModel,
    data: Corpora = None,
    out: Path = typer.Option(Path("runs/compress"), help="Directory of the result."),
    size: str | None = typer.Option(None, help="Largest file size, in place of --bits: 90MB, or a share such as 0.3."),
    bits: float | None = typer.Option(
        None, help="Average bits per weight, embedding included.", show_default="4.5, where no budget is given"
    ),
    keep: float | None = typer.Option(None, help="Share of the parameters, by low rank, in place of --bits."),
    reader: Literal["relinear", "llama.cpp", "vllm"] | None = typer.Option(
        None, "--for", help="Program that will run the model; it decides types and file.", show_default="relinear"
    ),
    candidates: list[str] | None = typer.Option(
        None,
        "--candidates",
        help="Operators that a layer may become; may be repeated.",
        show_default="what the reader stores; pivoted_low_rank with --keep",
    ),
    target: list[str] | None = typer.Option(None, help="Pattern of layers to replace; by default all."),
    exclude: options.Exclude = None,
    text_column: options.TextColumn = None,
    tokenizer: options.Tokenizer = None,
    split: options.Split = "train",
    tokens: int | None = typer.Option(None, min=1, help="Tokens to calibrate on.", show_default="32768"),
    heal_tokens: int | None = typer.Option(
        None, min=0, help="Distillation tokens after compression; 0 turns it off.", show_default="0"
    ),
    plan: Path | None = typer.Option(None, exists=True, help="A plan to apply, such as an edited DIR/plan.json."),
    plan_only: bool = typer.Option(False, "--plan-only", help="Calibrate, print what layers would become, and stop."),
    evaluate_on: list[str] | None = typer.Option(
        None, help="Other data to evaluate the result on, given like --data; may be repeated."
    ),
    evaluate: bool | None = typer.Option(None, help="Compare the result with the original.", show_default="--evaluate"),
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    threads: options.Threads = None,
    overrides: options.Overrides = None,
) -> None:
    """Make a pretrained model smaller: measure its layers on text, decide what each becomes, fit them, save.

    Predictions are kept in DIR/calibration, so that planning another budget is quick. If it is killed, start the
    command again: it resumes. The model is saved in DIR/model; --for adds a file for its program.

    **Example:** `relinear compress models/smollm2 --for llama.cpp --size 90MB --data stdlib --out runs/compress`
    """
    from relinear.compression import CompressSettings
    from relinear.compression.requirements import compress_requirements
    from relinear.compression.run import Compression
    from relinear.surgery.separate_experts import separate_experts
    from relinear_cli.progress import watch
    from relinear_cli.terminal import print_requirements

    values = options.options_among(locals(), CompressSettings)
    settings = CompressSettings.load(options.chosen_settings(values, overrides), "command line")
    corpora, evaluation_corpora = _corpora(data or ["stdlib"], evaluate_on or [], split, text_column)
    options.prepare_process(
        threads,
        models=[model],
        texts=[text for text, _ in (*corpora.values(), *evaluation_corpora.values())],
        presets=False,
    )
    model_tokenizer = options.load_model_tokenizer(model, tokenizer)
    loaded = options.load_model(model, presets=False)
    with separate_experts(loaded):
        compression = Compression(
            loaded,
            settings,
            out,
            tokenizer=model_tokenizer,
            targets=target or "all-linear",
            exclude=exclude,
            plan_file=plan,
            overwrite=overwrite,
        )
        if dry_run or overwrite or compression.run_folder.read() is None:
            print_requirements(compress_requirements(loaded, compression.settings))
        if dry_run:
            return
        with watch(resumable=True) as on_progress:
            report = compression.run(_read(corpora), _read(evaluation_corpora), plan_only, on_progress)
    print(report)
    _print_paths(out, proposed=plan_only)


def _read(corpora: dict[str, tuple[Any, str]]) -> dict[str, Any]:
    """Return name -> texts of every corpus."""
    from relinear.data import iter_texts

    return {name: iter_texts(text, split, conversations=True) for name, (text, split) in corpora.items()}


def _corpora(data: list[str], evaluate_on: list[str], split: str, text_column: str | None) -> tuple[Any, Any]:
    """Return the corpora to calibrate on and those to evaluate on, each as name -> its settings and split.

    Raises:
        ValueError: if a corpus is given twice, or is used both to calibrate and to evaluate.
    """
    from relinear.data import DataSettings
    from relinear.data.corpora import evaluation_split

    corpora = {name: (DataSettings(data=name, text_column=text_column), split) for name in data}
    texts = {name: DataSettings(data=name, text_column=text_column) for name in evaluate_on}
    evaluation_corpora = {name: (text, evaluation_split(text)) for name, text in texts.items()}
    if repeated := sorted({name for name in data if data.count(name) > 1}):
        raise ValueError(f"--data {repeated[0]} is given twice; of every corpus as many tokens are taken")
    if seen := [name for name, (_, part) in evaluation_corpora.items() if name in data and part in ("all", split)]:
        raise ValueError(f"--evaluate-on {seen[0]} is the text of --data, which is evaluated anyway; name another")
    return corpora, evaluation_corpora


def _print_paths(out: Path, *, proposed: bool) -> None:
    from relinear.compression.run import proposal

    for label, name in (("plan", "plan.json") if proposed else ("model", "model"), ("report", "report.html")):
        print(f"{label}: {(proposal(out, name) if proposed else out / name).resolve()}")
