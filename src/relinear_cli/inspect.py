"""``relinear inspect``: print a model's layers, operators and sizes."""

import typer

from relinear_cli import options


def command(
    model: str = typer.Argument(help="A preset, or the directory of a saved model.", metavar="MODEL"),
    replace: options.Replace = None,
    layers: options.ReplaceLayers = None,
    overrides: list[str] | None = typer.Option(
        None, "--set", metavar="KEY=VALUE", help="A field of the preset's config."
    ),
    causality: bool = typer.Option(
        False, "--causality", help="Also run the model and check that no output sees a later token."
    ),
    as_json: options.AsJson = False,
) -> None:
    """Tabulate layers, operators, parameters and FLOPs per token; nothing is written.

    With --causality the exit code is 2 if an output depends on a later token, and the message says where.

    **Example:** `relinear inspect hdpl-67m --replace "q_proj=hdpl:rank=128,blocks=8"`
    """
    import json
    import shutil

    import relinear
    from relinear.settings.yaml_settings import parse_overrides

    mapping = options.operator_mapping(replace or [])
    if not mapping:
        options.refuse({"layers": layers}, "is for --replace; name the operators, too")
    loaded = options.load_model(model, parse_overrides(overrides or []), meta=not causality)
    if mapping:
        table = relinear.replace_(loaded, mapping, layers=options.parse_layers(layers))
    else:
        table = relinear.summary(loaded)
    report = relinear.check_causality(loaded) if causality else None
    if as_json:
        print(json.dumps(table.to_dict() | ({} if report is None else {"causality": report.to_dict()}), indent=2))
    else:
        width = shutil.get_terminal_size((1_000_000, 0)).columns  # unlimited for a pipe
        print(table.within(width) if report is None else f"{table.within(width)}\n{report}")
