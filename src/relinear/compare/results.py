"""What a comparison came to, as JSON: statistics over seeds, and the sentences that say what was measured."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from relinear.compare.folder import precision
from relinear.compare.gaps import too_small
from relinear.compare.plan import Planned, match_target
from relinear.compare.settings import CompareSettings
from relinear.core.config import Config
from relinear.train.settings import TrainSettings


def _statistic(values: list[float]) -> dict[str, Any]:
    """Mean and sample standard deviation (None for a single value)."""
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "spread": spread, "values": values}


def entry_result(
    planned: Planned, settings: TrainSettings, tuning: Any, runs: list[dict[str, Any]], speed: dict[str, Any] | None
) -> dict[str, Any]:
    """Return an entry of ``results.json``: what it is, how it was tuned, and what its runs (one a seed) came to.

    Args:
        planned: the entry at its size.
        settings: of its final runs, with what tuning chose.
        tuning: what it tried.
        runs: what ``train`` returned for every seed.
        speed: what was measured.
    """
    kept = ("seed", "validation_loss", "perplexity", "initial_perplexity", "steps", "tokens_per_second")
    short = [
        {key: run[key] for key in (*kept, "peak_memory_bytes", "aux", "block_losses")}
        | {"curve": _curve(run["curve"])}
        | ({"stacked": run["stacked"]["runs"]} if run.get("stacked") else {})
        for run in runs
    ]
    mapping = planned.settings.mapping
    stated = [f"{pattern}: {_stated(config) if config else 'left dense'}" for pattern, config in mapping.items()]
    stated += [_stated(config) for config in planned.settings.attached]
    return {
        "name": planned.name,
        "operators": "; ".join(stated) or "dense",
        "settings": settings.model_dump(mode="json"),
        "parameters": planned.size.parameters,
        "flops_per_token": planned.size.flops,
        "deviation": planned.deviation,
        "learning_rate": settings.learning_rate,
        "tuning": tuning,
        "validation_loss": _statistic([run["validation_loss"] for run in runs]),
        "perplexity": _statistic([run["perplexity"] for run in runs]),
        "initial_perplexity": _statistic([run["initial_perplexity"] for run in runs]),
        "peak_memory_bytes": max(run["peak_memory_bytes"] for run in runs),
        "speed": speed,
        "runs": short,
    }


def _stated(config: Config) -> str:
    """A setting with its defaults, which matter to a reader as much as what was changed."""
    values = {key: value for key, value in config.to_dict().items() if key != "kind" and value is not None}
    return f"{config.kind}({', '.join(f'{key}={value}' for key, value in values.items())})"


def _curve(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One point a step: training loss, validation loss, or both."""
    points: dict[int, dict[str, Any]] = {}
    for row in rows:
        point = points.setdefault(row["step"], {"step": row["step"], "tokens": row["tokens"]})
        point |= {key: row[key] for key in ("loss", "validation_loss") if key in row}
    return [points[step] for step in sorted(points)]


def comparison_result(
    recipe: CompareSettings,
    data: Any,
    planned: list[Planned],
    entries: list[dict[str, Any]],
    counted: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """``results.json`` but for when, where and by which command it was made: entries, and what a reader must know.

    ``counted`` is the n-gram line, from ``count_ngrams``.
    """
    settings = planned[0].settings
    per_step = settings.tokens_per_step
    counts = data.description["splits"]["train"]
    passes = settings.steps * per_step / counts["tokens"]
    other = [
        f"{p.name} for {p.settings.steps:,} of {p.settings.tokens_per_step:,}"
        for p in planned
        if (p.settings.steps, p.settings.tokens_per_step) != (settings.steps, per_step)
    ]
    budget = (
        f"Every entry was trained for {settings.steps:,} steps of {per_step:,} tokens ({settings.steps * per_step:,} "
        f"tokens, {passes:.2g} passes over the {counts['tokens']:,} training tokens of {settings.data.data}), on "
        f"{len(recipe.seeds)} seed{'s' if len(recipe.seeds) > 1 else ''}, in {precision(settings)}."
    )
    budget += f" Other steps: {', '.join(other)}." if other else ""
    return {
        "name": recipe.name,
        "description": recipe.description,
        "budget": budget,
        "match": _match_text(recipe, planned),
        "notes": _notes(recipe, entries) + gap_notes(recipe, entries) + _counting_notes(counted, entries),
        "reference": recipe.reference,
        "ngram": counted,
        "data": data.description,
        "entries": entries,
    }


def _match_text(recipe: CompareSettings, planned: list[Planned]) -> dict[str, Any]:
    match = recipe.match
    target, reference = match_target(recipe, planned)
    if target is None:
        return {"by": match.by, "target": None, "text": "All models have the same width; sizes differ."}
    unit = "parameters" if match.by == "parameters" else "FLOPs a token"
    source = f", the size of {reference}" if reference else ""
    fixed = [name for name, entry in recipe.entries.items() if entry.how == "fixed" and name != reference]
    keep = "keeps its size" if len(fixed) == 1 else "keep their sizes"
    left = f" {' and '.join(fixed)} {keep}." if fixed else ""
    text = f"Sizes are matched to {target:,} {unit}{source}, within {match.tolerance:.1%}.{left}"
    return {"by": match.by, "target": target, "tolerance": match.tolerance, "text": text}


def _notes(recipe: CompareSettings, entries: list[dict[str, Any]]) -> list[str]:
    notes = []
    if len(recipe.seeds) > 1:
        notes.append(f"± is the sample standard deviation over {len(recipe.seeds)} seeds.")
    else:
        notes.append("One seed: differences as small as the spread between seeds mean nothing.")
    speeds = [entry["speed"] for entry in entries if entry["speed"]]
    if speeds:
        notes.append(
            f"Speeds are tokens per second as a ratio to {speeds[0]['reference']}, all models timed in turn in one "
            f"process after training (median of {speeds[0]['rounds']} rounds)."
        )
    notes.append("FLOPs are of the forward pass, without attention scores and norms; memory is of the process.")
    together = [entry["name"] for entry in entries if any("stacked" in run for run in entry["runs"])]
    if together:
        notes.append(f"Seeds were trained at once, and memory is that of all of them, for {', '.join(together)}.")
    notes += tuning_notes(entries)
    tuned = recipe.tune is not None or all(entry.learning_rate is not None for entry in recipe.entries.values())
    if not tuned and len({entry["learning_rate"] for entry in entries}) == 1 and len(entries) > 1:
        notes.append("All entries share one learning rate, which may suit some better than others; see --tune.")
    return notes


def tuning_notes(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what a reader must know of how rates and starts of entries were found."""
    tuned = {entry["name"]: entry["tuning"] for entry in entries if entry["tuning"]}

    def where(key: str) -> list[str]:
        return [name for name, found in tuned.items() if found.get(key)]

    moved = [name for name, found in tuned.items() if found.get("full_length", {}).get("moved")]
    shares = [f"{name} {found['warmup_ratio']:g}" for name, found in tuned.items() if "warmup_ratio" in found]
    counts = {name: _tried(found) for name, found in tuned.items()}
    told = [
        ("The best learning rate lies at the edge of the grid for {}: widen the grid.", where("edge")),
        ("The best initialisation lies at the edge of its grid for {}: widen the grid.", where("initializer_edge")),
        ("Warm-up was tuned, too: of the steps it takes {}.", shares),
        ("The best warm-up is the shortest or longest that was tried for {}.", where("warmup_edge")),
        *(
            (
                f"A final run of {entry['name']} diverged at the learning rate that tuning had found ({{}}); all its "
                f"seeds were trained at the next lower one that was tried, {entry['learning_rate']:g}.",
                [f"{rate:g}" for rate in entry["tuning"]["diverged"]],
            )
            for entry in entries
            if entry["name"] in where("diverged")
        ),
        ("At full length another rate than in short runs was best, and taken, for {}.", moved),
        ("Runs of tuning: {}.", [f"{name} {n}" for name, n in counts.items()] if any(counts.values()) else []),
    ]
    return [text.format(", ".join(names)) for text, names in told if names]


def _tried(tuning: Mapping[str, Any]) -> int:
    """Runs of tuning, short ones and whole ones; those of full length that tuning had made count once."""
    rows = [*tuning.get("trials", ()), *tuning.get("full_length", {}).get("trials", ())]
    return len({tuple(sorted(row.items())) for row in rows})


def gap_notes(recipe: CompareSettings, entries: list[dict[str, Any]]) -> list[str]:
    """Return what the gaps of entries are, and for which of them the evaluation is too small."""
    gaps = {entry["name"]: entry["gap"] for entry in entries if entry.get("gap")}
    if not gaps:
        return []
    notes = [
        f"Gaps are validation losses less that of {recipe.reference}, on the same seeds and blocks, "
        + (
            "with 95 % intervals over seeds (Student's t), widened by the error of the validation blocks."
            if len(recipe.seeds) > 1
            else "without intervals: one seed says nothing of others."
        )
    ]
    if any(found["standard_error"] is None for found in gaps.values()):
        notes.append("Losses by block were not kept for all runs: their gaps have intervals over seeds alone.")
    small = [
        f"{name} ({gaps[name]['mean']:+.4f}, one paired standard error {gaps[name]['standard_error']:.4f})"
        for name in too_small(gaps)
    ]
    if small:
        notes.append(f"Evaluation too small for the gaps discussed: {', '.join(small)}; raise max_validation_tokens.")
    return notes


def _counting_notes(counted: Mapping[str, Any] | None, entries: list[dict[str, Any]]) -> list[str]:
    if counted is None:
        return []
    loss = counted["validation_loss"]
    behind = [entry["name"] for entry in entries if entry["validation_loss"]["mean"] > loss]
    lost = f" Behind it: {', '.join(behind)}." if behind else " No entry is behind it."
    return [
        f"Kneser-Ney {counted['order']}-grams, counted in {counted['tokens']:,} of the tokens that the entries see, "
        f"come to {loss:.3f} on the same blocks.{lost}"
    ]
