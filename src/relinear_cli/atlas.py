"""``relinear atlas``: what every operator would cost in the place of every layer of a pretrained model."""

from pathlib import Path
from typing import Annotated, Any

import typer

from relinear_cli import options
from relinear_cli.fields import from_settings


@from_settings("atlas", "shares", "steps", "tokens")
def command(
    given: dict[str, Any],
    model: options.PretrainedModel,
    data: Annotated[str, typer.Option(help="Corpus to measure on: `stdlib`, a file or folder, or a Hub name.")],
    out: Annotated[Path, typer.Option(help="Directory of the result.")] = Path("runs/atlas"),
    operators: Annotated[
        list[str] | None,
        typer.Option("--operator", "-o", metavar="KIND:KEY=VALUE", help="May be repeated; by default all that fit."),
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Decoder layers, such as 0,4-11; by default all.")] = None,
    text_column: options.TextColumn = None,
    tokenizer: options.Tokenizer = None,
    split: options.Split = "train",
    threads: options.Threads = None,
) -> None:
    """Map what could stand in for each layer of a pretrained model, and at what price in nats a token.

    Every operator is fitted to every layer at several sizes, under the moments of its inputs and gradients. Ends with
    atlas.json and a page: cost against parameters by type of layer, and the cheapest operator by depth. The model is
    left as it is. Killed and started again with the same arguments, it goes on where it was.

    **Example:** `relinear atlas models/smollm2 --data stdlib --layers 0,15,29 --out runs/atlas`
    """
    from relinear.compress.atlas import AtlasSettings, atlas, write_atlas
    from relinear.core.operator import OperatorConfig
    from relinear.data import iter_texts
    from relinear_cli.progress import watch_compression

    named = {"operators": operators, "layers": options.parse_layers(layers)}
    settings = AtlasSettings.load(given | {key: value for key, value in named.items() if value}, "settings")
    for text in operators or ():
        OperatorConfig.read(text)
    corpus = options.corpus_of(data, text_column)
    options.prepare_process(threads, models=[model], texts=[corpus])
    reader = options.load_model_tokenizer(model, tokenizer)
    loaded = options.load_model(model)
    with watch_compression() as on_progress:
        texts = iter_texts(corpus, split, conversations=True)
        record = atlas(loaded, texts, tokenizer=reader, settings=settings, out_dir=out, on_progress=on_progress)
    for path in write_atlas(record, out):
        print(f"written: {path.resolve()}")
