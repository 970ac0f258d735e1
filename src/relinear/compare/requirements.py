"""Estimate what training takes on this machine, before it starts: runs, parameters, tokens, time, disk."""

from __future__ import annotations

from collections.abc import Sequence

from relinear.compare.entry import least_runs
from relinear.compare.match import ModelSize, SizedEntry, measure_size, plan_comparison
from relinear.compare.run import runs_at_once
from relinear.compare.series import recipes_of_series
from relinear.compare.settings import CompareSettings
from relinear.compare.speed import seconds_per_token
from relinear.data.corpora import open_corpus
from relinear.data.tokenizers import expected_vocabulary
from relinear.system.grouped import grouped
from relinear.system.text import number
from relinear.system.timing import duration
from relinear.training.settings import TrainSettings


def training_requirements(settings: TrainSettings) -> dict[str, str]:
    """Estimate a run's requirements on this machine; times a step on few tokens. Errors as ``compare_requirements``."""
    open_corpus(settings.data)
    vocabulary = expected_vocabulary(settings.data.tokenizer)
    size = measure_size(settings, vocabulary)
    entry = SizedEntry(settings.model, settings, size, None)
    return {
        "runs": f"1, of {settings.steps:,} steps",
        "parameters": _parameter_text({settings.model: [size]}),
        "tokens": f"{number(settings.steps * settings.tokens_per_step)} of {_data_name(settings)}",
        "time": _time_text([(entry, 1, settings.steps)], vocabulary, 1),
        "disk": _disk_text([entry], 1, 1),
    }


def compare_requirements(recipe: CompareSettings, workers: int | None = None, *, timed: bool = True) -> dict[str, str]:
    """Estimate a comparison's requirements on this machine, by name: runs, parameters, tokens, time, disk.

    A step of the first dense entry and one of the first with operators are timed on few tokens; it takes seconds.

    Args:
        recipe: recipe of the comparison.
        workers: how many runs execute at once; None takes as many as fit on the cores.
        timed: False where runs are executed on other machines.

    Raises:
        ValueError, OSError: for a model or text that is not there, or sizes that cannot be matched.
    """
    open_corpus(recipe.train.data)
    vocabulary = expected_vocabulary(recipe.train.data.tokenizer)
    recipes = recipes_of_series(recipe, vocabulary)
    entries = [(part, entry) for part in recipes for entry in plan_comparison(part, vocabulary)]
    runs = [(entry, count, steps) for part, entry in entries for _, count, steps in least_runs(part, entry)]
    sizes = grouped((entry.name, entry.size) for _, entry in entries)
    at_once = workers or runs_at_once(recipe)
    seeds = len(recipe.seeds)
    final = seeds * len(entries)
    total = sum(count for _, count, _ in runs)
    tokens = sorted({part.steps * part.train.tokens_per_step for part in recipes})
    several = f" at {len(recipes)} sizes or budgets" if len(recipes) > 1 else ""
    # grids grow where the best is at an end
    tuning = f" and at least {total - final} to tune" if total > final else ""
    return {
        "runs": f"{len(sizes)} entries on {seeds} seed{'s' * (seeds > 1)}{several}: {final}{tuning}, {at_once} at once",
        "parameters": _parameter_text(sizes) + _resized_text(entries),
        "tokens": f"{_range(tokens)} a run of {_data_name(recipe.train)}",
        "time": _time_text(runs, vocabulary, at_once) if timed else "not estimated: runs are on other machines",
        "disk": _disk_text([entry for _, entry in entries], seeds, at_once),
    }


def _time_text(runs: Sequence[tuple[SizedEntry, int, int]], vocabulary: int | None, at_once: int) -> str:
    """Estimate the time of all runs from steps of the first dense model and of the first with operators.

    Args:
        runs: an entry, how many runs it has, and the steps of each.
        vocabulary: size of the tokenizer's vocabulary; None if inputs are vectors.
        at_once: how many runs execute at once.
    """
    if vocabulary is None:
        return "not estimated: inputs are vectors"
    timed: dict[bool, tuple[float, int]] = {}
    seconds = 0.0
    for entry, count, steps in runs:
        settings, dense = entry.settings, not entry.settings.operators
        if dense not in timed:
            timed[dense] = (seconds_per_token(settings, vocabulary, entry.size.flops), entry.size.flops)
        pace, flops = timed[dense]
        evaluations = steps // (settings.eval_every or steps) + 1
        evaluated = evaluations * (settings.data.max_validation_tokens or settings.eval_start_tokens or 0)
        tokens = steps * settings.tokens_per_step + evaluated / 3  # without the backward pass
        seconds += count * tokens * pace * max(1.0, entry.size.flops / flops)
    seconds /= max(1, min(at_once, sum(count for _, count, _ in runs)))
    on_all_text = any(entry.settings.data.max_validation_tokens is None for entry, _, _ in runs)
    evaluation = ", and evaluation on the whole validation text" if on_all_text else ""
    return f"{duration(seconds)}, by steps timed now{evaluation}"


def _parameter_text(sizes_by_name: dict[str, list[ModelSize]]) -> str:
    """Return parameters and FLOPs of each model, least to most if it has several sizes."""
    return "; ".join(
        f"{name} {_range([size.parameters for size in sizes])} "
        f"({_range([size.flops for size in sizes])} FLOPs per token)"
        for name, sizes in sizes_by_name.items()
    )


def _resized_text(entries: Sequence[tuple[CompareSettings, SizedEntry]]) -> str:
    """Return the operators that matching has resized, with their settings."""
    resized: list[tuple[str, str]] = []
    for recipe, entry in entries:
        unmatched = recipe.settings_of(entry.name).operator_configs
        configs = entry.settings.operator_configs.items()
        resized += [(entry.name, str(config)) for pattern, config in configs if config != unmatched[pattern]]
    texts = {name: ", ".join(dict.fromkeys(configs)) for name, configs in grouped(resized).items()}
    return "".join(f"; matched by {name}: {text}" for name, text in texts.items())


def _range(values: Sequence[int]) -> str:
    least, most = number(min(values)), number(max(values))
    return least if least == most else f"{least} to {most}"


def _data_name(settings: TrainSettings) -> str:
    return f"{settings.data.data} ({settings.data.tokenizer})"


def _disk_text(entries: Sequence[SizedEntry], seeds: int, at_once: int) -> str:
    """Estimate the disk for models that are kept and, while it runs, for checkpoints with optimiser states."""
    saved_bytes = sum(seeds * 4 * entry.size.parameters for entry in entries if entry.settings.save_model) + 5e6
    largest = max(entry.size.parameters for entry in entries)
    return f"about {number(saved_bytes + 12 * largest * at_once)}B while it runs, {number(saved_bytes)}B after"
