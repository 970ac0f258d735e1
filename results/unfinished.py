"""What a comparison has come to that was cut off: its tuning runs, which are whole runs on fewer tokens, and its final
runs, ended or not.

    python results/unfinished.py runs/NAME REFERENCE [runs/LATER ...] > results/FOLDER/runs.json
    python results/unfinished.py results/FOLDER/runs.json runs/LATER ... > new.json
    python results/unfinished.py results/FOLDER/runs.json --figure results/FOLDER/budgets

The second adds later runs, final ones and those on the tuning's seed, to a record whose own runs are gone. Of a
comparison with several budgets those that ended are in ``budgets``, the last with the entries that had all their runs,
and all else is of the last; the third draws the gaps of entries that have all. Final runs of later ones, with the same
data and budget, join its own; where both have a run the later one stands. Gaps are to REFERENCE: between the best
tuning runs of two entries, between final runs that ended, and, of a run that did not end, between the training losses
of both on the same batches, over the last tenth of its steps. Beside them stands what counting n-grams comes to on as
many tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np

from relinear.compare import figures
from relinear.compare.gaps import gap
from relinear.compare.results import count_ngrams
from relinear.compare.series import series_row
from relinear.compare.settings import CompareSettings
from relinear.data import prepare_data
from relinear.pages.figures import colors
from relinear.pages.matplotlib_figures import save_panels
from relinear.system.files import read_json
from relinear.training import TrainSettings
from relinear.training.fitting import BLOCK_LOSSES


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows that a run has logged."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def told(folder: Path) -> dict[str, Any]:
    """A run in numbers."""
    run = read_json(folder / "run.json")
    rows = metrics(folder)
    result = run.get("result") or {}
    return {
        "status": run["status"],
        "seed": run["settings"]["seed"],
        "learning_rate": run["settings"]["learning_rate"],
        "initializer_range": run["settings"]["model_overrides"].get("initializer_range"),
        "warmup": TrainSettings.load(run["settings"], is_record=True).warmup,
        "steps": run["settings"]["steps"],
        "steps_taken": rows[-1]["step"] if rows else 0,
        "validation_loss": result.get("validation_loss"),
        "evaluations": [[row["step"], row["validation_loss"]] for row in rows if "validation_loss" in row],
        "parameters": result.get("parameters"),
        "block_losses": blocks_of(folder),
        "device": ", ".join(run["machine"]["gpus"]) or run["machine"]["processor"],
    }


def blocks_of(folder: Path) -> list[float] | None:
    """A run's losses by block of the held-out text; None where it did not end."""
    path = folder / BLOCK_LOSSES
    return [round(float(loss), 5) for loss in np.load(path, allow_pickle=False)] if path.is_file() else None


def check_joins(folder: Path, other: Path, *, same_entry: bool) -> None:
    """Exit unless a run of the same budget can stand beside another: of the same entry, with all that was chosen."""
    keys = ["data", "dtype"]
    if same_entry:
        keys += ["steps", "batch_size", "accumulation", "learning_rate", "model", "model_overrides"]
        keys += ["schedule", "warmup_steps", "warmup_ratio"]
    ours, theirs = (TrainSettings.upgraded(read_json(one / "run.json")["settings"]) for one in (folder, other))
    unlike = [f"{key} is {ours[key]}, there {theirs[key]}" for key in keys if ours[key] != theirs[key]]
    if unlike:
        sys.exit(f"{folder} cannot stand beside {other}: {'; '.join(unlike)}")


def tokens_of(place: Path) -> int:
    """The budget of a comparison."""
    return read_json(place / "run.json")["recipe"]["tokens"] or int(place.name)


def check_budget(found: dict[str, Any], place: Path) -> None:
    """Exit unless a later comparison's largest budget is the record's."""
    if tokens_of(place) != found["tokens"]:
        sys.exit(f"{place} is of {tokens_of(place):,} tokens, the record of {found['tokens']:,}")


def held_against(folders: list[Path], references: list[Path]) -> dict[str, Any]:
    """The gap between runs that ended, with its interval."""
    losses = [[np.load(folder / BLOCK_LOSSES, allow_pickle=False) for folder in one] for one in (folders, references)]
    return gap(*losses)


def while_training(folder: Path, reference: Path) -> dict[str, Any] | None:
    """Mean difference of the training losses on the same batches over the last tenth of a run's steps so far."""
    ours, theirs = ({row["step"]: row["loss"] for row in metrics(at) if "loss" in row} for at in (folder, reference))
    if not ours:
        return None
    last = max(ours)
    shared = [step for step in ours if step in theirs and step > 0.9 * last]
    if not shared:
        return None
    return {"from": min(shared), "to": max(shared), "mean": float(np.mean([ours[s] - theirs[s] for s in shared]))}


def best_trial(folders: list[Path]) -> Path | None:
    """The tuning run with the lowest loss. Whole runs that held a rate against its neighbours are no match for it."""
    short = [folder for folder in folders if not folder.name.startswith("full-length-")]
    ended = [folder for folder in short if told(folder)["validation_loss"] is not None]
    return min(ended, key=lambda folder: told(folder)["validation_loss"], default=None)


def tuning_of(place: Path, known: Container[str]) -> dict[str, list[Path]]:
    """The tuning runs of a comparison, by entry, of entries that are not known."""
    entries = [at for at in sorted((place / "tuning").glob("*")) if at.is_dir() and at.name not in known]
    return {at.name: sorted(run.parent for run in at.glob("*/run.json")) for at in entries}


def counted(recipe: dict[str, Any], tokens: int) -> dict[str, Any]:
    """What counting n-grams comes to on as many tokens."""
    train = {key: value for key, value in recipe["train"].items() if key != "steps"}
    settings = CompareSettings.load(recipe | {"train": train, "tokens": None, "budgets": [tokens]})
    return count_ngrams(settings, prepare_data(settings.train.data))


def places_of(out_dir: Path) -> list[Path]:
    """The comparisons of its budgets, smallest first; itself where it has one."""
    several = out_dir / "budgets"
    return sorted(several.iterdir(), key=lambda place: int(place.name)) if several.is_dir() else [out_dir]


def place_of(out_dir: Path) -> Path:
    """The comparison of the largest budget that has been begun."""
    return places_of(out_dir)[-1]


def main(out_dir: Path, reference: str, later: list[Path]) -> dict[str, Any]:
    """All of it."""
    place = place_of(out_dir)
    started = read_json(out_dir / "run.json")
    found: dict[str, Any] = {key: started[key] for key in ("recipe", "command", "machine")} | {"reference": reference}
    found["tokens"] = tokens_of(place)
    found["budgets"] = [
        series_row("tokens", int(at.name), "budgets", read_json(at / "results.json"))
        for at in places_of(out_dir)[:-1]
        if (at / "results.json").is_file()
    ]
    places = [place, *map(place_of, later)]
    trials: dict[str, list[Path]] = {}
    for at in places:
        trials |= tuning_of(at, trials)  # an entry's own tuning stands before a later one of it
    best = {name: at for name, folders in trials.items() if (at := best_trial(folders)) is not None}
    counts = {"tuning": metrics(best[reference])[-1]["tokens"]} if reference in best else {}
    found["ngrams"] = {part: counted(found["recipe"], n) for part, n in (counts | {"runs": found["tokens"]}).items()}
    runs: dict[str, dict[str, Path]] = {}
    for at in places:
        check_budget(found, at)
        for run in sorted((at / "runs").glob("*/*/run.json")):
            name, seed = run.parents[1].name, run.parent
            ours = runs.setdefault(name, {})
            others = ours or next((seeds for seeds in runs.values() if seeds), {})
            for other in list(others.values())[:1]:
                check_joins(seed, other, same_entry=bool(ours))
            ours[seed.name] = seed
    found["later"] = [read_json(one / "run.json")["command"] for one in later]
    found["tuning"] = {name: [told(folder) for folder in folders] for name, folders in trials.items()}
    found["tuning_gaps"] = {
        name: held_against([at], [best[reference]])
        for name, at in best.items()
        # comparisons may have tuned with runs of unlike lengths
        if reference in best and name != reference and told(at)["steps"] == told(best[reference])["steps"]
    }
    found["runs"] = {name: {seed: told(at) for seed, at in seeds.items()} for name, seeds in runs.items()}
    found["gaps"], found["training_gaps"] = {}, {}
    for name, seeds in runs.items():
        if name == reference:
            continue
        pairs = [(at, runs[reference][seed]) for seed, at in seeds.items() if seed in runs[reference]]
        ended = [pair for pair in pairs if all(told(at)["validation_loss"] is not None for at in pair)]
        if ended:
            found["gaps"][name] = held_against(*map(list, zip(*ended, strict=True)))
        cut = [while_training(ours, theirs) for ours, theirs in pairs if told(ours)["validation_loss"] is None]
        if any(cut):
            found["training_gaps"][name] = [one for one in cut if one]
    found["budgets"].append(last_budget(found))
    return found


def last_budget(found: dict[str, Any]) -> dict[str, Any]:
    """The largest budget, cut off or not, as others are told, with the entries that had all their runs."""
    entries = []
    for name, runs in found["runs"].items():
        losses = [run["validation_loss"] for run in runs.values()]
        if len(losses) == len(found["recipe"]["seeds"]) and None not in losses:
            chosen = {key: next(iter(runs.values()))[key] for key in ("learning_rate", "initializer_range")}
            statistic = {"mean": float(np.mean(losses)), "values": losses}
            gap_to = found["gaps"].get(name)
            entries.append({"name": name, "validation_loss": statistic, "gap": gap_to, "tuning": None} | chosen)
    return {"tokens": found["tokens"], "ngram": found["ngrams"]["runs"], "entries": entries}


def draw(found: dict[str, Any], stem: str) -> None:
    """The gaps by budget of the entries that have one at each, as STEM.png and STEM.svg."""
    rows = found["budgets"]
    whole = set.intersection(*({entry["name"] for entry in row["entries"] if entry["gap"]} for row in rows))
    entries = [entry for entry in rows[0]["entries"] if entry["name"] in whole]
    palette = colors([entry["name"] for entry in entries])
    save_panels(figures.series(entries, palette, rows, "tokens", found["reference"]), stem)


def added(found: dict[str, Any], later: list[Path]) -> dict[str, Any]:
    """A record with the runs of later comparisons in it.

    Final runs, tuning runs of new entries and, of entries NAME-..., runs on the tuning's seed.
    """
    reference = found["runs"][found["reference"]]
    tuning_seed = (found["recipe"].get("tune") or {}).get("seed")
    for one in later:
        command = read_json(one / "run.json")["command"]
        check_budget(found, place_of(one))
        found["later"] = [*(known for known in found["later"] if known != command), command]
        new = tuning_of(place_of(one), found["tuning"])
        found["tuning"] |= {name: [told(folder) for folder in folders] for name, folders in new.items()}
        for run in sorted((place_of(one) / "runs").glob("*/*/run.json")):
            name, row = run.parents[1].name, told(run.parent)
            if row["seed"] == tuning_seed:
                tried = found["tuning"][max((own for own in found["tuning"] if name.startswith(f"{own}-")), key=len)]
                keys = ("learning_rate", "initializer_range", "warmup")
                tried[:] = [one for one in tried if [one[key] for key in keys] != [row[key] for key in keys]] + [row]
                continue
            ours = found["runs"].setdefault(name, {})
            ours[run.parent.name] = row
            shared = sorted(ours.keys() & reference.keys())
            pairs = [(ours[seed]["block_losses"], reference[seed]["block_losses"]) for seed in shared]
            ended = [(np.asarray(mine), np.asarray(theirs)) for mine, theirs in pairs if mine and theirs]
            if ended:
                found["gaps"][name] = gap(*map(list, zip(*ended, strict=True)))
            if len(ended) == len(ours):
                found["training_gaps"].pop(name, None)
    if found.get("budgets"):
        found["budgets"][-1] = last_budget(found)
    return found


if __name__ == "__main__":
    first, *others = sys.argv[1:]
    if others[:1] == ["--figure"]:
        draw(read_json(Path(first)), others[1])
        sys.exit()
    if Path(first).is_file():
        result = added(read_json(Path(first)), [Path(one) for one in others])
    else:
        result = main(Path(first), others[0], [Path(one) for one in others[1:]])
    print(json.dumps(result, indent=1))
