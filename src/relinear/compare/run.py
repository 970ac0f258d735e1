"""Run a comparison: match sizes, tune, train every entry on every seed, measure speed; resumes at any point."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from relinear.compare.engine import Engine, Run, Search, run_search, side_by_side
from relinear.compare.executors import executor_at
from relinear.compare.folder import (
    NGRAM,
    RUNS,
    SPEED,
    TUNING,
    claimed_folder,
    comparison_folder,
    read_losses,
    recipe_of,
)
from relinear.compare.gaps import gap
from relinear.compare.match import Planned, plan_comparison
from relinear.compare.results import comparison_result, count_ngrams, entry_result, seed_run
from relinear.compare.scaling import scale_results
from relinear.compare.schema import RESULTS, SCALE, DivergedEntry, Ngram, Provenance, Results, Speed, Tuning
from relinear.compare.series import comparison_at, comparisons, series_results
from relinear.compare.settings import CompareSettings, Tune, lasting
from relinear.compare.speed import measure_speed
from relinear.compare.tune import Trials, check_neighbours, grid_search, one_rate
from relinear.data import prepare_data
from relinear.data.corpora import open_corpus
from relinear.data.tokenizers import expected_vocabulary
from relinear.deprecated import warn_renamed, with_new_columns
from relinear.models import locate_model, preset_config, preset_names
from relinear.system.files import read_json, write_json
from relinear.system.machine import available_cores
from relinear.system.progress import ProgressCallback, no_progress
from relinear.training.fitting import NonFiniteLossError, training_device
from relinear.training.run import RUN, read_result
from relinear.training.settings import TrainSettings

T = TypeVar("T")
#: in an entry's folder there: the rates at which final runs diverged
DIVERGED_FILE = "diverged.json"


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
    ``results.json``. Started again with the same
    recipe it resumes, or returns the results if it had ended.

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
        What ``results.json`` holds, or ``scale.json`` for a recipe with ``sizes``: see ``docs/compare.md``.

    Raises:
        ValueError: for settings that are wrong or cannot be matched, data that cannot be read (nothing is written
            then), a directory that holds another comparison, entries that all diverge.
        ChildProcessError: if a run's process was killed; all others have ended then, and the same call resumes.
        OSError: if ``out_dir`` cannot be written.
    """
    recipe, out_dir = CompareSettings.load(recipe), Path(out_dir)
    if on_event is not None:
        warn_renamed("compare(on_event=)", "on_progress")
        on_progress = on_event
    if workers is None:
        workers = runs_at_once(recipe) if executor is None else 0
    with executor_at(executor, workers, out_dir.resolve(), slurm or {}) as pool:
        return comparison(recipe, out_dir, Engine(pool, workers, on_progress), overwrite)


def runs_at_once(recipe: CompareSettings) -> int:
    """Return how many runs fit on this machine's cores; one if a run takes all of them, or the GPU."""
    settings = recipe.train
    if settings.threads is None or training_device(settings).type != "cpu":
        return 1
    return max(1, available_cores() // settings.threads)


def comparison(recipe: CompareSettings, out_dir: Path, engine: Engine, overwrite: bool = False) -> Results:
    """Check everything, then lock ``out_dir`` and run the comparison, unless it has ended."""
    path = out_dir / (RESULTS if recipe.sizes is None else SCALE)
    comparison_folder(out_dir).check(recipe.model_dump(mode="json"), overwrite=overwrite)
    if path.is_file() and not overwrite:
        return with_new_columns(read_json(path))
    for name in recipe.entries:
        locate_model(recipe.settings_of(name).model)
        _check_tunable(recipe, name)
        if recipe.settings_of(name).data != recipe.train.data:
            raise ValueError(f"entries.{name}.set changes the data; all entries of a comparison share one corpus")
    open_corpus(recipe.train.data)
    vocabulary = expected_vocabulary(recipe.train.data.tokenizer)
    sized = [recipe] if recipe.budgets else comparisons(recipe, vocabulary)  # sizes are the same at every budget
    for each in sized:
        planned = plan_comparison(each, vocabulary, engine.on_progress)  # what cannot be matched is refused in seconds
    data = prepare_data(recipe.train.data, on_progress=engine.on_progress)
    if data.vocab_size != vocabulary:  # of a small text bpe:N has fewer entries
        planned = plan_comparison(sized[-1], data.vocab_size, engine.on_progress)
    with claimed_folder(recipe, out_dir, planned, data, overwrite) as started:
        _, key, values = recipe.series
        if not values:
            return _Comparison(recipe, out_dir, planned, data, engine, started).results()
        results: list[Results] = []
        for index, value in enumerate(values):
            at_value = comparison_at(recipe, index, data.vocab_size, results)
            results.append(comparison(at_value, out_dir / key / str(value), engine))
        made = recorded_provenance(started)
        if recipe.sizes is None:
            return load_or_make_json(path, lambda: series_results(recipe, results, made))
        scaled: Any = load_or_make_json(path, lambda: scale_results(recipe, out_dir, results, made))
        return scaled


def load_or_make_json(path: Path, make: Callable[[], T]) -> T:
    """Return the JSON values in ``path``; if it is missing, make and write them."""
    if not path.is_file():
        write_json(path, make())
    return with_new_columns(read_json(path))


def recorded_provenance(record: Mapping[str, Any]) -> Provenance:
    """Return the part of ``run.json`` that results repeat."""
    return {"recipe": recipe_of(record), "machine": record["machine"], "command": record["command"]}


def _check_tunable(recipe: CompareSettings, name: str) -> None:
    """Refuse a search over initialisations of a pretrained model."""
    tuned = recipe.tune is not None and recipe.tune.initializer_range is not None
    model = recipe.settings_of(name).model
    if tuned and recipe.entries[name].learning_rate is None and model not in preset_names():
        raise ValueError(f"{name}: tune.initializer_range is for presets, drawn anew; {model!r} brings its weights")


class _Choice(NamedTuple):
    """Hold an entry at its size, the settings of its final runs, and its tuning as in ``results.json``, if any.

    rates: that were tried with these settings, and at which training did not diverge.
    """

    planned: Planned
    settings: TrainSettings
    tuning: Tuning | None = None
    rates: Collection[float] = ()


def _with_rate(settings: TrainSettings, rate: float, initializer_range: float | None) -> TrainSettings:
    """Return ``settings`` at a learning rate and, unless it is None, an initialisation."""
    overrides = dict(settings.model_overrides)
    if initializer_range is not None:
        overrides["initializer_range"] = initializer_range
    return settings.replace(learning_rate=rate, model_overrides=overrides)


def _with_warmup(settings: TrainSettings, ratio: float | None) -> TrainSettings:
    """Return ``settings`` with a warm-up of that share of the steps; None leaves it unchanged."""
    return settings if ratio is None else settings.replace(warmup_steps=None, warmup_ratio=ratio)


#: short runs of a recipe that does not tune: they choose how files of one size are made
_TUNE_BITS_ONLY = Tune(check_full_length=False)


def announced_runs(recipe: CompareSettings, planned: Planned) -> list[tuple[str, int, int]]:
    """Return the planned runs of an entry: "train" or "tune", how many, and the steps of each."""
    tune, settings = recipe.tune or _TUNE_BITS_ONLY, planned.settings
    runs = [("train", len(recipe.seeds), settings.steps)]
    rates_tuned = recipe.tune is not None and recipe.entries[planned.name].learning_rate is None
    if rates_tuned or planned.candidates:
        trials = len(tune.learning_rates) + len(tune.initializer_range or ()) if rates_tuned else 1
        trials *= len(tune.warmup_ratio or (None,)) * len(planned.candidates or (planned,))
        runs.append(("tune", trials, lasting(settings, tune.fraction).steps))
    return [*runs, ("tune", 3, settings.steps)] if tune.check_full_length else runs


@dataclasses.dataclass
class _Comparison:
    """Run a comparison whose sizes are known. started: the record in ``run.json``."""

    recipe: CompareSettings
    out_dir: Path
    planned: list[Planned]
    data: Any
    engine: Engine
    started: Mapping[str, Any]

    def results(self) -> Results:
        """Tune and train all entries, then measure speed and collect the results."""
        for planned in self.planned:  # a search goes on beyond its grid where the best lies at an end
            for stage, count, steps in announced_runs(self.recipe, planned):
                self.engine.plan(stage, count, steps)
        choices = run_search(side_by_side([self._entry(planned) for planned in self.planned]), self.engine.run_round)
        diverged = [choice for choice in choices if not isinstance(choice, _Choice)]
        chosen = {choice.planned.name: choice for choice in choices if isinstance(choice, _Choice)}
        if not chosen:
            raise ValueError("; ".join(f"{each['name']}: {each['text']}" for each in diverged))
        counted, speed = None, dict[str, Speed]()
        if self.recipe.ngram_order is not None:
            self.engine.report("ngram", f"counting {self.recipe.ngram_order}-grams")
            counted = load_or_make_json(self.out_dir / NGRAM, lambda: count_ngrams(self.recipe, self.data))
        if self.recipe.speed.seconds and self.data.vocab_size is not None:  # timed on tokens
            speed = load_or_make_json(self.out_dir / SPEED, lambda: self._speed(chosen))
        return load_or_make_json(self.out_dir / RESULTS, lambda: self._results(chosen, diverged, counted, speed))

    def _results(
        self,
        chosen: Mapping[str, _Choice],
        diverged: list[DivergedEntry],
        counted: Ngram | None,
        speed: Mapping[str, Speed],
    ) -> Results:
        recipe, entries = self.recipe, []
        losses = {name: [read_losses(self._folder(name, seed)) for seed in recipe.seeds] for name in chosen}
        reference = losses.get(str(recipe.reference))
        for name, choice in chosen.items():
            results = [read_result(self._folder(name, seed)) for seed in recipe.seeds]
            runs = list(map(seed_run, recipe.seeds, results, losses[name]))
            tuning: Any = choice.tuning and {key: value for key, value in choice.tuning.items() if value is not None}
            to_reference = None if reference is None or name == recipe.reference else gap(losses[name], reference)
            more = speed.get(name), recipe.entries[name].dense, to_reference
            entries.append(entry_result(choice.planned, choice.settings, tuning, runs, *more))
        made = recorded_provenance(self.started)
        return comparison_result(recipe, self.data, self.planned, entries, made, counted, diverged)

    # An entry

    def _entry(self, planned: Planned) -> Search[_Choice | DivergedEntry]:
        """Tune an entry, then train it on every seed; if a final run diverges, all take a lower rate."""
        name = planned.name
        try:
            tuned = _Choice(planned, planned.settings)
            if self.recipe.tune is not None or planned.candidates:
                tuned = yield from self._tuned(planned, self.recipe.tune or _TUNE_BITS_ONLY)
            while True:
                choice = self._next_lower_rate(name, tuned)
                losses = yield [self._final(name, choice, seed) for seed in self.recipe.seeds]
                if all(map(math.isfinite, losses)):
                    return choice
                rate = choice.settings.learning_rate
                if tuned.tuning is None:
                    raise NonFiniteLossError(f"training diverged at the learning rate {rate:g}")
                write_json(self.out_dir / TUNING / name / DIVERGED_FILE, sorted({*self._rejected(name), rate}))
        except NonFiniteLossError as error:
            return {"name": name, "text": str(error)}

    def _tuned(self, planned: Planned, tune: Tune) -> Search[_Choice]:
        """Return the best rate, initialisation, warm-up and bits, by short runs and runs of full length."""
        settings, rate, initializer_range, ratio = planned.settings, planned.settings.learning_rate, None, None
        tuning: Any = {}
        trials, rates, several_bits = None, set[float](), len(planned.candidates) > 1
        rates_tuned = self.recipe.tune is not None and self.recipe.entries[planned.name].learning_rate is None
        if rates_tuned or planned.candidates:
            tunes_warmup = rates_tuned and not self.recipe.keeps_warmup(planned.name)
            ratios = (tune.warmup_ratio or (None,)) if tunes_warmup else (None,)
            preset_range = None
            if tune.initializer_range is not None and not self.recipe.keeps_initialisation(planned.name):
                preset_range = preset_config(settings.model, **settings.model_overrides).initializer_range
            starts = [(ratio, each) for ratio in ratios for each in planned.candidates or (planned,)]
            searches = [self._trials(planned.name, each.settings, tune.fraction, ratio) for ratio, each in starts]
            search = functools.partial(grid_search, tune, initializer_range=preset_range)
            if not rates_tuned:
                search = functools.partial(one_rate, rate=rate)
            results = yield from side_by_side([search(trials=trials) for trials in searches])
            searched = zip(results, searches, starts, strict=True)
            best_result, trials, (ratio, planned) = min(searched, key=lambda each: each[0].loss)
            settings = planned.settings
            if not math.isfinite(best_result.loss):
                grid = list(tune.learning_rates)
                raise NonFiniteLossError(
                    f"training diverged at every learning rate of {grid}; lower tune.learning_rates"
                )
            rate, initializer_range = best_result.rate, best_result.initializer_range
            rates = trials.sound_rates(initializer_range)
            tuning = {"trials": [row for each in searches for row in each.rows()], "edge": best_result.edge}
            tuning |= {"initializer_edge": best_result.initializer_edge, "warmup_ratio": ratio, "bits": settings.bits}
            fewest = settings.bits != 2 and settings.bits == min(self.recipe.match.bits)
            tuning["bits_edge"] = fewest if several_bits else None
            if ratio is not None:  # with two of them each is an end
                tuning["warmup_edge"] = len(ratios) > 2 and ratio in (ratios[0], ratios[-1])
        if tune.check_full_length:
            if trials is None or tune.fraction < 1:  # else tuning's own are of full length
                trials = self._trials(planned.name, settings, 1.0, ratio, full=True)
            full = yield from check_neighbours(tune, trials, rate, initializer_range)
            rates |= trials.sound_rates(initializer_range)
            full_length = {"trials": trials.rows(), "from": rate, "moved": full.rate != rate, "edge": full.edge}
            # report the edge for the rate that is used
            tuning = {"trials": [], **tuning, "edge": full.edge, "full_length": full_length}
            rate = full.rate
        chosen = _with_rate(_with_warmup(settings, ratio), rate, initializer_range)
        tuning = tuning and tuning | {"diverged": None, "initializer_range": initializer_range}
        return _Choice(planned, chosen, tuning or None, rates)

    def _rejected(self, name: str) -> list[float]:
        """Return the rates at which a final run of an entry diverged."""
        path = self.out_dir / TUNING / name / DIVERGED_FILE
        return read_json(path) if path.is_file() else []

    def _next_lower_rate(self, name: str, choice: _Choice) -> _Choice:
        """Return ``choice``, or the next lower rate that was tried and at which no final run has diverged."""
        diverged = sorted(self._rejected(name), reverse=True)
        if choice.tuning is None or choice.settings.learning_rate not in diverged:
            return choice
        lower = [rate for rate in choice.rates if rate < diverged[-1]]
        if not lower:
            at = ", ".join(f"{rate:g}" for rate in diverged)
            advice = "no lower learning rate was tried; lower tune.learning_rates"
            raise NonFiniteLossError(f"final runs diverged at {at}, and {advice}")
        settings = choice.settings.replace(learning_rate=max(lower))
        return choice._replace(settings=settings, tuning=choice.tuning | {"diverged": diverged})

    def _trials(
        self, name: str, settings: TrainSettings, fraction: float, ratio: float | None, full: bool = False
    ) -> Trials:
        """Return the runs of a search of an entry at one warm-up, of ``fraction`` times the steps."""
        short = lasting(_with_warmup(settings, ratio), fraction)
        short = short.replace(seed=(self.recipe.tune or _TUNE_BITS_ONLY).seed, eval_every=0, save_model=False)
        # what the search differs in from others of the entry: in the names of folders, and in rows
        prefix, common = "full-length-" * full, dict[str, Any](steps=short.steps, seed=short.seed)
        prefix += "" if short.bits is None else f"{short.bits}-bits-"
        prefix += "" if ratio is None else f"warmup-{ratio:g}-"
        common |= {key: v for key, v in (("warmup_ratio", ratio), ("bits", short.bits)) if v is not None}

        def run(rate: float, initializer_range: float | None, folder: Path) -> Run:
            what = f"tuning {name}, learning rate {folder.name}"
            return Run("tune", what, _with_rate(short, rate, initializer_range), folder)

        return Trials(self.out_dir / TUNING / name, run, prefix, common)

    def _folder(self, name: str, seed: int) -> Path:
        return self.out_dir / RUNS / name / f"seed-{seed}"

    def _final(self, name: str, choice: _Choice, seed: int) -> Run:
        """Return the run of a seed. A run at a rate at which another seed has since diverged is renamed."""
        settings, folder = choice.settings.replace(seed=seed), self._folder(name, seed)
        if (rejected := self._rejected(name)) and (folder / RUN).is_file():
            rate = read_json(folder / RUN)["settings"]["learning_rate"]
            if rate in rejected:
                folder.rename(self.out_dir / TUNING / name / f"given-up-{rate:g}-seed-{seed}")
        return Run("train", name if len(self.recipe.seeds) == 1 else f"{name}, seed {seed}", settings, folder)

    def _speed(self, chosen: Mapping[str, _Choice]) -> dict[str, Speed]:
        settings = {name: choice.settings.model_dump(mode="json") for name, choice in chosen.items()}
        full = [name for name in settings if (entry := self.recipe.entries[name]).dense and entry.resizing == "fixed"]
        reference = full[0] if full else "dense at full size"
        if not full:
            # its warm-up may be longer than the default number of steps, and does not matter here
            settings[reference] = self.recipe.train.model_dump(mode="json") | {"warmup_steps": None}
        speed = self.recipe.speed
        arguments = settings, reference, self.data.vocab_size, speed.seconds, speed.rounds
        self.engine.report("speed", "measuring speed, all models in turn")
        return self.engine.executor.submit(measure_speed, *arguments).result()
