"""``relinear sweep``: search settings of a run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from relinear_cli.fields import from_settings
from relinear_cli.options import Replace, ShareWork, TrainingRecipe, parse_operators, prepare_process


@from_settings("train", "data.data", "steps")
def command(
    given: dict[str, Any],
    parameters: Annotated[
        list[str], typer.Option("--param", "-p", metavar="NAME=LOW..HIGH[:log]", help="What to search; or NAME=A,B,C.")
    ],
    recipe: TrainingRecipe = None,
    out: Annotated[Path, typer.Option(help="Directory of the sweep.")] = Path("runs/sweep"),
    replace: Replace = None,
    trials: Annotated[int, typer.Option(help="Trials, those of earlier calls included.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
    share: ShareWork = False,
) -> None:
    """Search learning rates or any other settings with optuna; ends with a table, best first.

    Killed and started again with the same arguments, it goes on where it was; a larger --trials adds to it.

    **Example:** `relinear sweep -r low_rank -p learning_rate=1e-4..1e-2:log -p operators.all-linear.rank=8,16`
    """
    from relinear.compare.recipe import apply_overrides, find_recipe, read_yaml
    from relinear_cli.progress import watch_trials

    values: dict[str, Any] = {"save_model": False, "model": "tiny"}
    values |= {} if recipe is None else read_yaml(find_recipe(recipe))
    values = apply_overrides(values, ({"operators": parse_operators(replace)} if replace else {}) | given)

    from relinear.compare.sweep import parse_parameter, sweep
    from relinear.train import TrainSettings

    searched = [parse_parameter(text) for text in parameters]
    settings = TrainSettings.load(values, recipe or "settings")
    prepare_process()
    with watch_trials(trials) as on_progress:
        rows = sweep(settings, searched, out, trials=trials, seed=seed, shared=share, on_progress=on_progress)
    names = [parameter.name for parameter in searched]
    print("  ".join(["validation loss", "perplexity", *names, "folder"]))
    for row in rows:
        loss = "       diverged" if row["validation_loss"] is None else f"{row['validation_loss']:15.4f}"
        perplexity = f"{'–':>10}" if row["perplexity"] is None else f"{row['perplexity']:10.3f}"
        chosen = [f"{_short(row['values'][name]):>{len(name)}}" for name in names]
        print("  ".join([loss, perplexity, *chosen, row["folder"]]))
    best = rows[0]["values"]
    print("\nbest: " + " ".join(f"--set {name}={_short(value)}" for name, value in best.items()))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
