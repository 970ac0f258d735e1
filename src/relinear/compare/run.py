"""The comparison: match sizes, tune, train every entry on every seed, measure speed; stop and go on at any point."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relinear.compare.folder import BUDGETS, NGRAM, RESULTS, RUN, SPEED, check_same, now, read_losses, record_start
from relinear.compare.gaps import gap
from relinear.compare.match import Event, OnEvent, Planned, plan_comparison
from relinear.compare.results import at_budget, chosen_by, comparison_result, count_ngrams, entry_result, over_budgets
from relinear.compare.settings import CompareSettings, Tune, lasting
from relinear.compare.sharing import Piece, Work, all_of, alone_at, carry_out, kept, side_by_side
from relinear.compare.tune import Trials, beside, grid_search
from relinear.compare.worker import InProcess, Worker, at_work
from relinear.data import prepare_data
from relinear.models import model_place, preset_config, preset_names
from relinear.system.files import read_json, write_json
from relinear.system.lock import only_process_in
from relinear.train.run import read_ended, read_result, run_folder
from relinear.train.settings import TrainSettings
from relinear.train.trainer import NonFiniteLossError

#: folder of the short runs
TUNING = "tuning"
#: in an entry's folder there: the rates at which final runs diverged
DIVERGED = "diverged.json"


def compare(
    recipe: CompareSettings | Mapping[str, Any],
    out_dir: str | Path,
    *,
    isolate: bool = True,
    shared: bool = False,
    on_event: OnEvent = lambda event: None,
) -> dict[str, Any]:
    """Carry out a comparison and leave its results in ``out_dir``.

    ``out_dir`` gets ``run.json`` (recipe, sizes, machine), ``tuning/`` and ``runs/ENTRY/seed-N/`` (a run's own
    ``run.json``, ``metrics.jsonl`` and ``block_losses.npy``), ``ngram.json``, ``speed.json`` and, at the end,
    ``results.json``. Started again with the same
    recipe it goes on where it was, or returns the results if it had ended.

    Args:
        recipe: ``CompareSettings`` or a mapping of them.
        out_dir: directory of the comparison, made once everything has been checked.
        isolate: train every run in a process of its own, which alone makes its peak memory its own.
        shared: work on the same comparison as other calls with the same recipe, on this machine or on others that see
            ``out_dir``. Every run is done by one of them; what a killed call had begun, another goes on with. Every
            call returns the results when all is done.
        on_event: told what is going on.

    Returns:
        What ``results.json`` holds, or ``scale.json`` for a recipe with ``sizes``: see ``docs/compare.md``.

    Raises:
        ValueError: for settings that are wrong or cannot be matched, data that cannot be read (nothing is written
            then), a directory that holds another comparison, a loss that is not finite.
        OSError: if ``out_dir`` cannot be written.
    """
    recipe = CompareSettings.load(recipe)
    work = comparison
    if recipe.sizes is not None:
        from relinear.compare.scaling import scaled_up as work
    return carried_out(work, recipe, Path(out_dir), isolate=isolate, shared=shared, on_event=on_event)


@dataclasses.dataclass(frozen=True)
class Way:
    """How work is done: who trains, whether with others, and who is told."""

    worker: "Worker | InProcess"  # tests put a function in its place
    shared: bool
    on_event: OnEvent


def carried_out(
    work: Callable[[CompareSettings, Path, Way], Work[dict[str, Any]]],
    recipe: CompareSettings,
    out_dir: Path,
    *,
    isolate: bool,
    shared: bool,
    on_event: OnEvent,
) -> dict[str, Any]:
    """Carry out the work on ``recipe`` in ``out_dir``, or go on with it; arguments as in ``compare``."""
    with at_work(out_dir, isolate, shared) as worker:
        way = Way(worker, shared, on_event)
        return carry_out(out_dir, work(recipe, out_dir, way), shared)


def comparison(recipe: CompareSettings, out_dir: Path, way: Way) -> Work[dict[str, Any]]:
    """Check everything, then hold ``out_dir`` for the comparison and do it, unless it has ended."""
    path = out_dir / RESULTS
    check_same(out_dir, recipe.model_dump(mode="json"))
    if path.is_file():
        return read_json(path)
    for name in recipe.entries:
        model_place(recipe.settings_of(name).model)
        _check_tunable(recipe, name)
    data = prepare_data(recipe.train.data, on_progress=lambda what, done: way.on_event(Event("data", what, done)))
    for name in recipe.entries:
        if recipe.settings_of(name).data != recipe.train.data:
            raise ValueError(f"entries.{name}.set changes the data; all entries of a comparison share one corpus")
    planned = plan_comparison(recipe, data.vocab_size, way.on_event)
    with held(recipe, out_dir, way, planned, data) as started:
        if recipe.budgets is None:
            return (yield from _Comparison(recipe, out_dir, planned, data, way, started).work())
        found: list[dict[str, Any]] = []
        for index, tokens in enumerate(recipe.budgets):
            at_one = at_budget(recipe, index, chosen_by(found))
            found.append((yield from comparison(at_one, out_dir / BUDGETS / str(tokens), way)))
        return (yield from kept(path, lambda: over_budgets(recipe, found) | circumstances(started)))


@contextlib.contextmanager
def held(
    recipe: CompareSettings, out_dir: Path, way: Way, planned: list[Planned], data: Any = None
) -> Iterator[dict[str, Any]]:
    """Hold ``out_dir`` for work on ``recipe``; gives what ``run.json`` says there, written if it is not."""
    described = recipe.model_dump(mode="json")
    with only_process_in(out_dir, shared=way.shared):
        with alone_at(out_dir, "start", way.shared):
            check_same(out_dir, described)  # another process may have been here since
            started = record_start(out_dir, described, planned, data)
        yield started


def circumstances(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what results take from ``run.json``."""
    return {key: record[key] for key in ("recipe", "machine", "command")}


def _check_tunable(recipe: CompareSettings, name: str) -> None:
    """Refuse a search over initialisations of a model whose weights are read."""
    tuned = recipe.tune is not None and recipe.tune.initializer_range is not None
    model = recipe.settings_of(name).model
    if tuned and recipe.entries[name].learning_rate is None and model not in preset_names():
        raise ValueError(f"{name}: tune.initializer_range is for presets, drawn anew; {model!r} brings its weights")


class _Choice(NamedTuple):
    """An entry's settings, and what ``results.json`` says of its tuning (but for what is None); None without one."""

    settings: TrainSettings
    tuning: dict[str, Any] | None = None


def _at(settings: TrainSettings, rate: float, initializer_range: float | None) -> TrainSettings:
    """``settings`` at a learning rate and, unless it is None, an initialisation."""
    overrides = dict(settings.model_overrides)
    if initializer_range is not None:
        overrides["initializer_range"] = initializer_range
    return settings.updated(learning_rate=rate, model_overrides=overrides)


def _warmed(settings: TrainSettings, ratio: float | None) -> TrainSettings:
    """``settings`` with a warm-up of that share of the steps, or as it is written."""
    return settings if ratio is None else settings.updated(warmup_steps=None, warmup_ratio=ratio)


class _Comparison:
    """The work that is left once the sizes are known."""

    def __init__(
        self,
        recipe: CompareSettings,
        out_dir: Path,
        planned: list[Planned],
        data: Any,
        way: Way,
        started: Mapping[str, Any],
    ) -> None:
        self.recipe, self.out_dir, self.planned, self.data = recipe, out_dir, planned, data
        self.way, self.started = way, started
        self.searches: list[Trials] = []
        #: final runs that have ended, by folder and learning rate
        self.trained: set[tuple[Path, float]] = set()
        self.runs = len(planned) * len(recipe.seeds)
        if recipe.tune is not None:
            self.trials = len(recipe.tune.learning_rates) + len(recipe.tune.initializer_range or ())
            trials = self.trials * len(recipe.tune.warmup_ratio or (None,))
            self.runs += sum(entry.learning_rate is None for entry in recipe.entries.values()) * trials
            self.runs += 3 * len(planned) * recipe.tune.check_full_length

    def work(self) -> Work[dict[str, Any]]:
        """Tune and train all entries, then what is done one after the other once all runs have ended."""
        chosen = yield from side_by_side([self._entry(planned) for planned in self.planned])
        counted, speed = None, {}
        if self.recipe.ngram_order is not None:
            counted = yield from kept(self.out_dir / NGRAM, self._count)
        if self.recipe.speed.seconds:
            speed = yield from kept(self.out_dir / SPEED, lambda: self._speed(chosen))
        return (yield from kept(self.out_dir / RESULTS, lambda: self._results(chosen, counted, speed)))

    def _results(self, chosen: list[_Choice], counted: dict[str, Any] | None, speed: dict[str, Any]) -> dict[str, Any]:
        gaps, entries = self._gaps(), []
        for planned, choice in zip(self.planned, chosen, strict=True):
            name, runs = planned.name, []
            for seed in self.recipe.seeds:
                result = read_result(self._folder(name, seed))
                blocks = [round(float(loss), 5) for loss in self._losses(name, seed)]
                runs.append({"seed": seed, **result.to_dict(), "curve": result.curve, "block_losses": blocks})
            tuning = choice.tuning and {key: value for key, value in choice.tuning.items() if value is not None}
            entry = entry_result(planned, choice.settings, tuning, runs, speed.get(name))
            entries.append(entry | {"dense": self.recipe.entries[name].dense, "gap": gaps.get(name)})
        found = comparison_result(self.recipe, self.data, self.planned, entries, counted)
        return found | circumstances(self.started) | {"finished": now()}

    def _tell(self, stage: str, what: str, done: int = 0, total: int = 0, detail: dict[str, Any] | None = None) -> None:
        # a search whose best lies at the edge of its grid goes on beyond it
        tried = [
            (len(each.known), 3 if each.prefix.startswith("full-length-") else self.trials) for each in self.searches
        ]
        ended = len(self.trained) + sum(count for count, _ in tried)
        runs = max(ended, self.runs + sum(max(0, count - usual) for count, usual in tried))
        self.way.on_event(Event(stage, what, done, total, ended, runs, detail or {}))

    def _count(self) -> dict[str, Any]:
        self._tell("ngram", f"counting {self.recipe.ngram_order}-grams")
        return count_ngrams(self.recipe, self.data, self.out_dir)

    def _gaps(self) -> dict[str, dict[str, Any]]:
        """Of every entry but the reference, by name."""
        if self.recipe.reference is None:
            return {}
        losses = {p.name: [self._losses(p.name, seed) for seed in self.recipe.seeds] for p in self.planned}
        reference = losses.pop(self.recipe.reference)
        return {name: gap(own, reference) for name, own in losses.items()}

    def _losses(self, name: str, seed: int) -> np.ndarray:
        return read_losses(self._folder(name, seed))

    # An entry

    def _entry(self, planned: Planned) -> Work[_Choice]:
        """Tune an entry, then train it on every seed; where a final run diverges, all take a lower rate."""
        name = planned.name
        try:
            tuned = _Choice(planned.settings)
            if self.recipe.tune is not None:
                tuned = yield from self._tuned(planned, self.recipe.tune)
            while True:
                choice = self._below_diverged(name, tuned)
                yield from all_of([self._final_piece(name, choice, seed) for seed in self.recipe.seeds])
                if choice.settings.learning_rate not in self._given_up(name):
                    return choice
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def _tuned(self, planned: Planned, tune: Tune) -> Work[_Choice]:
        """The rate, initialisation and warm-up that are found best, in short runs and in runs of full length."""
        settings, rate, spread, ratio = planned.settings, planned.settings.learning_rate, None, None
        tuning, trials = dict[str, Any](), None
        if self.recipe.entries[planned.name].learning_rate is None:
            ratios = (None,) if self.recipe.keeps_warmup(planned.name) else (tune.warmup_ratio or (None,))
            written = None
            if tune.initializer_range is not None and not self.recipe.keeps_initialisation(planned.name):
                written = preset_config(settings.model, **settings.model_overrides).initializer_range
            searches = [self._trials(planned.name, settings, tune.fraction, ratio) for ratio in ratios]
            results = yield from side_by_side([grid_search(tune, trials, written) for trials in searches])
            found, trials, ratio = min(zip(results, searches, ratios, strict=True), key=lambda each: each[0].loss)
            if not math.isfinite(found.loss):
                grid = list(tune.learning_rates)
                raise ValueError(f"training diverged at every learning rate of {grid}; lower tune.learning_rates")
            rate, spread = found.rate, found.initializer_range
            tuning = {"trials": [row for each in searches for row in each.rows()], "edge": found.edge}
            tuning |= {"initializer_edge": found.initializer_edge, "warmup_ratio": ratio}
            if ratio is not None:  # with two of them each is an end
                tuning["warmup_edge"] = len(ratios) > 2 and ratio in (ratios[0], ratios[-1])
        if tune.check_full_length:
            if trials is None or tune.fraction < 1:  # else tuning's own are of full length
                trials = self._trials(planned.name, settings, 1.0, ratio, full=True)
            full = yield from beside(tune, trials, rate, spread)
            told = {"trials": trials.rows(), "from": rate, "moved": full.rate != rate, "edge": full.edge}
            # the edge that is told is that of the rate that is used
            tuning = {"trials": [], **tuning, "edge": full.edge, "full_length": told}
            rate = full.rate
        chosen = _at(_warmed(settings, ratio), rate, spread)
        return _Choice(chosen, tuning | {"diverged": None, "initializer_range": spread} if tuning else None)

    def _given_up(self, name: str) -> list[float]:
        """The rates at which a final run of an entry diverged."""
        path = self.out_dir / TUNING / name / DIVERGED
        return read_json(path) if path.is_file() else []

    def _below_diverged(self, name: str, choice: _Choice) -> _Choice:
        """``choice``, or that at the next lower rate of those tried at which no final run has diverged."""
        given_up, rate, diverged = self._given_up(name), choice.settings.learning_rate, []
        tuning = choice.tuning
        if tuning is None or rate not in given_up:
            return choice
        lower = [
            trial["learning_rate"]
            for trial in [*tuning["trials"], *tuning.get("full_length", {}).get("trials", ())]
            if trial["validation_loss"] is not None
            and trial.get("initializer_range") == tuning["initializer_range"]
            and trial.get("warmup_ratio") in (None, tuning.get("warmup_ratio"))
        ]
        while rate in given_up:
            diverged.append(rate)
            below = [other for other in lower if other < rate]
            if not below:
                at = ", ".join(f"{r:g}" for r in diverged)
                advice = "no lower learning rate was tried; lower tune.learning_rates"
                raise ValueError(f"final runs diverged at {at}, and {advice}")
            rate = max(below)
        return _Choice(choice.settings.updated(learning_rate=rate), tuning | {"diverged": diverged})

    def _trials(
        self, name: str, settings: TrainSettings, fraction: float, ratio: float | None, full: bool = False
    ) -> Trials:
        """The runs of a search of an entry at one warm-up, of ``fraction`` times the steps."""
        warmup = () if ratio is None else (f"warm-up {ratio:g}",)
        study = ", ".join([name, *warmup, *(["full length"] if full else [])])
        prefix = "full-length-" * full + "".join(f"{each.replace('warm-up ', 'warmup-')}-" for each in warmup)
        short = lasting(_warmed(settings, ratio), fraction)
        short = short.updated(seed=self.recipe.tune.seed, eval_every=0, save_model=False)
        at = functools.partial(_at, short)

        def run(rate: float, spread: float | None, folder: Path) -> float:
            stated = "" if spread is None else f", initializer_range {spread:g}"
            what = f"tuning {study}, learning rate {rate:g}{stated}"
            try:
                return self._run("tune", what, at(rate, spread), folder)["validation_loss"]
            except NonFiniteLossError:
                return math.inf

        common = {"steps": short.steps, "seed": short.seed} | ({} if ratio is None else {"warmup_ratio": ratio})
        self.searches.append(Trials(self.out_dir / TUNING / name, run, prefix, common, at))
        return self.searches[-1]

    def _folder(self, name: str, seed: int) -> Path:
        return self.out_dir / "runs" / name / f"seed-{seed}"

    def _final_piece(self, name: str, choice: _Choice, seed: int) -> Piece:
        settings, folder = choice.settings.updated(seed=seed), self._folder(name, seed)
        key = folder, settings.learning_rate

        def is_done() -> bool:
            if settings.learning_rate in self._given_up(name):
                return True  # by another seed: all take a lower one
            if key not in self.trained and not self._outdated(name, folder, settings) and read_ended(settings, folder):
                self.trained.add(key)
            return key in self.trained

        def do() -> None:
            if self._outdated(name, folder, settings):
                run_folder(folder, settings, overwrite=True).set_aside()
            what = name if len(self.recipe.seeds) == 1 else f"{name}, seed {seed}"
            try:
                self._run("train", what, settings, folder)
            except NonFiniteLossError:
                if choice.tuning is None:
                    raise
                given_up = sorted({*self._given_up(name), settings.learning_rate})
                write_json(self.out_dir / TUNING / name / DIVERGED, given_up)

        return Piece(f"run-{name}-{seed}", is_done, do, later=True)

    def _outdated(self, name: str, folder: Path, settings: TrainSettings) -> bool:
        """Whether a final run was made at a rate that was given up since, because another seed's diverged at it."""
        given_up = self._given_up(name)
        if not given_up or not (folder / RUN).is_file():
            return False
        rate = read_json(folder / RUN)["settings"]["learning_rate"]
        return rate in given_up and rate != settings.learning_rate

    def _run(self, stage: str, what: str, settings: TrainSettings, folder: Path) -> dict[str, Any]:
        def tell(progress: Mapping[str, Any]) -> None:
            detail = {key: progress[key] for key in ("loss", "validation_loss", "tokens_per_second")}
            phase = {"evaluate": " (evaluating)", "prepare": " (preparing)"}.get(progress["phase"], "")
            self._tell(stage, what + phase, progress["step"], progress["steps"], detail)

        self._tell(stage, what, 0, settings.steps)
        arguments = {"settings": settings.model_dump(mode="json"), "out_dir": str(folder)}
        try:
            return self.way.worker.run("train", arguments, tell)
        except ValueError as error:
            error.args = (f"{what}: {error}",)
            raise

    def _speed(self, chosen: list[_Choice]) -> dict[str, Any]:
        what = "measuring speed, all models in turn"

        def tell(progress: Mapping[str, Any]) -> None:
            self._tell("speed", what, progress["step"], progress["steps"])

        self._tell("speed", what)
        settings = {p.name: c.settings.model_dump(mode="json") for p, c in zip(self.planned, chosen, strict=True)}
        entries = self.recipe.entries
        full = [p.name for p in self.planned if entries[p.name].dense and entries[p.name].how == "fixed"]
        reference = full[0] if full else "dense at full size"
        if not full:
            # its warm-up may be longer than the default number of steps, and does not matter here
            settings[reference] = self.recipe.train.model_dump(mode="json") | {"warmup_steps": None}
        given = {"settings": settings, "reference": reference, "vocab_size": self.data.vocab_size}
        return self.way.worker.run("speed", given | self.recipe.speed.model_dump(), tell)
