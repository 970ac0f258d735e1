"""``relinear explore``: show a model's units on text in the browser, and change them."""

from pathlib import Path
from typing import Any

import typer

from relinear_cli import options


def command(
    model: str = typer.Argument(help="Directory of a saved model.", metavar="DIR"),
    second: str | None = typer.Argument(
        None, help="A second one, shown side by side.", metavar="DIR2", show_default=False
    ),
    data: str = typer.Option("stdlib", help="Texts: `stdlib`, a file or folder, or a Hub name."),
    text_column: options.TextColumn = None,
    sequences: int = typer.Option(256, min=1, help="Texts to read."),
    length: int = typer.Option(64, min=2, help="Tokens in each."),
    hook_points: str | None = typer.Option(
        None,
        "--hook-points",
        help="Where to look, such as basis_gate,q_proj; by default every latent and gate.",
    ),
    tokenizer: options.Tokenizer = None,
    index: Path | None = typer.Option(None, help="Where the index is kept; by default DIR/explore."),
    static: Path | None = typer.Option(None, help="Write one file that can be mailed, and serve nothing."),
    effects: int = typer.Option(100, min=0, help="Units in that file whose effect is measured."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Rename an existing file of that name."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; another one lets others run the model."),
    port: int = typer.Option(0, min=0, max=65535, help="0 takes a free one."),
) -> None:
    """Show a model's gates, modulators or latents on text in the browser, and change them.

    For every unit the page shows the texts that move it most, its histogram and its effect on the next token, beside
    those of a random unit. Type a text, and it is coloured by the unit. Move the slider to change the unit and see what
    the model says then; the page prints the relinear.activations.intervene code that repeats it. A model without
    operators shows the outputs of its linear layers. The index of the texts is made once and kept.

    **Example:** `relinear explore runs/ccl/model --data books/`

    **Example:** `relinear explore runs/ccl/model runs/static/model --static compared.html`
    """
    from relinear.data import DataSettings
    from relinear.explore.page import static_page
    from relinear.pages.page import check_page, write_html
    from relinear_cli.progress import watch

    if static is not None:
        check_page(static, overwrite)
    text = DataSettings(data=data, text_column=text_column)
    options.prepare_process(models=[model, *([second] if second else [])], texts=[text], presets=False)
    load_options: Any = {"data": text, "sequences": sequences, "length": length}
    load_options["patterns"] = options.parse_names(hook_points)
    folders = [index] if second is None else [index and index / one for one in ("first", "second")]
    named = zip(filter(None, [model, second]), folders, strict=True)
    models = [_load(name, tokenizer, folder, **load_options) for name, folder in named]
    if static is not None:
        with watch() as on_progress:
            path = write_html(static, static_page(models, effects, on_progress))
        print(f"written: {path.resolve()}, {path.stat().st_size / 1e6:.1f} MB")
        return
    _serve(models, host, port)


def _serve(models: list[Any], host: str, port: int) -> None:
    """Print the address and serve until Ctrl-C."""
    from relinear.explore.server import make_server

    server = make_server(models, host, port)
    address = f"[{host}]" if ":" in host else host
    print(f"http://{address}:{server.server_address[1]}/  (Ctrl-C ends it)", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def _load(name: str, tokenizer: str | None, folder: Path | None, **load_options: Any) -> Any:
    """Return the model that the user named, with its tokenizer and its index."""
    from relinear.explore.explored_model import load_explored_model
    from relinear.models import model_folder
    from relinear_cli.progress import watch

    name = model_folder(name)
    loaded = options.load_model(name, presets=False)
    model_tokenizer = options.load_model_tokenizer(name, tokenizer, separates=False)
    with watch(name) as on_progress:
        return load_explored_model(
            name, loaded, model_tokenizer, folder=folder, on_progress=on_progress, **load_options
        )
