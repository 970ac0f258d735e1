"""Run a comparison: match sizes, tune, train every entry on every seed, measure speed; resumes at any point."""

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from relinear.compare.engine import Engine, run_search, side_by_side
from relinear.compare.entry import Choice, EntrySearch, least_runs
from relinear.compare.executors import executor_at
from relinear.compare.folder import (
    NGRAM,
    SPEED,
    claimed_folder,
    comparison_folder,
    read_losses,
    recipe_of,
    seed_folder,
)
from relinear.compare.gaps import gap
from relinear.compare.match import SizedEntry, plan_comparison
from relinear.compare.results import comparison_result, count_ngrams, entry_result, seed_run
from relinear.compare.scaling import scale_results
from relinear.compare.schema import RESULTS, SCALE, DivergedEntry, EntryResult, Ngram, Provenance, Results, Speed
from relinear.compare.series import recipe_at, recipes_of_series, series_results
from relinear.compare.settings import CompareSettings
from relinear.compare.speed import measure_speed
from relinear.data import PackedData, prepare_data
from relinear.data.corpora import open_corpus
from relinear.data.tokenizers import expected_vocabulary
from relinear.deprecated import warn_renamed, with_new_columns
from relinear.models import is_preset, locate_model
from relinear.system.files import read_json, write_json
from relinear.system.machine import available_cores
from relinear.system.progress import ProgressCallback, no_progress
from relinear.training.fitting import training_device
from relinear.training.run import read_result


def compare(
    recipe: CompareSettings | Mapping[str, Any],
    out_dir: str | Path,
    *,
    overwrite: bool = False,
    workers: int | None = None,
    executor: Executor | str | None = None,
    slurm: Mapping[str, Any] | None = None,
    on_progress: ProgressCallback = no_progress,
    on_event: ProgressCallback | None = None,
) -> Results:
    """Run a comparison and leave its results in ``out_dir``.

    ``out_dir`` gets ``run.json`` (recipe, sizes, machine), ``tuning/`` and ``runs/ENTRY/seed-N/`` (a run's own
    ``run.json``, ``metrics.jsonl`` and ``block_losses.npy``), ``ngram.json``, ``speed.json`` and, at the end,
    ``results.json``. Started again with the same recipe it resumes, or returns the results if it had ended.

    Args:
        recipe: ``CompareSettings`` or a mapping of them.
        out_dir: directory of the comparison, made once everything has been checked.
        overwrite: start over, and rename what is in the way in ``out_dir``: ``runs`` becomes ``runs.<time>``.
        workers: number of runs at the same time, each in its own process. None: as many as fit on this machine's cores.
            0: train in this process; the peak memory of a run then includes earlier runs.
        executor: where runs are executed: None on this machine, "slurm", the address of a scheduler of Dask
            ("tcp://HOST:8786"), or an executor as ``concurrent.futures`` has them. All see ``out_dir`` by this path.
        slurm: parameters of ``submitit.AutoExecutor`` for jobs of SLURM, such as ``slurm_partition``.
        on_progress: called with a ``Progress`` whenever the work advances.
        on_event: the old name of ``on_progress``.

    Returns:
        What ``results.json`` holds, or ``scale.json`` for a recipe with ``widths``: see ``docs/compare.md``.

    Raises:
        ValueError: for settings that are wrong or cannot be matched, data that cannot be read (nothing is written
            then), a directory that holds another comparison, entries that all diverge.
        ChildProcessError: if a run's process was killed; all others have ended then, and the same call resumes.
        OSError: if ``out_dir`` cannot be written.
    """
    recipe = CompareSettings.load(recipe)
    out_dir = Path(out_dir)
    if on_event is not None:
        warn_renamed("compare(on_event=)", "on_progress")
        on_progress = on_event
    if workers is None:
        workers = runs_at_once(recipe) if executor is None else 0
    with executor_at(executor, workers, out_dir.resolve(), slurm or {}) as pool:
        return run_comparison(recipe, out_dir, Engine(pool, workers, on_progress), overwrite)


def runs_at_once(recipe: CompareSettings) -> int:
    """Return how many runs fit on this machine's cores; one if a run takes all of them, or the GPU."""
    settings = recipe.train
    if settings.threads is None or training_device(settings).type != "cpu":
        return 1
    return max(1, available_cores() // settings.threads)


def run_comparison(recipe: CompareSettings, out_dir: Path, engine: Engine, overwrite: bool = False) -> Results:
    """Check everything, then lock ``out_dir`` and run the comparison, unless it has ended."""
    path = out_dir / (RESULTS if recipe.widths is None else SCALE)
    comparison_folder(out_dir).check(recipe.model_dump(mode="json"), overwrite=overwrite)
    if path.is_file() and not overwrite:
        return with_new_columns(read_json(path))
    _check_entries(recipe)
    open_corpus(recipe.train.data)
    vocabulary = expected_vocabulary(recipe.train.data.tokenizer)
    # sizes are the same at every budget
    sized_recipes = [recipe] if recipe.budgets else recipes_of_series(recipe, vocabulary)
    engine.report_stage("match", "sizing entries")
    for sized_recipe in sized_recipes:  # what cannot be matched is refused in seconds
        entries = plan_comparison(sized_recipe, vocabulary)
    data = prepare_data(recipe.train.data, on_progress=engine.on_progress)
    if data.vocab_size != vocabulary:  # of a small text bpe:N has fewer entries
        entries = plan_comparison(sized_recipes[-1], data.vocab_size)
    with claimed_folder(recipe, out_dir, entries, data, overwrite) as run_record:
        machine, command = run_record["machine"], run_record["command"]
        provenance: Provenance = {"recipe": recipe_of(run_record), "machine": machine, "command": command}
        _, key, values = recipe.series
        if not values:
            return _SizedComparison(recipe, out_dir, entries, data, engine, provenance).results()
        results: list[Results] = []
        for index, value in enumerate(values):
            recipe_at_value = recipe_at(recipe, index, data.vocab_size, results)
            results.append(run_comparison(recipe_at_value, out_dir / key / str(value), engine))
        if recipe.widths is not None:
            return load_or_make_json(path, lambda: scale_results(recipe, out_dir, results, provenance))
        return load_or_make_json(path, lambda: series_results(recipe, results, provenance))


def _check_entries(recipe: CompareSettings) -> None:
    """Refuse models that do not exist, or whose weights would be drawn anew, and entries with a corpus of their own."""
    for name in recipe.entries:
        settings = recipe.settings_of(name)
        locate_model(settings.model)
        if recipe.tunes_initializer(name) and not is_preset(settings.model):
            raise ValueError(
                f"{name}: tune.initializer_range needs a preset, whose weights are drawn at random; "
                f"{settings.model!r} is loaded with its weights"
            )
        if settings.data != recipe.train.data:
            raise ValueError(f"entries.{name}.set changes the data; all entries of a comparison share one corpus")


def load_or_make_json(path: Path, make: Callable[[], object]) -> Any:
    """Return the JSON values in ``path``; if it is missing, make and write them."""
    if not path.is_file():
        write_json(path, make())
    return with_new_columns(read_json(path))


@dataclasses.dataclass
class _SizedComparison:
    """Run a comparison of entries at their final sizes, on the packed ``data``."""

    recipe: CompareSettings
    out_dir: Path
    entries: list[SizedEntry]
    data: PackedData
    engine: Engine
    provenance: Provenance

    def results(self) -> Results:
        """Tune and train all entries, then measure speed and collect the results."""
        for entry in self.entries:
            for stage, count, steps in least_runs(self.recipe, entry):
                self.engine.expect(stage, count, steps)
        searches = [EntrySearch(self.recipe, entry, self.out_dir).run() for entry in self.entries]
        outcomes = run_search(side_by_side(searches), self.engine.run_round)
        diverged = [outcome for outcome in outcomes if not isinstance(outcome, Choice)]
        choices = {outcome.entry.name: outcome for outcome in outcomes if isinstance(outcome, Choice)}
        if not choices:
            raise ValueError("; ".join(f"{entry['name']}: {entry['text']}" for entry in diverged))
        ngram = None
        speeds: dict[str, Speed] = {}
        if self.recipe.ngram_order is not None:
            self.engine.report_stage("ngram", f"counting {self.recipe.ngram_order}-grams")
            ngram = load_or_make_json(self.out_dir / NGRAM, lambda: count_ngrams(self.recipe, self.data))
        if self.recipe.speed.seconds and self.data.vocab_size is not None:  # timed on tokens
            speeds = load_or_make_json(self.out_dir / SPEED, lambda: self._speeds(choices))
        return load_or_make_json(self.out_dir / RESULTS, lambda: self._collected(choices, diverged, ngram, speeds))

    def _speeds(self, choices: Mapping[str, Choice]) -> dict[str, Speed]:
        """Measure the speed of every entry, as ratios to dense at full size."""
        settings = {name: choice.settings.model_dump(mode="json") for name, choice in choices.items()}
        full = [name for name in settings if (entry := self.recipe.entries[name]).dense and entry.resizing == "fixed"]
        reference = full[0] if full else "dense at full size"
        if not full:
            # its warm-up may be longer than the default number of steps, and does not matter here
            settings[reference] = self.recipe.train.model_dump(mode="json") | {"warmup_steps": None}
        speed = self.recipe.speed
        arguments = settings, reference, self.data.vocab_size, speed.seconds, speed.rounds
        self.engine.report_stage("speed", "measuring speed, all models in turn")
        return self.engine.executor.submit(measure_speed, *arguments).result()

    def _collected(
        self,
        choices: Mapping[str, Choice],
        diverged: list[DivergedEntry],
        ngram: Ngram | None,
        speeds: Mapping[str, Speed],
    ) -> Results:
        """Return the values of ``results.json`` from the files of the final runs."""
        recipe = self.recipe
        results: list[EntryResult] = []
        folders = {name: [seed_folder(self.out_dir, name, seed) for seed in recipe.seeds] for name in choices}
        losses = {name: list(map(read_losses, folders[name])) for name in choices}
        reference = losses.get(str(recipe.reference))
        for name, choice in choices.items():
            runs = list(map(seed_run, recipe.seeds, map(read_result, folders[name]), losses[name]))
            to_reference = None if reference is None or name == recipe.reference else gap(losses[name], reference)
            dense = recipe.entries[name].dense
            results.append(entry_result(choice, runs, speeds.get(name), dense, to_reference))
        return comparison_result(recipe, self.data, self.entries, results, self.provenance, ngram, diverged)
