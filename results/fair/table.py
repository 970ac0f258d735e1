"""What the fair comparisons came to: python results/fair/table.py runs/fair results/fair/runs.json

Also while they go on: entries with all seeds count. ``--short DIR`` has the short runs of warm-ups, ``--figure STEM``
draws the forest plot.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from relinear.compare.gaps import gap
from relinear.system.files import read_json, write_json
from relinear.training.fitting import BLOCK_LOSSES

WARMUPS = (0.25, 0.5, 0.75)


def tried(folder: Path) -> list[dict[str, Any]]:
    """The short runs in ``folder``, the best first; those that diverged have no loss."""
    rows = []
    for path in sorted(folder.glob("*/run.json")):
        run = read_json(path)
        settings, result = run["settings"], run.get("result") or {}
        row = {"learning_rate": settings["learning_rate"], "warmup_ratio": settings["warmup_ratio"]}
        row["initializer_range"] = settings["model_overrides"]["initializer_range"]
        rows.append(row | {"validation_loss": result.get("validation_loss")})
    return sorted(rows, key=lambda row: row["validation_loss"] or np.inf)


def edges(rows: list[dict[str, Any]], warmup: float) -> list[str]:
    """Names of the settings whose best value is at an end of what was tried."""
    found = []
    for name, short in (("learning_rate", "rate"), ("initializer_range", "init")):
        values = {row[name] for row in rows}
        if len(values) > 1 and rows[0][name] in (min(values), max(values)):
            found.append(short)
    return [*found, *(["warm-up"] if warmup in (WARMUPS[0], WARMUPS[-1]) else [])]


def entry(place: Path, short: Path | None, name: str, seeds: list[int]) -> dict[str, Any] | None:
    """One entry in numbers; None where not all seeds ended."""
    folders = [place / "runs" / name / f"seed-{seed}" for seed in seeds]
    runs = [read_json(folder / "run.json") if (folder / BLOCK_LOSSES).is_file() else {} for folder in folders]
    if any(run.get("status") != "done" for run in runs):
        return None
    settings, result = runs[0]["settings"], runs[0]["result"]
    blocks = [np.load(folder / BLOCK_LOSSES, allow_pickle=False) for folder in folders]
    rows = tried(place / "tuning" / name)
    warmed = [] if short is None else tried(short / "warmup" / name)
    tokens = settings["steps"] * settings["batch_size"] * settings["data"]["sequence_length"]
    return {
        "operators": settings["operators"],
        "width": settings["model_overrides"]["hidden_size"],
        "parameters": result["parameters"],
        "flops_per_token": result["flops_per_token"],
        "learning_rate": settings["learning_rate"],
        "initializer_range": settings["model_overrides"]["initializer_range"],
        "warmup_ratio": settings["warmup_ratio"],
        "edges": edges(rows, settings["warmup_ratio"]) if rows else None,
        "validation_losses": [run["result"]["validation_loss"] for run in runs],
        "seconds": [tokens / run["result"]["tokens_per_second"] for run in runs],
        "short_runs": rows,
        "short_runs_of_warmup": warmed,
        "block_losses": [[round(float(loss), 4) for loss in each] for each in blocks],
    }


def record(place: Path, short: Path | None) -> dict[str, Any]:
    """What ``place`` holds of a comparison, its gaps to every dense model among them."""
    run = read_json(place / "run.json")
    recipe = run["recipe"]
    found = {name: entry(place, short, name, recipe["seeds"]) for name in recipe["entries"]}
    ended = {name: one for name, one in found.items() if one is not None}
    blocks = {name: [np.asarray(each) for each in one["block_losses"]] for name, one in ended.items()}
    for name, one in ended.items():
        dense = [other for other in ended if other.startswith("dense") and other != name]
        one["gaps"] = {other: gap(blocks[name], blocks[other]) for other in dense}
    speed = place / "speed.json"
    return {
        "recipe": recipe,
        "command": run["command"].replace(str(place), f"runs/{place.name}"),
        "machine": run["machine"],
        "entries": ended,
        "not_ended": [name for name, one in found.items() if one is None],
        "speed": read_json(speed) if speed.is_file() else None,
    }


def rows(found: dict[str, Any], reference: str) -> list[tuple[str, dict[str, Any], dict[str, Any] | None]]:
    """Name, entry and its gap, the best first."""
    listed = [(name, one, one["gaps"].get(reference)) for name, one in found["entries"].items()]
    return sorted(listed, key=lambda row: np.mean(row[1]["validation_losses"]))


def table(found: dict[str, Any], reference: str) -> str:
    """The tables of the page."""
    lines = [
        f"| entry | parameters | FLOPs | seconds | loss | less {reference} |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, one, away in rows(found, reference):
        cells = [f"`{name}`", f"{one['parameters']:,}", f"{one['flops_per_token']:,}", f"{min(one['seconds']):.0f}"]
        cells.append(f"{np.mean(one['validation_losses']):.3f}")
        cells.append("" if away is None else f"{away['mean']:+.3f} [{away['low']:+.3f}, {away['high']:+.3f}]")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| entry | rate | init | warm-up | at an edge |", "| --- | --- | --- | --- | --- |"]
    for name, one, _ in rows(found, reference):
        told = "–" if one["edges"] is None else ", ".join(one["edges"]) or "none"
        values = (one[key] for key in ("learning_rate", "initializer_range", "warmup_ratio"))
        lines.append(f"| `{name}` | {' | '.join(f'{value:g}' for value in values)} | {told} |")
    return "\n".join(lines)


def draw(found: dict[str, Any], reference: str, stem: Path) -> None:
    """The forest plot: gaps with their intervals, the best above; dense models are hollow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows(found, reference) if row[2] is not None][::-1]
    figure, axes = pyplot.subplots(figsize=(7, 0.28 * len(shown) + 1.2), layout="constrained")
    for place, (name, _, away) in enumerate(shown):
        face = "white" if name.startswith("dense") else "#0072B2"
        axes.plot([away["low"], away["high"]], [place, place], color="#0072B2")
        axes.plot(away["mean"], place, "o", color="#0072B2", markerfacecolor=face)
    axes.axvline(0, color="#7F7F7F", linewidth=1)
    axes.set_yticks(range(len(shown)), [name for name, *_ in shown])
    axes.set_xlabel(f"loss less {reference}'s, nats per byte (left is better), 95 %")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(stem.with_suffix(".png"), dpi=120)


def main() -> None:
    """Write the record, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("place", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--short", type=Path)
    parser.add_argument("--reference", default="dense-shallow")
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    found = json.loads(json.dumps(record(given.place, given.short)))
    write_json(given.out, found)
    print(table(found, given.reference))
    print("not ended:", ", ".join(found["not_ended"]) or "none")
    if given.figure:
        draw(found, given.reference, given.figure)


if __name__ == "__main__":
    main()
