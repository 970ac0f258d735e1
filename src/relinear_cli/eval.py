"""``relinear eval``: measure perplexity and run tasks on a trained model."""

import json
from pathlib import Path
from typing import Any

import typer

from relinear_cli import options


def command(
    directory: str = typer.Argument(metavar="DIR", help="A run of `relinear train` or `distill`, or a saved model."),
    data: str | None = typer.Option(None, help="`stdlib`, a file or folder, or a Hub name; by default the run's."),
    text_column: options.TextColumn = None,
    tokenizer: options.Tokenizer = None,
    split: options.Split = "validation",
    tasks: str = typer.Option("perplexity", help="`perplexity`, `lambada`, tasks of lm-eval; with commas."),
    lambada: Path | None = typer.Option(None, help="JSON lines with a `text`, for the task lambada."),
    sequence_length: int | None = typer.Option(None, min=2, help="Window of perplexity, else the run's."),
    stride: int | None = typer.Option(None, min=1, help="Step of the window; by default its length."),
    max_tokens: int | None = typer.Option(None, min=1, help="Evaluate at most this many tokens."),
    limit: int | None = typer.Option(None, min=1, help="At most this many examples per task."),
    batch_size: int = typer.Option(8, min=1, max=2**20, help="Sequences in a forward pass."),
    as_json: options.AsJson = False,
) -> None:
    """Evaluate a model: perplexity on any text, LAMBADA, and the tasks of lm-eval.

    **Example:** `relinear eval runs/low-rank --data README.md --split all`
    """
    from relinear import evaluate
    from relinear.data import DataSettings, iter_texts, prepare_data

    names = _tasks(tasks, lambada)
    of_perplexity = {"sequence_length": sequence_length, "stride": stride, "max_tokens": max_tokens}
    if "perplexity" not in names:
        options.refuse(of_perplexity | {"data": data, "text_column": text_column}, "is about the task perplexity")
    elif names == ["perplexity"]:
        options.refuse({"limit": limit}, "counts examples of other tasks; --max-tokens limits perplexity")
    if data is None:
        options.refuse({"text_column": text_column}, "needs --data")
    folder, settings = _run_settings(directory)
    if "perplexity" in names and data is None and settings is None:
        raise ValueError(f"{directory} is not a run of relinear train, so it names no data to evaluate on; add --data")
    options.prepare_process(texts=[] if data is None else [DataSettings.load({"data": data}, "command line")])
    model_tokenizer = options.load_model_tokenizer(folder, tokenizer)
    model = options.load_model(folder, presets=False)

    results: dict[str, Any] = {}
    if "perplexity" in names:
        # By default evaluate on the run's validation blocks.
        as_run = data is None and split == "validation" and (sequence_length, stride, tokenizer) == (None, None, None)
        # The run's text is divided with the run's settings, so that nothing that it trained on is evaluated.
        values = dict(settings or {}) if data is None else {"data": data}
        values |= {"text_column": text_column} if text_column and not as_run else {}
        chosen = DataSettings.load(values, "command line")
        length = sequence_length or (settings or {}).get("sequence_length")
        arguments: Any = {"max_tokens": max_tokens, "batch_size": batch_size}
        if not as_run:
            arguments |= {"tokenizer": model_tokenizer, "sequence_length": length, "stride": stride}
        text: Any = prepare_data(chosen).validation if as_run else iter_texts(chosen, split)
        measured = evaluate.perplexity(model, text, **arguments)
        results["perplexity"] = {name: getattr(measured, name) for name in ("perplexity", "loss", "tokens")}
        results["perplexity"] |= {"data": chosen.data, "split": split}
    if lambada is not None and "lambada" in names:
        scored = evaluate.lambada(model, model_tokenizer, lambada, max_examples=limit, batch_size=batch_size)
        results["lambada"] = {"accuracy": scored.accuracy, "perplexity": scored.perplexity, "examples": scored.examples}
    harness_tasks = [name for name in names if name not in ("perplexity", "lambada")]
    if harness_tasks:
        results |= evaluate.lm_eval(model, model_tokenizer, harness_tasks, batch_size=batch_size, limit=limit)
    _print(results, as_json)


def _print(results: dict[str, Any], as_json: bool) -> None:
    """Print the figures of every task, one task per line or as JSON."""
    if as_json:
        # JSON has no NaN (lm-eval's standard error of one example) and no infinity, so they become null
        values = json.loads(json.dumps(results, default=str), parse_constant=lambda name: None)
        print(json.dumps(values, indent=2))
        return
    for task, figures in results.items():
        texts = [f"{key} {v:.4f}" if isinstance(v, float) else f"{key} {v}" for key, v in figures.items()]
        print(f"{task}: {', '.join(texts)}")


def _tasks(option: str, lambada: Path | None) -> list[str]:
    """Return the names of the tasks. Raises ValueError if there is none, or the text of LAMBADA is missing."""
    names = options.parse_names(option)
    if not names:
        raise ValueError("--tasks names no task; choose perplexity, lambada, or tasks of lm-eval")
    if lambada is not None and "lambada" not in names:
        raise ValueError("--lambada is the text of the task lambada: add --tasks lambada")
    if "lambada" in names and not (lambada and lambada.is_file()):
        raise ValueError(
            f"lambada needs --lambada FILE (JSON lines with a 'text'), got {lambada}; lambada_openai is lm-eval's"
        )
    return names


def _run_settings(directory: str) -> tuple[str, dict[str, Any] | None]:
    """Return the folder of the model, and the data settings of the run that it comes from (None for a bare model)."""
    from relinear.models import model_folder
    from relinear.system.files import damaged_file_errors, read_json

    path = Path(directory).expanduser()
    record = path / "run.json"
    if not record.is_file():
        folder = model_folder(directory)
        options.find_model(folder, presets=False)
        return folder, None
    with damaged_file_errors(record, "not a record of a training run", "of a comparison, give runs/ENTRY/seed-N in it"):
        settings = read_json(record)["settings"]["data"]
    if not (path / "model").is_dir():
        raise FileNotFoundError(f"{directory} has no model: the run has not ended, or save_model was false")
    return str(path / "model"), settings
