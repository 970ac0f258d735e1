"""The comparison: match sizes, tune, train every entry on every seed, measure speed; stop and go on at any point."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relinear.compare.counting import NGRAM, count_ngrams
from relinear.compare.folder import BLOCK_LOSSES, FORMAT, RESULTS, RUN, SPEED, check_same, now, record_start
from relinear.compare.gaps import gap
from relinear.compare.plan import Event, OnEvent, Planned, plan_comparison
from relinear.compare.results import comparison_result, entry_result
from relinear.compare.series import BUDGETS, at_budget, chosen_by, over_budgets
from relinear.compare.settings import CompareSettings, Tune, lasting
from relinear.compare.sharing import Piece, Series, Work, alone_at, carry_out, check_sharing, worker_log
from relinear.compare.tune import Found, Point, Trials, beside, grid_search, open_study, study_path
from relinear.compare.worker import InProcess, Worker
from relinear.data import prepare_data
from relinear.models import model_place, preset_config, preset_names
from relinear.system.files import read_json, write_json, writing
from relinear.system.lock import only_process_in
from relinear.train.run import read_result
from relinear.train.settings import TrainSettings
from relinear.train.trainer import NonFiniteLossError

__all__ = [
    "RESULTS",
    "Event",
    "Planned",
    "Way",
    "begun",
    "carried_out",
    "circumstances",
    "compare",
    "locked",
    "plan_comparison",
]

#: folder of the short runs and their studies
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
        What ``results.json`` holds: see ``docs/compare.md``.

    Raises:
        ValueError: for settings that are wrong or cannot be matched, data that cannot be read (nothing is written
            then), a directory that holds another comparison, a loss that is not finite.
        OSError: if ``out_dir`` cannot be written.
    """
    recipe = CompareSettings.load(recipe)
    if recipe.sizes is not None:
        raise ValueError("the recipe has sizes: start it with relinear scale (relinear.compare.scale)")
    return carried_out(begun, recipe, Path(out_dir), isolate=isolate, shared=shared, on_event=on_event)


@dataclasses.dataclass(frozen=True)
class Way:
    """How work is done: its directory, who trains, whether with others, and who is told."""

    out_dir: Path
    worker: Worker | InProcess
    shared: bool
    on_event: OnEvent


Begun = Callable[[CompareSettings, Path, Way], contextlib.AbstractContextManager[Work]]


def carried_out(
    begin: Begun, recipe: CompareSettings, out_dir: Path, *, isolate: bool, shared: bool, on_event: OnEvent
) -> dict[str, Any]:
    """Begin work in ``out_dir``, or go on with it, and return its results; arguments as in ``compare``."""
    worker = Worker(worker_log(out_dir, shared)) if isolate else InProcess()
    with contextlib.closing(worker), begin(recipe, out_dir, Way(out_dir, worker, shared, on_event)) as work:
        carry_out(out_dir, work.waiting, shared)
        return work.results()


@contextlib.contextmanager
def begun(recipe: CompareSettings, out_dir: Path, way: Way) -> Iterator[Work]:
    """Check everything, then hold ``out_dir`` for the comparison and note what it is, unless it has ended."""
    check_same(out_dir, recipe.model_dump(mode="json"))
    if (out_dir / RESULTS).is_file():
        yield Series(out_dir / RESULTS)
        return
    for name in recipe.entries:
        model_place(recipe.settings_of(name).model)
        _check_tunable(recipe, name)
    data = prepare_data(recipe.train.data, on_progress=lambda what, done: way.on_event(Event("data", what, done)))
    for name in recipe.entries:
        if recipe.settings_of(name).data != recipe.train.data:
            raise ValueError(f"entries.{name}.set changes the data; all entries of a comparison share one corpus")
    planned = plan_comparison(recipe, data.vocab_size, way.on_event)
    with locked(recipe, out_dir, way, planned, data) as started:
        if recipe.budgets is None:
            with writing(study_path(out_dir / TUNING, way.shared)):
                yield _Comparison(recipe, out_dir, planned, data, way, started)
            return
        budgets = recipe.budgets

        def begin(found: list[dict[str, Any]]) -> Any:
            at_one = at_budget(recipe, len(found), chosen_by(found))
            return begun(at_one, out_dir / BUDGETS / str(budgets[len(found)]), way)

        def summed_up(found: list[dict[str, Any]]) -> dict[str, Any]:
            return over_budgets(recipe, found) | circumstances(started)

        with Series(out_dir / RESULTS, len(budgets), begin, summed_up) as series:
            yield series


@contextlib.contextmanager
def locked(
    recipe: CompareSettings, out_dir: Path, way: Way, planned: list[Planned], data: Any = None
) -> Iterator[dict[str, Any]]:
    """Hold ``out_dir`` for work on ``recipe``; what ``run.json`` says there, which is written if it is not."""
    described = recipe.model_dump(mode="json")
    with only_process_in(out_dir, shared=way.shared):
        with alone_at(out_dir, "start", way.shared):
            check_same(out_dir, described)  # another process may have been here since
            check_sharing(out_dir / TUNING, "a comparison", way.shared)
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
        raise ValueError(
            f"{name}: tune.initializer_range is for models drawn anew, of presets; {model!r} brings its weights"
        )


@dataclasses.dataclass
class _Tuning:
    """What was tried for an entry and found best; ``results.json`` has it without what is None."""

    trials: list[dict[str, Any]]
    edge: bool = False
    initializer_edge: bool | None = None
    warmup_ratio: float | None = None
    warmup_edge: bool | None = None
    full_length: dict[str, Any] | None = None
    diverged: list[float] | None = None
    initializer_range: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As ``results.json`` has it."""
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclasses.dataclass(frozen=True)
class _Choice:
    """An entry's settings with what tuning found, and what it tried (None where nothing was)."""

    settings: TrainSettings
    tuning: _Tuning | None


@dataclasses.dataclass(frozen=True)
class _Searched:
    """The search of an entry at one warm-up: what it came to, or None and the trials that it needs first."""

    ratio: float | None
    planned: Planned
    trials: Trials
    found: Found | None
    missing: list[Piece]


def _at(settings: TrainSettings, rate: float, initializer_range: float | None) -> TrainSettings:
    """``settings`` at a learning rate and, unless it is None, an initialisation."""
    overrides = dict(settings.model_overrides)
    if initializer_range is not None:
        overrides["initializer_range"] = initializer_range
    return settings.updated(learning_rate=rate, model_overrides=overrides)


def _of_warmup(name: str, ratio: float | None) -> tuple[str, str]:
    """The study of an entry's trials at a warm-up that is searched, and how the folders of its runs begin."""
    return (name, "") if ratio is None else (f"{name}, warm-up {ratio:g}", f"warmup-{ratio:g}-")


def _hopeless(name: str, error: ValueError) -> Piece:
    """A piece that cannot be done, and says why."""

    def tell() -> None:
        raise ValueError(f"{name}: {error}") from error

    return Piece(f"tuned-{name}", lambda: False, tell)


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
        self.way, self.on_event, self.started = way, way.on_event, started
        #: what names of pieces begin with, where the work is of several comparisons
        self.prefix = "".join(f"{part}-" for part in out_dir.relative_to(way.out_dir).parts)
        #: the best search of an entry, and what had been tried by its end
        self.searched: dict[str, tuple[_Searched, _Tuning]] = {}
        self.chosen: dict[str, _Choice] = {}
        #: of final runs that ended here
        self.records: dict[Path, dict[str, Any]] = {}
        self.studies: dict[str, Trials] = {}
        self.ended = 0
        self.total = len(planned) * len(recipe.seeds)
        if recipe.tune is not None:
            trials = len(recipe.tune.learning_rates) + len(recipe.tune.initializer_range or ())
            trials *= len(recipe.tune.warmup_ratio or (None,))
            self.total += sum(self._is_tuned(p.name) for p in planned) * trials
            self.total += 3 * len(planned) * recipe.tune.check_full_length

    def results(self) -> dict[str, Any]:
        """Return what ``results.json`` holds."""
        return read_json(self.out_dir / RESULTS)

    def waiting(self) -> list[Piece]:
        """Return the pieces that could be done now: trials before final runs, and what rests on these."""
        tuning, runs = [], []
        self._forget_diverged()
        for planned in self.planned:
            try:
                tuning += self._settle(planned)
            except ValueError as error:  # diverged wherever it was tried: the others are not held up by it
                tuning.append(_hopeless(planned.name, error))
            if planned.name in self.chosen:
                runs += [self._final_piece(planned.name, seed) for seed in self.recipe.seeds]
        waiting = [piece for piece in runs if not piece.is_done()]
        self.ended = len(runs) - len(waiting) + sum(len(trials.rows()) for trials in self.studies.values())
        self.total = max(self.total, self.ended)
        found = tuning + waiting or [piece for piece in self._sums() if not piece.is_done()][:1]
        return [dataclasses.replace(piece, name=f"{self.prefix}{piece.name}") for piece in found]

    def _sums(self) -> list[Piece]:
        """What is done one after the other once all runs have ended."""
        pieces = []
        if self.recipe.ngram_order is not None:
            pieces.append(Piece("ngram", (self.out_dir / NGRAM).is_file, self._count))
        if self.recipe.speed.seconds:
            pieces.append(Piece("speed", (self.out_dir / SPEED).is_file, self._speed))
        return [*pieces, Piece("results", (self.out_dir / RESULTS).is_file, self._sum_up)]

    def _final_piece(self, name: str, seed: int) -> Piece:
        folder, settings = self._folder(name, seed), self.chosen[name].settings

        def is_done() -> bool:
            ended = folder in self.records or read_result(folder) is not None
            return ended and not self._outdated(name, seed, settings)

        return Piece(f"run-{name}-{seed}", is_done, lambda: self._final_run(name, settings, seed))

    def _sum_up(self) -> None:
        """Write the results; what did not end here is read by the job that made it."""
        for planned, seed in itertools.product(self.planned, self.recipe.seeds):
            folder = self._folder(planned.name, seed)
            if folder not in self.records:
                self._final_run(planned.name, self.chosen[planned.name].settings, seed)
            if folder not in self.records:
                return  # another rate is taken: there is more to be done
        write_json(self.out_dir / RESULTS, self._results())

    def _results(self) -> dict[str, Any]:
        counted, speed, gaps = self._count(), self._speed(), self._gaps()
        entries = []
        for planned in self.planned:
            name, choice = planned.name, self.chosen[planned.name]
            tuning = choice.tuning and choice.tuning.to_dict()
            runs = [{"seed": seed, **self.records[self._folder(name, seed)]} for seed in self.recipe.seeds]
            entry = entry_result(planned, choice.settings, tuning, runs, speed.get(name))
            entries.append(entry | {"dense": self.recipe.entries[name].dense, "gap": gaps.get(name)})
        return {
            "format": FORMAT,
            **comparison_result(self.recipe, self.data, self.planned, entries, counted),
            **circumstances(self.started),
            "finished": now(),
        }

    def _count(self) -> dict[str, Any] | None:
        if self.recipe.ngram_order is None:
            return None
        self.on_event(Event("ngram", f"counting {self.recipe.ngram_order}-grams", 0, 0, self.ended, self.total))
        return count_ngrams(self.recipe, self.data, self.out_dir)

    def _gaps(self) -> dict[str, dict[str, Any]]:
        """Of every entry but the reference, by name."""
        if self.recipe.reference is None:
            return {}
        losses = {p.name: [self._losses(p.name, seed) for seed in self.recipe.seeds] for p in self.planned}
        reference = losses.pop(self.recipe.reference)
        return {name: gap(own, reference) for name, own in losses.items()}

    def _losses(self, name: str, seed: int) -> np.ndarray:
        """A run's losses by validation block; its one loss where an earlier version did not keep them."""
        folder = self._folder(name, seed)
        if (folder / BLOCK_LOSSES).is_file():
            return np.load(folder / BLOCK_LOSSES, allow_pickle=False)
        return np.asarray([read_result(folder).validation_loss])

    # Tuning

    def _is_tuned(self, name: str) -> bool:
        return self.recipe.tune is not None and self.recipe.entries[name].learning_rate is None

    def _settle(self, planned: Planned) -> list[Piece]:
        """The trials that an entry's choice of rate, initialisation and warm-up needs first; else it is ``chosen``."""
        settings = self.recipe.tune
        if planned.name in self.chosen:
            return []
        if settings is None:
            self.chosen[planned.name] = _Choice(planned.settings, None)
            return []
        rate, spread, ratio = planned.settings.learning_rate, None, None
        tuning, trials = None, None
        if self._is_tuned(planned.name):
            if planned.name not in self.searched:
                searches = self._searches(planned, settings)
                missing = [piece for search in searches for piece in search.missing]
                if missing:
                    return missing
                best = min(searches, key=lambda search: search.found.loss)  # type: ignore[union-attr]
                self.searched[planned.name] = best, self._tuned(settings, searches, best)
            best, tuning = self.searched[planned.name]
            tuning = dataclasses.replace(tuning)
            planned, trials, ratio = best.planned, best.trials, best.ratio
            rate, spread = best.found.rate, best.found.initializer_range  # type: ignore[union-attr]
        if settings.check_full_length:
            if trials is None or settings.fraction < 1:  # else tuning's own are of full length
                study, prefix = _of_warmup(planned.name, ratio)
                trials = self._trials(planned, f"{study}, full length", 1.0, f"full-length-{prefix}")
            full, lacking = trials.advance(beside(settings, rate, spread))
            if full is None:
                return self._trial_pieces(trials, lacking)
            tuning = tuning or _Tuning([])
            tuning.edge = full.edge  # of the rate that is used
            rows = self._told(planned, trials.rows(), 1.0, ratio)
            tuning.full_length = {"trials": rows, "from": rate, "moved": full.rate != rate, "edge": full.edge}
            rate = full.rate
        if tuning is not None:
            tuning.initializer_range = spread
            rate = self._below_diverged(planned.name, rate, tuning)
        self.chosen[planned.name] = _Choice(_at(planned.settings, rate, spread), tuning)
        return []

    def _searches(self, planned: Planned, settings: Tune) -> list[_Searched]:
        """The search over rates and initialisations at each of the warm-ups: what one lacks can be done meanwhile."""
        written = None if settings.initializer_range is None else self._written_range(planned)
        ratios: tuple[float | None, ...] = settings.warmup_ratio or (None,)
        searches = []
        for ratio in (None,) if self.recipe.keeps_warmup(planned.name) else ratios:
            at = planned
            if ratio is not None:
                warmed = planned.settings.updated(warmup_steps=None, warmup_ratio=ratio)
                at = dataclasses.replace(planned, settings=warmed)
            study, prefix = _of_warmup(planned.name, ratio)
            trials = self._trials(at, study, settings.fraction, prefix)
            found, lacking = trials.advance(grid_search(settings, written))
            searches.append(_Searched(ratio, at, trials, found, self._trial_pieces(trials, lacking)))
        return searches

    def _tuned(self, settings: Tune, searches: list[_Searched], best: _Searched) -> _Tuning:
        """What was tried at all warm-ups, ``best`` being that of the lowest loss."""
        found = best.found
        assert found is not None
        if not math.isfinite(found.loss):
            raise ValueError(
                f"training diverged at every learning rate of the grid {list(settings.learning_rates)}; lower "
                "tune.learning_rates"
            )
        rows = [row for s in searches for row in self._told(s.planned, s.trials.rows(), settings.fraction, s.ratio)]
        tuning = _Tuning(rows, found.edge, found.initializer_edge, best.ratio)
        if best.ratio is not None:
            # with two of them each is an end
            tuning.warmup_edge = len(searches) > 2 and best.ratio in (searches[0].ratio, searches[-1].ratio)
        return tuning

    def _given_up(self, name: str) -> list[float]:
        """The rates at which a final run of an entry diverged."""
        path = self.out_dir / TUNING / name / DIVERGED
        return read_json(path) if path.is_file() else []

    def _below_diverged(self, name: str, rate: float, tuning: _Tuning) -> float:
        """``rate``, or the next lower one of those tried at which no final run has diverged; told in ``tuning``."""
        given_up = self._given_up(name)
        lower = [
            trial["learning_rate"]
            for trial in [*tuning.trials, *(tuning.full_length or {}).get("trials", ())]
            if trial["validation_loss"] is not None
            and trial.get("initializer_range") == tuning.initializer_range
            and trial.get("warmup_ratio") in (None, tuning.warmup_ratio)
        ]
        while rate in given_up:
            tuning.diverged = [*(tuning.diverged or ()), rate]
            below = [other for other in lower if other < rate]
            if not below:
                raise ValueError(
                    f"final runs diverged at {', '.join(f'{r:g}' for r in tuning.diverged)}, and no lower learning "
                    "rate was tried; take a lower grid (tune.learning_rates)"
                )
            rate = max(below)
        return rate

    def _forget_diverged(self) -> None:
        """Choose again where a final run, here or in a process that shares the work, has diverged since."""
        for name, choice in list(self.chosen.items()):
            if choice.tuning is not None and choice.settings.learning_rate in self._given_up(name):
                del self.chosen[name]

    def _written_range(self, planned: Planned) -> float | None:
        if self.recipe.keeps_initialisation(planned.name):
            return None
        return preset_config(planned.settings.model, **planned.settings.model_overrides).initializer_range

    def _short(self, planned: Planned, fraction: float) -> TrainSettings:
        short = lasting(planned.settings, fraction)
        return short.updated(seed=self.recipe.tune.seed, eval_every=0, save_model=False)

    def _told(
        self, planned: Planned, trials: list[dict[str, Any]], fraction: float, ratio: float | None
    ) -> list[dict[str, Any]]:
        """Trials with what their runs have in common: everything needed to say what was tried."""
        short = self._short(planned, fraction)
        common = {"steps": short.steps, "seed": short.seed} | ({} if ratio is None else {"warmup_ratio": ratio})
        return [trial | common for trial in trials]

    def _trials(self, planned: Planned, study: str, fraction: float, prefix: str) -> Trials:
        folder = self.out_dir / TUNING

        def evaluate(rate: float, spread: float | None) -> float | None:
            stated = "" if spread is None else f", initializer_range {spread:g}"
            what = f"tuning {study}, learning rate {rate:g}{stated}"
            name = f"{prefix}{rate:g}" + ("" if spread is None else f"-init-{spread:g}")
            settings = _at(self._short(planned, fraction), rate, spread)
            try:
                return self._run("tune", what, settings, folder / planned.name / name)["validation_loss"]
            except NonFiniteLossError:
                return None

        if study not in self.studies:
            self.studies[study] = Trials(open_study(folder, study, shared=self.way.shared), evaluate)
        return self.studies[study]

    def _trial_pieces(self, trials: Trials, points: list[Point]) -> list[Piece]:
        study = next(study for study, known in self.studies.items() if known is trials)

        def piece(point: Point) -> Piece:
            name = "-".join(f"{value:g}" for value in point if value is not None)
            key = f"tuning-{study}-{name}"
            return Piece(key, lambda: trials.known(*point) is not None, lambda: trials.loss(*point))

        return [piece(point) for point in points]

    # Training

    def _folder(self, name: str, seed: int) -> Path:
        return self.out_dir / "runs" / name / f"seed-{seed}"

    def _final_run(self, name: str, settings: TrainSettings, seed: int) -> None:
        """Train an entry on a seed. Where it diverges at a rate that was tuned, all its seeds take a lower one."""
        what = name if len(self.recipe.seeds) == 1 else f"{name}, seed {seed}"
        folder = self._folder(name, seed)
        if self._outdated(name, seed, settings):
            shutil.rmtree(folder)
            self.records.pop(folder, None)
        try:
            self.records[folder] = self._run("train", what, settings.updated(seed=seed), folder)
        except NonFiniteLossError:
            if self.chosen[name].tuning is None:
                raise
            write_json(self.out_dir / TUNING / name / DIVERGED, sorted({*self._given_up(name), settings.learning_rate}))

    def _outdated(self, name: str, seed: int, settings: TrainSettings) -> bool:
        """Whether a final run was made at a rate that was given up since, because another seed's diverged at it."""
        path, given_up = self._folder(name, seed) / RUN, self._given_up(name)
        if not given_up or not path.is_file():
            return False
        rate = read_json(path)["settings"]["learning_rate"]
        return rate in given_up and rate != settings.learning_rate

    def _run(self, stage: str, what: str, settings: TrainSettings, folder: Path) -> dict[str, Any]:
        def tell(progress: Mapping[str, Any]) -> None:
            detail = {key: progress[key] for key in ("loss", "validation_loss", "tokens_per_second")}
            phase = {"evaluate": " (evaluating)", "prepare": " (preparing)"}.get(progress["phase"], "")
            self.on_event(
                Event(stage, what + phase, progress["step"], progress["steps"], self.ended, self.total, detail)
            )

        self.on_event(Event(stage, what, 0, settings.steps, self.ended, self.total))
        arguments = {"settings": settings.model_dump(mode="json"), "out_dir": str(folder)}
        try:
            return self.way.worker.run("train", arguments, tell)
        except ValueError as error:
            error.args = (f"{what}: {error}",)
            raise

    # Speed

    def _speed(self) -> dict[str, Any]:
        path, speed = self.out_dir / SPEED, self.recipe.speed
        if speed.seconds == 0:
            return {}
        if path.is_file():
            return read_json(path)
        what = "measuring speed, all models in turn"

        def tell(progress: Mapping[str, Any]) -> None:
            self.on_event(Event("speed", what, progress["step"], progress["steps"], self.ended, self.total))

        self.on_event(Event("speed", what, 0, 0, self.ended, self.total))
        settings = {p.name: self.chosen[p.name].settings.model_dump(mode="json") for p in self.planned}
        entries = self.recipe.entries
        full = [p.name for p in self.planned if entries[p.name].dense and entries[p.name].how == "fixed"]
        reference = full[0] if full else "dense at full size"
        if not full:
            # its warm-up may be longer than the default number of steps, and does not matter here
            settings[reference] = self.recipe.train.model_dump(mode="json") | {"warmup_steps": None}
        arguments = {
            "settings": settings,
            "reference": reference,
            "vocab_size": self.data.vocab_size,
            "seconds": speed.seconds,
            "rounds": speed.rounds,
        }
        measured = self.way.worker.run("speed", arguments, tell)
        write_json(path, measured)
        return measured
