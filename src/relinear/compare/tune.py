"""A learning rate, and an initialisation, for every entry: short runs over grids, kept in an optuna study that a killed
run goes on with."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from relinear.compare.settings import Tune
from relinear.system.files import atomic_path, writing
from relinear.system.lock import only_process_in

__all__ = [
    "JOURNAL",
    "STORAGE",
    "Found",
    "Point",
    "Search",
    "Trials",
    "beside",
    "grid_search",
    "open_study",
    "study_path",
]

STORAGE, JOURNAL = "optuna.db", "optuna.journal"
# The ranges are the same for every trial, as optuna asks for; they only have to hold every value.
_LOWEST, _HIGHEST = 1e-12, 1e3


def study_path(folder: Path, shared: bool) -> Path:
    """Return the file of the studies in ``folder``."""
    return folder / (JOURNAL if shared else STORAGE)


def open_study(folder: str | Path, name: str, sampler: Any = None, *, shared: bool = False) -> Any:
    """The optuna study ``name`` in ``folder/optuna.db``; trials that a killed process left running count as failed.

    Args:
        folder, name: where, and of how it is called there.
        sampler: optuna's; its default if None.
        shared: keep it in ``folder/optuna.journal``, which several processes may write to, also over NFS; what others
            have running is left alone.

    Raises:
        ImportError: if optuna is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ImportError("tuning and sweeps need optuna: pip install 'relinear[sweep]'") from error

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if shared:
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        lock: Any = _JournalLock(folder / JOURNAL)
        lock.mend()
        journal = JournalStorage(JournalFileBackend(str(folder / JOURNAL), lock))
        return optuna.create_study(storage=journal, study_name=name, load_if_exists=True, sampler=sampler)
    storage = f"sqlite:///{(folder / STORAGE).resolve()}"
    study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True, sampler=sampler)
    for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    return study


class _JournalLock:
    """Holds an optuna journal by a lock that ends with its holder, and takes from it what was written by halves."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locked = contextlib.ExitStack()

    def acquire(self) -> bool:
        """Wait for the journal; half a line at its end, of a process that died or a full disk, goes."""
        self._locked.enter_context(only_process_in(self.path.parent / ".journal", patience=60, required=True))
        try:
            with writing(self.path), self.path.open("r+b") as file:
                length = file.seek(0, os.SEEK_END)
                file.seek(max(0, length - _LONGEST_LINE))
                kept = file.read().rfind(b"\n") + 1 + max(0, length - _LONGEST_LINE)
                if kept < length:
                    file.truncate(kept)
        except BaseException:
            self.release()
            raise
        return True

    def release(self) -> None:
        """Let others write."""
        self._locked.close()

    def mend(self) -> None:
        """Take out of a journal the halves of lines that earlier versions wrote on behind, which nobody can read."""
        if not self.path.is_file():
            return
        self.acquire()
        try:
            with writing(self.path):
                lines = self.path.read_bytes().splitlines(keepends=True)
            mended = [line[max(0, line.rfind(b'{"op_code"')) :] for line in lines]
            if mended != lines:
                with atomic_path(self.path) as temporary:
                    temporary.write_bytes(b"".join(mended))
        finally:
            self.release()


_LONGEST_LINE = 1 << 20

#: a learning rate, and an initialisation where that is tuned
Point = tuple[float, float | None]
T = TypeVar("T")
#: a search: it yields the points whose losses it goes on with, is sent these, and returns what it came to
Search = Generator[Sequence[Point], Sequence[float], T]


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search came to.

    rate, initializer_range: the best of those tried (None where the initialisation was left out).
    loss: there; infinite where training diverged wherever it was tried.
    edge, initializer_edge: whether they lie at the end of their grids (None where the initialisation was not tuned).
    """

    rate: float
    initializer_range: float | None
    loss: float
    edge: bool
    initializer_edge: bool | None = None


class Trials:
    """The losses of a study by learning rate and initialisation: what it has is not run again.

    Args:
        study: from ``open_study``.
        evaluate: (learning rate, initialisation or None) -> validation loss, or None where training diverged.
    """

    def __init__(self, study: Any, evaluate: Callable[[float, float | None], float | None]) -> None:
        self.study, self.evaluate = study, evaluate

    def _known(self) -> dict[Point, float]:
        """Validation loss of every trial that has ended, infinite where it diverged; of equal ones the first's."""
        known: dict[Point, float] = {}
        for row in self._rows():
            point = (row["learning_rate"], row.get("initializer_range"))
            known.setdefault(point, math.inf if row["validation_loss"] is None else row["validation_loss"])
        return known

    def known(self, rate: float, initializer_range: float | None = None) -> float | None:
        """Return validation loss of a trial that has ended; infinite where it diverged, None where there is none."""
        return self._known().get((rate, initializer_range))

    def loss(self, rate: float, initializer_range: float | None = None) -> float:
        """Return the validation loss of a trial, which is run if it has not been; infinite where it diverged."""
        import optuna

        known = self.known(rate, initializer_range)
        if known is not None:
            return known
        loss = self.evaluate(rate, initializer_range)
        wanted = {"learning_rate": rate} | (
            {} if initializer_range is None else {"initializer_range": initializer_range}
        )
        distribution = optuna.distributions.FloatDistribution(_LOWEST, _HIGHEST, log=True)
        states = optuna.trial.TrialState
        trial = optuna.trial.create_trial(
            params=wanted,
            distributions=dict.fromkeys(wanted, distribution),
            value=loss,
            state=states.PRUNED if loss is None else states.COMPLETE,
        )
        self.study.add_trial(trial)  # at once: none is ever left half-done by a kill
        return math.inf if loss is None else loss

    def advance(self, search: Search[T]) -> tuple[T | None, list[Point]]:
        """Return what a search comes to by the trials that have ended, or None and the points that it needs first."""
        known, losses = self._known(), None
        try:
            while True:
                points = search.send(losses)  # type: ignore[arg-type]  # None starts it
                missing = [point for point in points if point not in known]
                if missing:
                    return None, missing
                losses = [known[point] for point in points]
        except StopIteration as ended:
            return ended.value, []

    def rows(self) -> list[dict[str, Any]]:
        """Every trial that has ended, whoever asked for it: its settings, and its loss (None where it diverged)."""
        return sorted(self._rows(), key=lambda row: (row.get("initializer_range", 0.0), row["learning_rate"]))

    def _rows(self) -> list[dict[str, Any]]:
        import optuna

        done = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
        return [
            dict(trial.params) | {"validation_loss": trial.value if trial.state == done[0] else None}
            for trial in self.study.get_trials(deepcopy=False, states=done)
        ]


@dataclasses.dataclass(frozen=True)
class _Best:
    """The best of a grid as it has grown, and the loss there. edge: whether it lies at an end of the grid."""

    value: float
    loss: float
    grid: tuple[float, ...]

    @property
    def edge(self) -> bool:
        return self.value in (self.grid[0], self.grid[-1])


def _below(grid: Sequence[float]) -> float:
    return _rounded(grid[0] * grid[0] / grid[1])


def _above(grid: Sequence[float]) -> float:
    return _rounded(grid[-1] * grid[-1] / grid[-2])


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


def _at_best(grid: Sequence[float], extensions: int, at: Callable[[float], Point]) -> Search[_Best]:
    """The best value of ``grid``, which grows by one value up to ``extensions`` times while the best is at an end."""
    values = list(grid)
    for extension in range(extensions + 1):
        losses = dict(zip(values, (yield [at(value) for value in values]), strict=True))
        value = min(values, key=losses.__getitem__)
        best = _Best(value, losses[value], tuple(values))
        if not math.isfinite(best.loss) or extension == extensions or not best.edge:
            break
        if best.value == values[0]:
            values.insert(0, _below(values))
        else:
            values.append(_above(values))
    return best


def _descend(grid: Sequence[float], start: float, moves: int, at: Callable[[float], Point]) -> Search[_Best]:
    """From ``start`` to the better neighbour, up to ``moves`` times; beyond its ends the grid goes on as it ends.

    Values of the grid that are nearer to a start of its own than a fourth of the grid's step tell nothing and are left
    out. Where training diverges at the start and beside it, the way is down, if need be to the grid's lowest value.
    """
    apart = (grid[-1] / grid[0]) ** (1 / (len(grid) - 1))
    values, best = list(grid), start
    if start not in grid:
        values = sorted([start, *(v for v in grid if max(v / start, start / v) >= apart**0.25)])
    while True:
        if best == values[0]:
            values.insert(0, _below(values))
        if best == values[-1]:
            values.append(_above(values))
        place = values.index(best)
        around = values[place - 1 : place + 2]
        asked = list(dict.fromkeys([best, *around]))
        losses = dict(zip(asked, (yield [at(value) for value in asked]), strict=True))
        better = min(asked, key=losses.__getitem__)
        if not math.isfinite(losses[better]) and best > grid[0]:
            best = values[place - 1]
            continue
        if better == best:
            break
        best, moves = better, moves - 1
        if moves < 0:
            break
    return _Best(best, losses[best], tuple(around))  # at an end of these where the last move was the last allowed


def grid_search(settings: Tune, initializer_range: float | None = None) -> Search[Found]:
    """Find the best learning rate of the grid and, where that is tuned, the best initialisation.

    One coordinate after the other: the rate at the written initialisation, the initialisation at that rate, and at the
    best two of these the rate again, downhill from where it was, so that no entry is judged at one start with a rate
    that was found at another. Grids grow where the best is at their edge.

    Args:
        settings: the grids and how often they may grow.
        initializer_range: the written initialisation; None leaves it out of the search.
    """

    def from_start(value: float | None) -> Callable[[float], Point]:
        return lambda rate: (rate, value)

    rate = yield from _at_best(settings.learning_rates, settings.extensions, from_start(initializer_range))
    # where all diverged a still lower rate is the only way on; the grid below its lowest is not searched blindly
    if initializer_range is None or settings.initializer_range is None or not math.isfinite(rate.loss):
        return Found(rate.value, initializer_range, rate.loss, rate.edge)
    grid = sorted({*settings.initializer_range, initializer_range})
    first = rate.value
    spread = yield from _at_best(grid, settings.extensions, lambda value: (first, value))
    losses = dict(zip(spread.grid, (yield [(first, value) for value in spread.grid]), strict=True))
    rates = {initializer_range: rate}
    for value in sorted(spread.grid, key=losses.__getitem__)[:2]:
        if value != initializer_range and math.isfinite(losses[value]):
            rates[value] = yield from _descend(settings.learning_rates, first, settings.extensions, from_start(value))
    best = min(rates, key=lambda value: rates[value].loss)
    on_edge = best in (spread.grid[0], spread.grid[-1])
    return Found(rates[best].value, best, rates[best].loss, rates[best].edge, on_edge)


def beside(settings: Tune, rate: float, initializer_range: float | None = None) -> Search[Found]:
    """Find the better of ``rate`` and its neighbours in the grid, and so on up to ``settings.extensions`` times more.

    Raises:
        ValueError: if training diverged at all of them.
    """
    best = yield from _descend(settings.learning_rates, rate, settings.extensions, lambda r: (r, initializer_range))
    if not math.isfinite(best.loss):
        raise ValueError(
            f"training diverged at {rate:g} and at the learning rates beside it; lower tune.learning_rates"
        )
    return Found(best.value, initializer_range, best.loss, best.edge)
