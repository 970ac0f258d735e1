"""The comparison: match sizes, tune, train every entry on every seed, measure speed; stop and go on at any point."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relinear.compare.counting import count_ngrams
from relinear.compare.folder import BLOCK_LOSSES, FORMAT, RESULTS, RUN, SPEED, check_same, now, record_start
from relinear.compare.gaps import gap
from relinear.compare.plan import Event, OnEvent, Planned, plan_comparison
from relinear.compare.results import comparison_result, entry_result
from relinear.compare.series import carry_out_budgets
from relinear.compare.settings import CompareSettings, Tune, lasting
from relinear.compare.sharing import CLAIMS, Piece, check_sharing, share_out, worker_log
from relinear.compare.tune import DivergedError, NotYet, Point, Trials, check_neighbours, open_study, study_path, tune
from relinear.compare.worker import InProcess, Worker
from relinear.data import prepare_data
from relinear.models import model_place, preset_config, preset_names
from relinear.system.files import read_json, write_json, writing
from relinear.system.lock import only_process_in
from relinear.train.run import read_result
from relinear.train.settings import TrainSettings
from relinear.train.trainer import NonFiniteLossError

__all__ = ["RESULTS", "Event", "Planned", "compare", "plan_comparison"]

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
    out_dir = Path(out_dir)
    if recipe.sizes is not None:
        raise ValueError("the recipe has sizes: start it with relinear scale (relinear.compare.scale)")
    described = recipe.model_dump(mode="json")
    check_same(out_dir, described)
    if (out_dir / RESULTS).is_file():
        return read_json(out_dir / RESULTS)
    for name in recipe.entries:
        model_place(recipe.settings_of(name).model)
        _check_tunable(recipe, name)
    data = prepare_data(
        recipe.train.data, on_progress=lambda what, done: on_event(Event("data", what, done, detail={}))
    )
    for name in recipe.entries:
        if recipe.settings_of(name).data != recipe.train.data:
            raise ValueError(f"entries.{name}.set changes the data; all entries of a comparison share one corpus")
    planned = plan_comparison(recipe, data.vocab_size, on_event)
    with only_process_in(out_dir, shared=shared):
        start = only_process_in(out_dir / CLAIMS / "start", patience=60, required=True)
        with start if shared else contextlib.nullcontext():
            check_same(out_dir, described)  # another process may have been here since
            check_sharing(out_dir / TUNING, "a comparison", shared)
            if (out_dir / RESULTS).is_file():
                return read_json(out_dir / RESULTS)
            started = record_start(out_dir, described, planned, data)
        if recipe.budgets is not None:

            def carry_out(at_one: CompareSettings, folder: Path) -> dict[str, Any]:
                return compare(at_one, folder, isolate=isolate, shared=shared, on_event=on_event)

            results = carry_out_budgets(recipe, out_dir, carry_out) | _start(started)
        else:
            worker = Worker(worker_log(out_dir, shared)) if isolate else InProcess()
            try:
                state = _Comparison(recipe, out_dir, planned, data, worker, on_event, started, shared)
                with writing(study_path(out_dir / TUNING, shared)):
                    results = state.share() if shared else state.carry_out()
            finally:
                worker.close()
        if not (out_dir / RESULTS).is_file():  # who shares the work may have written the same
            write_json(out_dir / RESULTS, results)
    return results


def _start(record: Mapping[str, Any]) -> dict[str, Any]:
    """What results take from ``run.json``."""
    return {key: record[key] for key in ("recipe", "machine", "command")}


def _check_tunable(recipe: CompareSettings, name: str) -> None:
    """Refuse a search over initialisations of a model whose weights are read."""
    tuned = recipe.tune is not None and recipe.tune.initializer_range is not None
    model = recipe.settings_of(name).model
    if tuned and recipe.entries[name].learning_rate is None and model not in preset_names():
        raise ValueError(
            f"{name}: tune.initializer_range is for models drawn anew, of presets; {model!r} brings its weights"
        )


@dataclasses.dataclass(frozen=True)
class _Choice:
    """An entry's settings with what tuning found, and what it tried (None where nothing was)."""

    settings: TrainSettings
    record: dict[str, Any] | None


class _TookLowerError(Exception):
    """A final run diverged at the rate that was chosen, and the entry goes on at a lower one."""


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
        worker: Worker | InProcess,
        on_event: OnEvent,
        started: Mapping[str, Any],
        shared: bool,
    ) -> None:
        self.recipe, self.out_dir, self.planned, self.data = recipe, out_dir, planned, data
        self.worker, self.on_event, self.started, self.shared = worker, on_event, started, shared
        self.chosen: dict[str, _Choice] = {}
        self.studies: dict[str, Trials] = {}
        self.ended = 0
        self.total = len(planned) * len(recipe.seeds)
        if recipe.tune is not None:
            trials = len(recipe.tune.learning_rates) + len(recipe.tune.initializer_range or ())
            trials *= len(recipe.tune.warmup_ratio or (None,))
            self.total += sum(self._is_tuned(p.name) for p in planned) * trials
            self.total += 3 * len(planned) * recipe.tune.check_full_length

    def share(self) -> dict[str, Any]:
        """With others: whatever run nobody else holds, until all have ended; then one of them sums up."""
        share_out(self.out_dir, self._waiting)
        path = self.out_dir / RESULTS

        def sum_up() -> None:
            write_json(path, self.carry_out())

        share_out(self.out_dir, lambda: [] if path.is_file() else [Piece("results", path.is_file, sum_up)])
        return read_json(path)

    def _waiting(self) -> list[Piece]:
        """The runs that have not ended and could be done now; what tuning has settled goes to ``chosen``."""
        found = []
        self._forget_diverged()
        for planned in self.planned:
            try:
                choice = self._choice(planned)
            except NotYet as search:
                found += [self._trial_piece(trials, point) for trials, point in search.missing]
                continue
            except ValueError as error:  # diverged wherever it was tried: the others are not held up by it
                found.append(_hopeless(planned.name, error))
                continue
            found += [self._final_piece(planned.name, choice.settings, seed) for seed in self.recipe.seeds]
        waiting = [piece for piece in found if not piece.is_done()]
        self.ended = len(found) - len(waiting) + sum(len(trials.rows()) for trials in self.studies.values())
        return waiting

    def _trial_piece(self, trials: Trials, point: Point) -> Piece:
        name = "-".join(f"{value:g}" for value in point if value is not None)
        study = next(study for study, found in self.studies.items() if found is trials)
        return Piece(f"tuning-{study}-{name}", lambda: trials.known(*point) is not None, lambda: trials.loss(*point))

    def _final_piece(self, name: str, settings: TrainSettings, seed: int) -> Piece:
        def do() -> None:
            with contextlib.suppress(_TookLowerError):  # what is waiting then is another piece
                self._final_run(name, settings, seed)

        def is_done() -> bool:
            return read_result(self._folder(name, seed)) is not None and not self._outdated(name, seed, settings)

        return Piece(f"run-{name}-{seed}", is_done, do)

    def carry_out(self) -> dict[str, Any]:
        for planned in self.planned:
            self._choice(planned)  # all are tuned before the first is trained
        runs = {p.name: self._all_seeds(p) for p in self.planned}
        final = {p.name: self._choice(p).settings for p in self.planned}
        counted = self._count()
        speed = self._speed(final)
        gaps = self._gaps()
        entries = [
            entry_result(p, final[p.name], self._choice(p).record, runs[p.name], speed.get(p.name))
            | {"dense": self.recipe.entries[p.name].dense, "gap": gaps.get(p.name)}
            for p in self.planned
        ]
        return {
            "format": FORMAT,
            **comparison_result(self.recipe, self.data, self.planned, entries, counted),
            **_start(self.started),
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

    def _choice(self, planned: Planned) -> _Choice:
        if planned.name not in self.chosen:
            self.chosen[planned.name] = self._tune(planned)
        return self.chosen[planned.name]

    def _tune(self, planned: Planned) -> _Choice:
        """The entry's settings with the learning rate, the initialisation and the warm-up that suit it."""
        settings = self.recipe.tune
        if settings is None:
            return _Choice(planned.settings, None)
        rate, spread, record, trials = planned.settings.learning_rate, None, None, None
        if self._is_tuned(planned.name):
            planned, rate, spread, record, trials = self._searched(planned, settings)
        given = planned.settings
        if settings.check_full_length:
            ratio = (record or {}).get("warmup_ratio")
            if trials is None or settings.fraction < 1:  # else tuning's own are of full length
                study, prefix = _of_warmup(planned.name, ratio)
                trials = self._trials(planned, f"{study}, full length", 1.0, f"full-length-{prefix}")
            rate, full = check_neighbours(settings, trials, rate, spread)
            full["trials"] = self._told(planned, full["trials"], 1.0, ratio)
            # "edge" speaks of the rate that is used
            record = (record or {"trials": []}) | {"full_length": full, "edge": full["edge"]}
        if record is not None:
            rate = self._below_diverged(planned.name, rate, spread, record)
        if record is not None and spread is not None:
            record["initializer_range"] = spread
        return _Choice(_at(given, rate, spread), record)

    def _searched(
        self, planned: Planned, settings: Tune
    ) -> tuple[Planned, float, float | None, dict[str, Any], Trials]:
        """The best rate and initialisation at the best of the warm-ups, the entry with that, what was tried there and
        at the others, and the best one's study."""
        written = None if settings.initializer_range is None else self._written_range(planned)
        ratios: tuple[float | None, ...] = settings.warmup_ratio or (None,)
        if self.recipe.keeps_warmup(planned.name):
            ratios = (None,)
        found: list[tuple[Any, ...]] = []
        tried: list[dict[str, Any]] = []
        missing: list[tuple[Trials, Point]] = []
        diverged = None
        for ratio in ratios:
            at = planned
            if ratio is not None:
                warmed = planned.settings.updated(warmup_steps=None, warmup_ratio=ratio)
                at = dataclasses.replace(planned, settings=warmed)
            study, prefix = _of_warmup(planned.name, ratio)
            trials = self._trials(at, study, settings.fraction, prefix)
            try:
                rate, spread, record = tune(settings, trials, written)
                if ratio is not None:
                    record["warmup_ratio"] = ratio
                found.append((trials.loss(rate, spread), at, rate, spread, record, trials))
            except NotYet as search:  # what other warm-ups lack can be done meanwhile
                missing += search.missing
            except DivergedError as error:  # another warm-up may do
                diverged = error
            tried += self._told(at, trials.rows(), settings.fraction, ratio)
        if missing:
            raise NotYet(missing)
        if diverged is not None and not found:
            raise diverged
        _, at, rate, spread, record, trials = min(found, key=lambda one: one[0])
        record["trials"] = tried
        if "warmup_ratio" in record:
            # with two of them each is an end
            record["warmup_edge"] = len(ratios) > 2 and record["warmup_ratio"] in (ratios[0], ratios[-1])
        return at, rate, spread, record, trials

    def _given_up(self, name: str) -> list[float]:
        """The rates at which a final run of an entry diverged."""
        path = self.out_dir / TUNING / name / DIVERGED
        return read_json(path) if path.is_file() else []

    def _below_diverged(self, name: str, rate: float, spread: float | None, record: dict[str, Any]) -> float:
        """``rate``, or the next lower one of those tried at which no final run has diverged; told in ``record``."""
        given_up = self._given_up(name)
        lower = [
            trial["learning_rate"]
            for trial in [*record["trials"], *record.get("full_length", {}).get("trials", ())]
            if trial["validation_loss"] is not None
            and trial.get("initializer_range") == spread
            and trial.get("warmup_ratio") in (None, record.get("warmup_ratio"))
        ]
        while rate in given_up:
            record.setdefault("diverged", []).append(rate)
            below = [other for other in lower if other < rate]
            if not below:
                raise ValueError(
                    f"{name}: final runs diverged at {', '.join(f'{r:g}' for r in record['diverged'])}, and no "
                    "lower learning rate was tried; take a lower grid (tune.learning_rates)"
                )
            rate = max(below)
        return rate

    def _forget_diverged(self) -> None:
        """Choose again where a final run, here or in a process that shares the work, has diverged since."""
        for name, choice in list(self.chosen.items()):
            if choice.record is not None and choice.settings.learning_rate in self._given_up(name):
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
            opened = open_study(folder, study, shared=self.shared)
            self.studies[study] = Trials(opened, evaluate, shared=self.shared)
        return self.studies[study]

    # Training

    def _folder(self, name: str, seed: int) -> Path:
        return self.out_dir / "runs" / name / f"seed-{seed}"

    def _all_seeds(self, planned: Planned) -> list[dict[str, Any]]:
        """The final runs of an entry, all at one rate: where one diverges, all are made anew at a lower one."""
        while True:
            settings = self._choice(planned).settings
            try:
                return [self._final_run(planned.name, settings, seed) for seed in self.recipe.seeds]
            except _TookLowerError:
                self._forget_diverged()

    def _final_run(self, name: str, settings: TrainSettings, seed: int) -> dict[str, Any]:
        what = name if len(self.recipe.seeds) == 1 else f"{name}, seed {seed}"
        folder = self._folder(name, seed)
        if self._outdated(name, seed, settings):
            shutil.rmtree(folder)
        try:
            return {"seed": seed} | self._run("train", what, settings.updated(seed=seed), folder)
        except NonFiniteLossError as error:
            if self.chosen[name].record is None:
                raise
            given_up = {*self._given_up(name), settings.learning_rate}
            write_json(self.out_dir / TUNING / name / DIVERGED, sorted(given_up))
            raise _TookLowerError(f"{what}: {error}") from error

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
            result = self.worker.run("train", arguments, tell)
        except ValueError as error:
            error.args = (f"{what}: {error}",)
            raise
        self.ended += 1
        self.total = max(self.total, self.ended)
        return result

    # Speed

    def _speed(self, final: Mapping[str, TrainSettings]) -> dict[str, Any]:
        path, speed = self.out_dir / SPEED, self.recipe.speed
        if speed.seconds == 0:
            return {}
        if path.is_file():
            return read_json(path)
        what = "measuring speed, all models in turn"

        def tell(progress: Mapping[str, Any]) -> None:
            self.on_event(Event("speed", what, progress["step"], progress["steps"], self.ended, self.total))

        self.on_event(Event("speed", what, 0, 0, self.ended, self.total))
        settings = {name: value.model_dump(mode="json") for name, value in final.items()}
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
        measured = self.worker.run("speed", arguments, tell)
        write_json(path, measured)
        return measured
