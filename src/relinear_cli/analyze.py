"""``relinear analyze``: measure and plot what a trained model's operators do on text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from relinear_cli import options

if TYPE_CHECKING:
    from relinear.analysis.analyses import HeldOutText


#: rows of a table in the terminal
_ROWS = 12


def command(
    model: options.PretrainedModel,
    data: str = typer.Option("stdlib", help="Text to analyze: `stdlib`, a file or folder, a Hub name, or a task."),
    out: Path = typer.Option(Path("runs/analyze"), help="Directory for JSON and figures."),
    only: str | None = typer.Option(None, help="Analyses, such as gates,top_tokens; by default all that apply."),
    control: str | None = typer.Option(None, help="A second model with the same tokenizer, for comparison."),
    tokenizer: options.Tokenizer = None,
    text_column: options.TextColumn = None,
    sequences: int = typer.Option(64, min=1, help="Sequences to read."),
    length: int = typer.Option(64, min=2, help="Tokens in each."),
    overwrite: options.Overwrite = False,
) -> None:
    """Measure and plot what a model's operators do on real text: the analyses that apply to it.

    **Example:** `relinear analyze runs/ccl/model --control runs/static/model --data books/ --out runs/look`
    """
    from relinear.analysis.analyses import HeldOutText, analysis
    from relinear.data import DataSettings
    from relinear.pages.blocks import Table
    from relinear_cli.report import write_report_of
    from relinear_cli.terminal import print_table

    names = options.parse_names(only)
    for name in names:
        analysis(name)
    text = HeldOutText(DataSettings(data=data, text_column=text_column), sequences, length)
    options.prepare_process(models=[model, *([control] if control else [])], texts=[text.data])
    results = analyze_saved(model, text, out, names, control, tokenizer, overwrite=overwrite)
    for name, numbers in results.items():
        for block in analysis(name).blocks(numbers):
            if isinstance(block, Table):
                print_table(block, name.replace("_", " "), _ROWS)
    print(f"\nnumbers and figures: {out.resolve()}")
    print(f"report: {write_report_of([out])}")


def analyze_saved(
    model: str,
    text: HeldOutText,
    out: Path,
    names: list[str],
    control: str | None = None,
    tokenizer: str | None = None,
    loaded: Any = None,
    overwrite: bool = False,
) -> dict[str, dict[str, Any]]:
    """Run analyses of a saved model.

    Args:
        names: of analyses; if empty, all that apply.
        loaded: the model, if it is loaded already.
        overwrite: rename analyses of something else in ``out``.

    Raises:
        ValueError: if ``out`` has analyses of something else, or other programs' files under their names; for a missing
            or wrong tokenizer; for a ``length`` that a model cannot read; and as ``analyze`` and ``held_out_tokens``.
    """
    import dataclasses

    from relinear.analysis.analyses import Subject, analyze, held_out_tokens, known_analyses
    from relinear.analysis.report import RECORD
    from relinear.hf.vocabulary import check_length_fits, check_tokenizer_fits, max_positions
    from relinear.system.run_folder import RunFolder
    from relinear_cli.progress import watch

    settings: dict[str, Any] = {"model": model, "control": control, "data": text.data.data, "only": names}
    settings |= {"sequences": text.sequences, "length": text.length}
    folder = RunFolder(
        out,
        task="analyze",
        record=RECORD,
        names=[f"{name}.json" for name in known_analyses()],
        earlier_records={RECORD: ("model", "control", "data", "sequences")},
        settings_of=lambda record: record.get("settings", {"only": names} | {key: record.get(key) for key in settings}),
    )
    folder.check(settings, overwrite=overwrite)
    if text.data.tokenizer in ("symbols", "none"):  # a task determines the length of its samples
        text = dataclasses.replace(text, length=text.data.sequence_length)
    reads_text = text.data.tokenizer != "none"
    model_tokenizer = options.load_model_tokenizer(model, tokenizer, separates=False) if reads_text else None
    loaded = options.load_model(model) if loaded is None else loaded
    control_model = None if control is None else options.load_model(control)
    if text.fewer:
        text = dataclasses.replace(text, length=min(text.length, max_positions(loaded) or text.length))
    for analyzed in [loaded] if control_model is None else [loaded, control_model]:
        if reads_text:
            check_tokenizer_fits(model_tokenizer, analyzed)
        check_length_fits(text.length, analyzed)
    tokens = held_out_tokens(text, model_tokenizer)
    other = "control" if control is None or _name(control) == _name(model) else _name(control)
    run = next((folder for folder in (Path(model), Path(model).parent) if (folder / "run.json").is_file()), None)
    subject = Subject(loaded, tokens, model_tokenizer, control_model, _name(model), other, text.data, run)
    with folder.open(settings, overwrite=overwrite), watch() as on_progress:
        facts = {"data": text.data.data, "sequences": len(tokens), "length": text.length}
        folder.write(model=model, control=control, **facts)
        return analyze(subject, out, names, on_progress, folder.take)


def _name(path: str) -> str:
    """Return a short name of the model: the last folder of its path that is not common to all runs."""
    parts = [p for p in Path(path).parts if p not in ("model", "runs", ".", "..", "/") and not p.startswith("seed")]
    return parts[-1] if parts else path
