"""``relinear distill``: fit operators to layers of a pretrained model."""

from pathlib import Path
from typing import Any

import typer

from relinear_cli import options


def command(
    model: options.PretrainedModel,
    replace: list[str] = typer.Option(
        ..., "--replace", "-r", metavar="PATTERN=KIND:KEY=VALUE", help="Layers, and the operator that replaces them."
    ),
    data: str = typer.Option(help="Corpus: `stdlib`, a file or folder, or a Hub name."),
    out: Path = typer.Option(Path("runs/distill"), help="Directory of the result."),
    layers: str | None = typer.Option(None, help="Decoder layers, such as 0,4-11; by default all."),
    exclude: options.Exclude = None,
    text_column: options.TextColumn = None,
    tokenizer: options.Tokenizer = None,
    split: options.Split = "train",
    tokens: int | None = typer.Option(None, min=1, help="Tokens to fit on.", show_default="65536"),
    learning_rate: float | None = typer.Option(None, help="Peak learning rate (Adam).", show_default="0.01"),
    seed: int | None = typer.Option(None, help="Seed of parameters and token order.", show_default="0"),
    threads: options.Threads = None,
    overrides: options.Overrides = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Replace layers of a pretrained model by operators fitted to what the layers do on a corpus.

    Decoder layers are fitted one after another, each with the earlier replacements active. If it is
    killed, start the command again: it resumes after the last finished layer. The model is saved in DIR/model.

    **Example:** `relinear distill models/smollm2 -r q_proj=rotor --layers 12 --data books --out runs/layer12`
    """
    from relinear.data import DataSettings, iter_texts
    from relinear.distill import DistillSettings, distill_
    from relinear_cli.progress import watch
    from relinear_cli.report import write_report_of

    values = options.options_among(locals(), DistillSettings)
    settings = DistillSettings.load(options.chosen_settings(values, overrides), "command line")
    mapping = options.operator_mapping(replace)
    arguments: Any = {"layers": options.parse_layers(layers), "exclude": exclude, "settings": settings}
    text = DataSettings(data=data, text_column=text_column)
    options.prepare_process(threads, models=[model], texts=[text], presets=False)
    arguments |= {"tokenizer": options.load_model_tokenizer(model, tokenizer), "overwrite": overwrite, "out_dir": out}
    loaded = options.load_model(model, presets=False)
    with watch(resumable=True) as on_progress:
        texts = iter_texts(text, split, conversations=True)
        report = distill_(loaded, mapping, texts, **arguments, on_progress=on_progress)
    print(report)
    print(f"model: {(out / 'model').resolve()}")
    print(f"report: {write_report_of([out])}")
