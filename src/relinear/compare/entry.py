"""Tune one entry of a comparison, then train it on every seed: a search that asks for rounds of runs."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

from relinear.compare.engine import Run, Search, side_by_side
from relinear.compare.folder import TUNING, seed_folder
from relinear.compare.match import SizedEntry
from relinear.compare.schema import DivergedEntry, Tuning
from relinear.compare.settings import CompareSettings, scaled_run
from relinear.compare.tune import SearchResult, Trials, check_neighbors, grid_search, one_rate
from relinear.models import preset_config
from relinear.system.files import read_json, write_json
from relinear.training.fitting import NonFiniteLossError
from relinear.training.run import RUN
from relinear.training.settings import TrainSettings

#: file in an entry's tuning folder, with the learning rates at which final runs diverged
DIVERGED_FILE = "diverged.json"


@dataclasses.dataclass(frozen=True)
class Choice:
    """What tuning chose for an entry.

    Attributes:
        entry: the entry at its size, in the chosen bits.
        learning_rate: the chosen learning rate.
        initializer_range: the chosen initialisation; None keeps the entry's own.
        warmup_ratio: the chosen warm-up; None keeps the entry's own.
        trials: the searches with these settings; each holds its runs by learning rate.
        tuning: the entry's tuning in ``results.json``; None if the entry was not tuned.
    """

    entry: SizedEntry
    learning_rate: float
    initializer_range: float | None = None
    warmup_ratio: float | None = None
    trials: tuple[Trials, ...] = ()
    tuning: Tuning | None = None

    @property
    def settings(self) -> TrainSettings:
        """Return the settings of the final runs, with the first seed."""
        settings = _with_warmup(self.entry.settings, self.warmup_ratio)
        return _with_rate(settings, self.learning_rate, self.initializer_range)


def _with_rate(settings: TrainSettings, rate: float, initializer_range: float | None) -> TrainSettings:
    """Return ``settings`` at a learning rate and, unless it is None, an initialisation."""
    overrides = {} if initializer_range is None else {"initializer_range": initializer_range}
    return settings.replace(learning_rate=rate, model_overrides=dict(settings.model_overrides) | overrides)


def _with_warmup(settings: TrainSettings, ratio: float | None) -> TrainSettings:
    """Return ``settings`` with a warm-up of this share of the steps; None leaves the warm-up unchanged."""
    return settings if ratio is None else settings.replace(warmup_steps=None, warmup_ratio=ratio)


def least_runs(recipe: CompareSettings, entry: SizedEntry) -> list[tuple[str, int, int]]:
    """Return the runs that an entry needs at least: "train" or "tune", how many, and the steps of each.

    A search asks for more if its best value lies at an end of the grid.
    """
    name, search, steps = entry.name, recipe.search_settings, entry.settings.steps
    runs = [("train", len(recipe.seeds), steps)]
    searched = recipe.tunes_rate(name) or bool(entry.candidates)
    if searched:
        trials = len(search.learning_rates) if recipe.tunes_rate(name) else 1
        if recipe.tunes_initializer(name):
            trials += len(search.initializer_range or ())
        trials *= len(recipe.warmup_grid(name)) * max(1, len(entry.candidates))
        runs.append(("tune", trials, scaled_run(entry.settings, search.fraction).steps))
    if search.check_full_length and not (searched and search.fraction == 1):  # else these runs are among the trials
        runs.append(("tune", 3, steps))
    return runs


@dataclasses.dataclass(frozen=True)
class EntrySearch:
    """Find the settings of an entry and train it with them.

    Attributes:
        recipe: the comparison's recipe.
        entry: the entry at its size.
        out_dir: directory of the comparison.
    """

    recipe: CompareSettings
    entry: SizedEntry
    out_dir: Path

    @property
    def _tuning_folder(self) -> Path:
        return self.out_dir / TUNING / self.entry.name

    def run(self) -> Search[Choice | DivergedEntry]:
        """Tune the entry, then train it on every seed; if a final run diverges, all seeds take a lower rate."""
        try:
            tuned = yield from self._tuned()
            while True:
                choice = self._at_rate_without_divergence(tuned)
                losses = yield [self._final_run(choice, seed) for seed in self.recipe.seeds]
                if all(map(math.isfinite, losses)):
                    return choice
                if tuned.tuning is None:
                    raise NonFiniteLossError(f"training diverged at the learning rate {choice.learning_rate:g}")
                write_json(self._tuning_folder / DIVERGED_FILE, sorted({*self._diverged_rates(), choice.learning_rate}))
        except NonFiniteLossError as error:
            return {"name": self.entry.name, "text": str(error)}

    def _tuned(self) -> Search[Choice]:
        """Choose rate, initialisation, warm-up and bits, as far as the recipe tunes them."""
        choice = Choice(self.entry, self.entry.settings.learning_rate)
        if self.recipe.tunes_rate(self.entry.name) or self.entry.candidates:
            choice = yield from self._search_rates()
        if self.recipe.search_settings.check_full_length:
            choice = yield from self._check_at_full_length(choice)
        return choice

    def _search_rates(self) -> Search[Choice]:
        """Choose the best rate and initialisation at the best warm-up and bits, by short runs."""
        warmups = self.recipe.warmup_grid(self.entry.name)
        candidates = self.entry.candidates or (self.entry,)
        pairs = list(itertools.product(warmups, candidates))
        searches = [self._trials(entry, warmup) for warmup, entry in pairs]
        results = yield from side_by_side([self._best_rate(trials) for trials in searches])
        best, trials, (warmup, entry) = min(zip(results, searches, pairs, strict=True), key=lambda row: row[0].loss)
        if not math.isfinite(best.loss):
            grid = list(self.recipe.search_settings.learning_rates)
            raise NonFiniteLossError(f"training diverged at every learning rate of {grid}; lower tune.learning_rates")
        bits = entry.settings.bits
        fewest = bits != 2 and bits == min(self.recipe.match.bits)
        tuning: Any = {
            "trials": [row for search in searches for row in search.rows()],
            "edge": best.edge,
            "initializer_range": best.initializer_range,
            "initializer_edge": best.initializer_edge,
            "warmup_ratio": warmup,
            # with two warm-ups, each would be at an end
            "warmup_edge": None if warmup is None else len(warmups) > 2 and warmup in (warmups[0], warmups[-1]),
            "bits": bits,
            "bits_edge": fewest if len(candidates) > 1 else None,
        }
        tuning = {key: value for key, value in tuning.items() if value is not None}
        return Choice(entry, best.rate, best.initializer_range, warmup, (trials,), tuning)

    def _best_rate(self, trials: Trials) -> Search[SearchResult]:
        """Search the rate and, if that is tuned, the initialisation; or try the rate that the entry has."""
        settings, name = self.entry.settings, self.entry.name
        if not self.recipe.tunes_rate(name):
            return one_rate(trials, settings.learning_rate)
        initializer_range = None
        if self.recipe.tunes_initializer(name):
            initializer_range = preset_config(settings.model, **settings.model_overrides).initializer_range
        return grid_search(self.recipe.search_settings, trials, initializer_range)

    def _check_at_full_length(self, choice: Choice) -> Search[Choice]:
        """Choose the best of the rate and its neighbours by runs of full length."""
        search = self.recipe.search_settings
        if choice.trials and search.fraction == 1:
            (trials,) = choice.trials  # these are of full length
        else:
            trials = self._trials(choice.entry, choice.warmup_ratio, full_length=True)
        best = yield from check_neighbors(search, trials, choice.learning_rate, choice.initializer_range)
        moved = best.rate != choice.learning_rate
        check = {"trials": trials.rows(), "from": choice.learning_rate, "moved": moved, "edge": best.edge}
        tuning: Any = {"trials": [], **(choice.tuning or {}), "edge": best.edge, "full_length": check}
        return dataclasses.replace(choice, learning_rate=best.rate, trials=(*choice.trials, trials), tuning=tuning)

    def _trials(self, entry: SizedEntry, warmup_ratio: float | None, full_length: bool = False) -> Trials:
        """Return the runs of a search at one warm-up and in the bits of ``entry``; none has begun."""
        search = self.recipe.search_settings
        settings = scaled_run(_with_warmup(entry.settings, warmup_ratio), 1.0 if full_length else search.fraction)
        settings = settings.replace(seed=search.seed, eval_every=0, save_model=False)
        # the names of folders and the rows tell this search from the entry's other searches
        prefix = "full-length-" if full_length else ""
        prefix += "" if settings.bits is None else f"{settings.bits}-bits-"
        prefix += "" if warmup_ratio is None else f"warmup-{warmup_ratio:g}-"
        row = {"steps": settings.steps, "seed": settings.seed, "warmup_ratio": warmup_ratio, "bits": settings.bits}
        row = {key: value for key, value in row.items() if value is not None}

        def run_at(rate: float, initializer_range: float | None, folder: Path) -> Run:
            label = f"tuning {entry.name}, learning rate {folder.name}"
            return Run("tune", label, _with_rate(settings, rate, initializer_range), folder)

        return Trials(self._tuning_folder, run_at, prefix, row)

    def _diverged_rates(self) -> list[float]:
        """Return the rates at which a final run of the entry diverged."""
        path = self._tuning_folder / DIVERGED_FILE
        return read_json(path) if path.is_file() else []

    def _at_rate_without_divergence(self, choice: Choice) -> Choice:
        """Return ``choice``, or the next lower rate that was tried and at which no final run has diverged."""
        diverged = sorted(self._diverged_rates(), reverse=True)
        if choice.tuning is None or choice.learning_rate not in diverged:
            return choice
        tried = set[float]().union(
            *(trials.rates_without_divergence(choice.initializer_range) for trials in choice.trials)
        )
        lower = [rate for rate in tried if rate < diverged[-1]]
        if not lower:
            at = ", ".join(f"{rate:g}" for rate in diverged)
            advice = "no lower learning rate was tried; lower tune.learning_rates"
            raise NonFiniteLossError(f"final runs diverged at {at}, and {advice}")
        return dataclasses.replace(choice, learning_rate=max(lower), tuning={**choice.tuning, "diverged": diverged})

    def _final_run(self, choice: Choice, seed: int) -> Run:
        """Return the run of a seed. A run at a rate at which another seed has since diverged is renamed."""
        name = self.entry.name
        seeds = self.recipe.seeds
        diverged = self._diverged_rates()
        folder = seed_folder(self.out_dir, name, seed)
        if diverged and (folder / RUN).is_file():
            rate = read_json(folder / RUN)["settings"]["learning_rate"]
            if rate in diverged:
                folder.rename(self._tuning_folder / f"given-up-{rate:g}-seed-{seed}")
        label = name if len(seeds) == 1 else f"{name}, seed {seed}"
        return Run("train", label, choice.settings.replace(seed=seed), folder)
