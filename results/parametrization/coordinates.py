"""The coordinate check of every operator at its defaults: `relinear.testing.check_coordinates`, entry by entry.

    python results/parametrization/coordinates.py results/parametrization [NAME ...]

Leaves NAME/coordinates.json and NAME/coordinates.png, and overview.png of all that are there; prints a table.
"""

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from widths import at_heads

from relinear.data import prepare_data
from relinear.pages.figures import Axis, Guide, Panel, Series
from relinear.pages.matplotlib_figures import save_panels
from relinear.system.files import read_json, write_json
from relinear.system.machine import command_line, describe_machine
from relinear.testing.coordinates import KINDS, check_coordinates
from relinear.training.optim import build_optimizer
from relinear.training.run import build_model
from relinear.training.settings import TrainSettings
from relinear_cli.options import parse_operators

FILE = "coordinates.json"
PARAMETRIZATIONS = ("standard", "mup")
#: the largest over the smallest activation of all widths, up to which it counts as flat
FLAT = 2.0
#: colours of the first and the last step
EARLY, LATE = (0xC9, 0xD9, 0x4B), (0x44, 0x0A, 0x54)
WIDTHS = (64, 128, 256, 512)
#: operators, attachments, and what is different in the model
ENTRIES = {
    "dense": ("", "", {}),
    "dense-tied": ("", "", {"tie_word_embeddings": True}),
    "dense-gpt2": ("", "", {"model": "gpt2-ccl-64"}),
    "low_rank": ("low_rank", "", {}),
    "low_rank-16": ("low_rank:rank=16", "", {}),
    "pivoted_low_rank": ("pivoted_low_rank", "", {}),
    "pivoted_low_rank-16": ("pivoted_low_rank:rank=16", "", {}),
    "block_hadamard": ("block_hadamard", "", {}),
    "monarch": ("monarch", "", {}),
    "hdpl": ("hdpl", "", {}),
    "ccl": ("ccl", "context_manager", {}),
    "transponder": ("transponder", "", {}),
    "path_transponder": ("", "path_transponder", {}),
    "output_gate": ("output_gate", "", {}),
    "sdpa_gate": ("", "sdpa_gate", {}),
    "rotor": ("rotor", "", {}),
    "rotor-kronecker": ("rotor:depth=0,width=4,terms=kronecker", "", {}),
    "rotor-multivector": ("rotor:depth=0,width=4,terms=multivector", "", {}),
}


def settings_of(operator: str, attachment: str, changes: dict) -> TrainSettings:
    """Settings of one entry."""
    changes = dict(changes)
    return TrainSettings.load(
        {
            "model": changes.pop("model", "tiny"),
            "model_overrides": {"num_hidden_layers": 2, **changes},
            "operators": parse_operators([operator]) if operator else {},
            "attachments": [attachment] if attachment else [],
            "learning_rate": 4e-3,
            "batch_size": 4,
            "parametrization_base_width": WIDTHS[0],
            "data": {"data": "stdlib", "sequence_length": 32},
        }
    )


def checked(
    settings: TrainSettings, widths: tuple[int, ...], steps: int = 6, seeds: tuple[int, ...] = (0, 1, 2)
) -> dict:
    """The record of one entry: activations at all widths, in both parametrisations."""
    settings = settings.replace(dtype="float32", device="cpu")
    data = prepare_data(settings.data)
    ids = torch.stack([data.train[index]["input_ids"] for index in range(settings.batch_size)])
    found: dict[str, Any] = {}
    for name in PARAMETRIZATIONS:

        def make_model(width: int, seed: int, name: str = name) -> tuple[Any, torch.optim.Optimizer]:
            sized = at_heads(settings, width).replace(parametrization=name, seed=seed)
            model = build_model(sized, data.vocab_size)
            return model, build_optimizer(model, sized)

        kinds = check_coordinates(make_model, widths, ids, steps=steps, seeds=seeds)
        found[name] = {kind: dataclasses.asdict(value) | {"spread": value.ratio} for kind, value in kinds.items()}
    flat = {
        name: all(kind["spread"] is not None and kind["spread"] <= FLAT for kind in kinds.values())
        for name, kinds in found.items()
    }
    return {
        "model": settings.model,
        "operators": settings.operators,
        "attachments": list(settings.attachments),
        "widths": list(widths),
        "base_width": settings.parametrization_base_width,
        "learning_rate": settings.learning_rate,
        "batch": list(ids.shape),
        "steps": steps,
        "seeds": list(seeds),
        "parametrizations": found,
        "flat": flat,
    }


def write_plot(found: dict, out: Path) -> None:
    """coordinates.png and .svg in ``out``: a row a parametrisation, a panel per kind, a line per step."""
    ticks = {float(width): f"{width}" for width in found["widths"]}
    panels = []
    for name in PARAMETRIZATIONS:
        for kind in KINDS:
            values, shown = found["parametrizations"][name][kind], []
            for step in range(found["steps"] + 1):
                share = step / found["steps"]
                mixed = (round(a + share * (b - a)) for a, b in zip(EARLY, LATE, strict=True))
                shade = "#" + bytes(mixed).hex()
                heights = [math.nan if scale[step] is None else scale[step] for scale in values["scale"]]
                shown.append(Series(name=f"step {step}", color=shade, x=found["widths"], y=heights, size=5))
            factor = "beyond numbers" if values["spread"] is None else f"{values['spread']:.2f}"
            axes = Axis(title="width", log=True, ticks=ticks), Axis(title="root mean square", log=True)
            panels.append(Panel(shown, *axes, title=f"{name}: {kind} (factor {factor})"))
    save_panels(panels, out / "coordinates")


def overview(folder: Path) -> None:
    """The table of all entries that are there, and a figure: the stream after the last step against the width."""
    found = {name: read_json(folder / name / FILE) for name in ENTRIES if (folder / name / FILE).is_file()}
    print("\n| | residual stream | attention | MLP | logits | flat |\n| --- | --- | --- | --- | --- | --- |")
    for name, values in found.items():
        cells = []
        for kind in KINDS:
            spreads = [values["parametrizations"][which][kind]["spread"] for which in ("standard", "mup")]
            cells.append(" / ".join("–" if spread is None else f"{spread:.3g}" for spread in spreads))
        told = " / ".join("yes" if values["flat"][which] else "no" for which in ("standard", "mup"))
        print(f"| `{name}` | {' | '.join(cells)} | {told} |")
    panels = []
    for name, values in found.items():
        widths, shown = values["widths"], []
        for which, color in (("standard", "#D55E00"), ("mup", "#0072B2")):
            scale = values["parametrizations"][which][KINDS[0]]["scale"]
            shown.append(Series(name=which, color=color, x=widths, y=[s[-1] / scale[0][-1] for s in scale], size=5))
        bottom = Axis(title="width", log=True, ticks={float(width): f"{width}" for width in widths})
        panels.append(Panel(shown, bottom, Axis(log=True), [Guide(y=0.5), Guide(y=2)], title=name))
    save_panels(panels, folder / "overview", "residual stream relative to width 64, after 6 steps")
    shrink(folder / "overview.png")


def shrink(path: Path) -> None:
    """A picture of lines in few colours, a fourth of its size."""
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


def main() -> None:
    """Check the entries that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.names or [name for name in ENTRIES if not (options.folder / name / FILE).is_file()]:
        found = checked(settings_of(*ENTRIES[name]), WIDTHS)
        found |= {"command": command_line(), "machine": describe_machine()}
        (options.folder / name).mkdir(parents=True, exist_ok=True)
        write_json(options.folder / name / FILE, found)
        print(f"{name}: flat {found['flat']}", flush=True)
    for name in ENTRIES:
        if (options.folder / name / FILE).is_file():
            write_plot(read_json(options.folder / name / FILE), options.folder / name)
            shrink(options.folder / name / "coordinates.png")
    overview(options.folder)


if __name__ == "__main__":
    main()
