"""A comparison at several budgets: every entry trained to each with a schedule of its own, and how the gaps move.

A prefix of a longer run is no shorter run: its learning rate has not come down. Every budget is a comparison of its
own, in ``budgets/TOKENS/``; what is tuned at one is handed on to the next.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from relinear.compare.results import tuning_notes
from relinear.compare.settings import CompareSettings, shortened

BUDGETS = "budgets"


def chosen_by(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return what tuning has found for every entry in the results of comparisons, the later ones last."""
    chosen: dict[str, dict[str, float]] = {}
    for results in found:
        for entry in results["entries"]:
            chosen.setdefault(entry["name"], {}).update(_choice(entry))
    return chosen


def over_budgets(recipe: CompareSettings, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the results of the largest budget, with ``budgets``: what each of them came to.

    Args:
        recipe: with ``budgets``.
        found: the results of the comparison at each.
    """
    rows = [
        budget_row(tokens, f"{BUDGETS}/{tokens}", results)
        for tokens, results in zip(recipe.budgets or (), found, strict=True)
    ]
    return {**found[-1], "name": recipe.name, BUDGETS: rows, "notes": found[-1]["notes"] + _notes(recipe, rows)}


def at_budget(recipe: CompareSettings, index: int, chosen: Mapping[str, Mapping[str, float]]) -> CompareSettings:
    """Return the comparison at one budget.

    Args:
        recipe: with ``budgets``.
        index: of the budget.
        chosen: what smaller budgets have found, as ``with_choices`` takes it.
    """
    budgets = recipe.budgets or ()
    share = budgets[index] / budgets[-1]
    values = recipe.model_dump(exclude_unset=True)
    values |= {"budgets": None, "tokens": budgets[index], "name": f"{recipe.name} at {budgets[index]:,} tokens"}
    values["train"] = shortened(values.get("train", {}), share)
    values["entries"] = {
        name: entry | {"set": shortened(entry.get("set", {}), share)} for name, entry in values["entries"].items()
    }
    if index < len(budgets) - 1:
        values["speed"] = {"seconds": 0}  # the same at every budget
    if recipe.tune is not None and recipe.tune.at == "smallest" and index:
        values["entries"] = with_choices(values["entries"], chosen)
        checked = index == 1 or recipe.tune.check_full_length
        values["tune"] = recipe.tune.model_dump() | {"check_full_length": True} if checked else None
    return CompareSettings.load(values, f"budget of {budgets[index]:,} tokens")


def with_choices(
    entries: Mapping[str, dict[str, Any]], chosen: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, Any]]:
    """Entries with the ``learning_rate`` and, where they were tuned, the initialisation and the warm-up of each."""
    found = {}
    for name, entry in entries.items():
        choice = chosen[name]
        found[name] = entry | {"learning_rate": choice["learning_rate"]}
        change: dict[str, float | None] = {}
        if "initializer_range" in choice:
            # by its dotted name: the overrides that all entries share stay as they are
            change["model_overrides.initializer_range"] = choice["initializer_range"]
        if "warmup_ratio" in choice:
            change |= {"warmup_ratio": choice["warmup_ratio"], "warmup_steps": None}
        if change:
            found[name] |= {"set": entry.get("set", {}) | change}
    return found


def _choice(entry: Mapping[str, Any]) -> dict[str, float]:
    choice = {"learning_rate": entry["learning_rate"]}
    tuned = entry["tuning"] or {}
    return choice | {key: tuned[key] for key in ("initializer_range", "warmup_ratio") if key in tuned}


def budget_row(tokens: int, folder: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the results of a whole tell of one budget: ``results`` are its own, in ``folder``."""
    kept = ("name", "learning_rate", "tuning", "validation_loss", "gap")
    entries = []
    for entry in results["entries"]:
        runs = [{key: run[key] for key in ("seed", "steps", "tokens_per_second")} for run in entry["runs"]]
        overrides = entry["settings"]["model_overrides"]
        spread = {"initializer_range": overrides.get("initializer_range")}
        warmup = {"warmup_ratio": entry["settings"].get("warmup_ratio")}
        entries.append({key: entry[key] for key in kept} | spread | warmup | {"runs": runs})
    return {"tokens": tokens, "folder": folder, "ngram": results["ngram"], "entries": entries}


def _notes(recipe: CompareSettings, rows: list[dict[str, Any]]) -> list[str]:
    budgets = recipe.budgets or ()
    notes = [
        f"Every entry was trained to each of {len(budgets)} budgets with a complete schedule; the table is of the last."
    ]
    if recipe.tune is not None and len(budgets) > 1:
        at = {
            "smallest": "at the smallest budget, and held against their neighbours in whole runs at "
            + ("each after it" if recipe.tune.check_full_length else "the next"),
            "each": "at each budget",
        }
        notes.append(f"Learning rates were tuned {at[recipe.tune.at]}.")
        kept = {"initialisation": recipe.tune.initializer_range, "warm-up": recipe.tune.warmup_ratio}
        tuned = [what for what, grid in kept.items() if grid is not None]
        if tuned and recipe.tune.at == "smallest":
            notes.append(f"The {' and the '.join(tuned)} of an entry: the smallest budget's best throughout.")
    # of the last budget the table itself tells
    for row in rows[:-1]:
        notes += [f"At {row['tokens']:,} tokens: {note}" for note in tuning_notes(row["entries"])]
    return notes
