"""Build results.json: statistics over seeds, the n-gram baseline, and notes."""

import statistics
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from relinear.compare import schema
from relinear.compare.entry import Choice
from relinear.compare.folder import now, precision
from relinear.compare.gaps import too_small
from relinear.compare.match import SizedEntry
from relinear.compare.settings import CompareSettings
from relinear.contract.config import Config
from relinear.data import PackedData
from relinear.evaluate import KneserNey
from relinear.evaluate.losses import perplexity_of
from relinear.training.trainer import SteadySampler


def _statistic(values: list[float]) -> schema.Statistic:
    """Return mean and sample standard deviation (None for a single value)."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": std, "values": values}


def entry_result(
    choice: Choice, runs: list[schema.SeedRun], speed: schema.Speed | None, dense: bool, gap: schema.Gap | None
) -> schema.EntryResult:
    """Return an entry of ``results.json``: its operators, its tuning, and the results of its runs (one per seed).

    Args:
        choice: the entry at its size, with what tuning chose.
        runs: results of every seed's run, from ``seed_run``.
        speed: throughput of the entry; None if it was not measured.
        dense: whether the entry uses nothing of relinear.
        gap: gap to the reference; None for the reference itself, or without one.
    """
    entry, settings = choice.entry, choice.settings
    operators = [
        f"{pattern}: {_config_text(config) if config else 'left dense'}"
        for pattern, config in entry.settings.operator_configs.items()
    ]
    operators += [_config_text(config) for config in entry.settings.attachment_configs]
    stored = [run["stored"] for run in runs if run.get("stored")]
    losses_before = [model["loss_before"] for model in stored]
    mean_stored: Any = stored[0] | {"loss_before": statistics.fmean(losses_before)} if stored else None
    return {
        "name": entry.name,
        "operators": "; ".join(operators) or "dense",
        "settings": settings.model_dump(mode="json"),
        "parameters": entry.size.parameters,
        "flops_per_token": entry.size.flops,
        "inactive_parameters": entry.size.inactive_parameters,
        "inactive_flops": entry.size.inactive_flops,
        "size_mismatch": entry.size_mismatch,
        "learning_rate": settings.learning_rate,
        "tuning": choice.tuning,
        "validation_loss": _statistic([run["validation_loss"] for run in runs]),
        "perplexity": _statistic([run["perplexity"] for run in runs]),
        "initial_perplexity": _statistic([run["initial_perplexity"] for run in runs]),
        "peak_memory_bytes": max(run["peak_memory_bytes"] for run in runs),
        "speed": speed,
        "stored": mean_stored,
        "runs": runs,
        "dense": dense,
        "gap": gap,
    }


def seed_run(seed: int, result: Any, losses: np.ndarray) -> schema.SeedRun:
    """Return what ``results.json`` holds of a final run, from its ``TrainResult`` and losses by block."""
    run: Any = {"seed": seed, "block_losses": [round(float(loss), 5) for loss in losses]}
    run |= {name: value for name, value in result.to_dict().items() if name in schema.SeedRun.__annotations__}
    return run | {"curve": _curve(result.curve)}


def _config_text(config: Config) -> str:
    """Return a config as text with its defaults filled in, as readers need them as much as what was changed."""
    values = {key: value for key, value in config.to_dict().items() if key != "kind" and value is not None}
    return f"{config.kind}({', '.join(f'{key}={value}' for key, value in values.items())})"


def _curve(rows: list[dict[str, Any]]) -> list[schema.CurvePoint]:
    """Return one point per step: training loss, validation loss, or both."""
    points: dict[int, Any] = {}
    for row in rows:
        point = points.setdefault(row["step"], {"step": row["step"], "tokens": row["tokens"]})
        point |= {key: row[key] for key in ("loss", "validation_loss") if key in row}
    return [points[step] for step in sorted(points)]


def comparison_result(
    recipe: CompareSettings,
    data: PackedData,
    sized_entries: list[SizedEntry],
    entries: list[schema.EntryResult],
    provenance: schema.Provenance,
    ngram: schema.Ngram | None = None,
    diverged: Sequence[schema.DivergedEntry] = (),
) -> schema.Results:
    """Return the values of ``results.json``.

    Args:
        recipe: recipe of the comparison.
        data: the packed text that entries were trained and evaluated on.
        sized_entries: all entries, also those that diverged; the budget is that of the first.
        entries: results of the entries, from ``entry_result``.
        provenance: recipe, machine and command, from ``run.json``.
        ngram: results of the n-gram model, from ``count_ngrams``.
        diverged: entries without results.
    """
    return {
        "format": schema.FORMAT,
        "name": recipe.name,
        "description": recipe.description,
        "budget": _budget_text(recipe, data, sized_entries),
        "match": match_result(recipe, sized_entries),
        "notes": [
            *_notes(recipe, entries),
            *gap_notes(recipe, entries),
            *(f"{entry['name']} has no results: {entry['text']}." for entry in diverged),
        ],
        "reference": recipe.reference,
        "ngram": ngram,
        "data": data.description,
        "entries": entries,
        "diverged": list(diverged),
        **provenance,
        "finished": now(),
    }


def _budget_text(recipe: CompareSettings, data: PackedData, sized_entries: list[SizedEntry]) -> str:
    settings = sized_entries[0].settings
    per_step = settings.tokens_per_step
    tokens = data.description["splits"]["train"]["tokens"]
    passes = settings.steps * per_step / tokens
    other = [
        f"{entry.name} for {entry.settings.steps:,} of {entry.settings.tokens_per_step:,}"
        for entry in sized_entries
        if (entry.settings.steps, entry.settings.tokens_per_step) != (settings.steps, per_step)
    ]
    text = (
        f"Every entry was trained for {settings.steps:,} steps of {per_step:,} tokens ({settings.steps * per_step:,} "
        f"tokens, {passes:.2g} passes over the {tokens:,} training tokens of {settings.data.data}), on "
        f"{len(recipe.seeds)} seed{'s' if len(recipe.seeds) > 1 else ''}, in {precision(settings)}."
    )
    return text + (f" Other steps: {', '.join(other)}." if other else "")


def match_result(recipe: CompareSettings, sized_entries: list[SizedEntry]) -> schema.MatchResult:
    """Return what sizes are matched to, and the sentence about it on the report."""
    match = recipe.match
    if match.by == "width":
        return {"by": match.by, "target": None, "text": "Entries keep the sizes that they are written with."}
    if match.by == "bytes":
        target = cast(int, match.to)  # of a part: one file size
        text = (
            f"Every entry is a file of weights of {target:,} bytes, within {match.tolerance:.1%}. Short runs chose its "
            f"bits, of {', '.join(map(str, match.bits))} where a width fits, and with them its width; losses are of "
            "what was stored."
        )
        return {"by": match.by, "target": target, "tolerance": match.tolerance, "text": text}
    if isinstance(match.to, int):
        target, source = match.to, ""
    else:
        reference = next(e for e in sized_entries if e.size_mismatch == 0 and match.to in (None, e.name))
        target, source = reference.size.of(match.by), f", the size of {reference.name}"
    unit = "parameters" if match.by == "parameters" else "FLOPs per token"
    text = f"Sizes are matched to {target:,} {unit}{source}, within {match.tolerance:.1%}."
    unmatched = [entry.name for entry in sized_entries if entry.size_mismatch is None]
    if unmatched:
        text += f" Not matched: {', '.join(unmatched)}."
    return {"by": match.by, "target": target, "tolerance": match.tolerance, "text": text}


def _notes(recipe: CompareSettings, entries: list[schema.EntryResult]) -> list[str]:
    notes = []
    if len(recipe.seeds) > 1:
        notes.append(f"± is the sample standard deviation over {len(recipe.seeds)} seeds.")
    else:
        notes.append("One seed: differences smaller than the variation between seeds are noise.")
    speeds = [entry["speed"] for entry in entries if entry["speed"]]
    if speeds:
        notes.append(
            f"Speeds are tokens per second as a ratio to {speeds[0]['reference']}, all models timed in turn in one "
            f"process after training (median of {speeds[0]['rounds']} rounds)."
        )
    notes.append("FLOPs are of the forward pass, without attention scores and norms; memory is of the process.")
    notes += tuning_notes(entries)
    chosen = recipe.tune is not None or all(entry.learning_rate is not None for entry in recipe.entries.values())
    if not chosen and len({entry["learning_rate"] for entry in entries}) == 1 and len(entries) > 1:
        notes.append("All entries share one learning rate, which may suit some better than others; see --tune.")
    return notes


def tuning_notes(entries: Sequence[schema.SeriesEntry]) -> list[str]:
    """Return notes about what was tuned."""
    tuned = {entry["name"]: entry["tuning"] for entry in entries if entry["tuning"]}

    def where(key: str) -> list[str]:
        return [name for name, tuning in tuned.items() if tuning.get(key)]

    bits = [f"{name} {tuning['bits']}" for name, tuning in tuned.items() if tuning.get("bits")]
    warmups = [f"{name} {tuning['warmup_ratio']:g}" for name, tuning in tuned.items() if "warmup_ratio" in tuning]
    moved = [name for name, tuning in tuned.items() if tuning.get("full_length", {}).get("moved")]
    counts = [f"{name} {_trial_count(tuning)}" for name, tuning in tuned.items()]
    sentences = {
        "The best learning rate lies at the edge of the grid for {}: widen the grid.": where("edge"),
        "The best initialisation lies at the edge of its grid for {}: widen the grid.": where("initializer_edge"),
        "Bits were tuned: {}.": bits,
        "The fewest bits that were tried were best for {}: add fewer to match.bits.": where("bits_edge"),
        "Warm-up was tuned, too: of the steps it takes {}.": warmups,
        "The best warm-up is the shortest or longest that was tried for {}.": where("warmup_edge"),
        "Runs of full length chose another learning rate than short runs for {}.": moved,
        "Runs of tuning: {}.": counts,
    }
    notes = [text.format(", ".join(listed)) for text, listed in sentences.items() if listed]
    for entry in entries:
        if entry["tuning"] and (rates := entry["tuning"].get("diverged")):
            notes.append(
                f"A final run of {entry['name']} diverged at the learning rate that tuning had found "
                f"({', '.join(f'{rate:g}' for rate in rates)}); all its seeds were trained at the next lower one that "
                f"was tried, {entry['learning_rate']:g}."
            )
    return notes


def _trial_count(tuning: schema.Tuning) -> int:
    """Count the runs of tuning, short or of full length; a run that appears in both lists counts once."""
    rows = [*tuning.get("trials", ()), *tuning.get("full_length", {}).get("trials", ())]
    return len({tuple(sorted(row.items())) for row in rows})


def gap_notes(recipe: CompareSettings, entries: list[schema.EntryResult]) -> list[str]:
    """Return notes on the gaps of entries, and on those for which the evaluation is too small."""
    gaps = {entry["name"]: gap for entry in entries if (gap := entry.get("gap"))}
    if not gaps:
        return []
    notes = [
        f"Gaps are validation losses minus that of {recipe.reference}, on the same seeds and blocks, "
        + (
            "with 95 % intervals over seeds (Student's t), widened by the error of the validation blocks."
            if len(recipe.seeds) > 1
            else "without intervals, which need at least two seeds."
        )
    ]
    if any(gap["standard_error"] is None for gap in gaps.values()):
        notes.append("Losses by block were not kept for all runs: their gaps have intervals over seeds alone.")
    small = [
        f"{name} ({gaps[name]['mean']:+.4f}, one paired standard error {gaps[name]['standard_error']:.4f})"
        for name in too_small(gaps)
    ]
    if small:
        notes.append(f"The evaluation is too small for these gaps: {', '.join(small)}; raise max_validation_tokens.")
    return notes


# The n-gram model


#: beyond this the counts outgrow the memory of the machines that budgets of this size are trained on
_MAX_TOKENS = 100_000_000


def count_ngrams(recipe: CompareSettings, data: PackedData) -> schema.Ngram:
    """Return the loss of a Kneser-Ney model on the blocks that a run of the recipe is evaluated on.

    It counts the blocks that the first seed's run trains on, each block once however often the run passes over it, and
    sees no more context than a model does: nothing from before a block.

    Args:
        recipe: recipe with the budget, the seeds and the order.
        data: packed text, from ``prepare_data``.

    Returns:
        order, tokens (counted), validation_loss, perplexity.
    """
    train, validation = data.train, data.validation
    assert data.vocab_size is not None, "tasks of vectors have no n-grams"
    length = train.sequence_length
    count = min(recipe.steps * recipe.train.batch_size * recipe.train.accumulation, len(train))
    count = max(1, min(count, _MAX_TOKENS // length))
    indices = np.sort(np.fromiter(SteadySampler(len(train), count, recipe.seeds[0]), dtype=np.int64))
    blocks = np.asarray(train.tokens[: len(train) * length]).reshape(-1, length)[indices]
    order = min(recipe.ngram_order or 1, length)
    while data.vocab_size**order >= 1 << 63:
        order -= 1
    held_out = np.asarray(validation.tokens[: len(validation) * length]).reshape(-1, length)
    loss = float(KneserNey(blocks, data.vocab_size, order).losses(held_out).mean())
    return {"order": order, "tokens": int(blocks.size), "validation_loss": loss, "perplexity": perplexity_of(loss)}
