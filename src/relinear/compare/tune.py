"""Tune the learning rate and initialisation of every entry by short runs over grids."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from relinear.compare.engine import Run, Search
from relinear.compare.schema import Trial
from relinear.compare.settings import TuneSettings
from relinear.training.fitting import NonFiniteLossError

#: a learning rate, and an initialisation if that is tuned
Point = tuple[float, float | None]
#: returns the losses at values of one coordinate, with the other one fixed
LossesAt = Callable[[Sequence[float]], Search[list[float]]]


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        rate: the best learning rate that was tried.
        initializer_range: the best initialisation that was tried; None for the entry's own.
        loss: validation loss of these; infinite if training diverged at everything that was tried.
        edge: whether the rate is at an end of its grid.
        initializer_edge: whether the initialisation is at an end of its grid; None if it was not tuned.
    """

    rate: float
    initializer_range: float | None
    loss: float
    edge: bool
    initializer_edge: bool | None = None


@dataclasses.dataclass
class Trials:
    """The runs of a search by learning rate and initialisation; none is run twice.

    Attributes:
        folder: directory of the runs, each in a folder that is named by its rate and initialisation.
        run_at: makes a run from a learning rate, an initialisation or None, and the run's folder.
        prefix: prefix of the folders' names.
        row_values: further values of every row.
    """

    folder: Path
    run_at: Callable[[float, float | None, Path], Run]
    prefix: str = ""
    row_values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: losses of the trials that have ended, infinite if training diverged
    _losses: dict[Point, float] = dataclasses.field(default_factory=dict, init=False)

    def losses(self, points: Sequence[Point]) -> Search[list[float]]:
        """Return the validation losses at ``points``, infinite where training diverged; new points are run first."""
        new = [point for point in dict.fromkeys(points) if point not in self._losses]
        if new:
            losses = yield [self.run_at(*point, self._folder(point)) for point in new]
            self._losses |= dict(zip(new, losses, strict=True))
        return [self._losses[point] for point in points]

    def over_rates(self, initializer_range: float | None) -> LossesAt:
        """Return a function that gives the losses of learning rates at one initialisation."""
        return lambda rates: self.losses([(rate, initializer_range) for rate in rates])

    def rates_without_divergence(self, initializer_range: float | None) -> set[float]:
        """Return the rates that were tried at one initialisation, and at which training did not diverge."""
        return {rate for (rate, std), loss in self._losses.items() if std == initializer_range and math.isfinite(loss)}

    def _folder(self, point: Point) -> Path:
        return self.folder / (self.prefix + "-init-".join(f"{value:g}" for value in point if value is not None))

    def rows(self) -> list[Trial]:
        """Return every trial that has ended: its settings, and its loss (None if it diverged)."""
        return [
            {"learning_rate": rate}
            | ({} if std is None else {"initializer_range": std})
            | {"validation_loss": loss if math.isfinite(loss) else None}
            | self.row_values
            for (rate, std), loss in sorted(self._losses.items(), key=lambda item: (item[0][1] or 0.0, item[0][0]))
        ]


@dataclasses.dataclass(frozen=True)
class _Best:
    """The best value of a grid, which may have grown, and its loss."""

    value: float
    loss: float
    grid: tuple[float, ...]

    @property
    def edge(self) -> bool:
        """Return whether the value is at an end of the grid."""
        return self.value in (self.grid[0], self.grid[-1])


def _grow(values: list[float], best: float) -> None:
    """Extend the grid ``values`` at an end if ``best`` lies there, by the step from its neighbour."""
    if best == values[0]:
        values.insert(0, float(f"{best * best / values[1]:.3g}"))
    if best == values[-1]:
        values.append(float(f"{best * best / values[-2]:.3g}"))


def _best_of_grid(grid: Sequence[float], extensions: int, losses_at: LossesAt) -> Search[_Best]:
    """Return the best value of ``grid``, which grows up to ``extensions`` times while the best is at an end."""
    values = list(grid)
    for extension in range(extensions + 1):
        losses = dict(zip(values, (yield from losses_at(values)), strict=True))
        value = min(values, key=losses.__getitem__)
        best = _Best(value, losses[value], tuple(values))
        if not math.isfinite(best.loss) or extension == extensions or not best.edge:
            break
        _grow(values, best.value)
    return best


def _descend(grid: Sequence[float], initial: float, moves: int, losses_at: LossesAt) -> Search[_Best]:
    """Move from ``initial`` to the better neighbour, up to ``moves`` times; beyond its ends the grid continues.

    Values nearer to an ``initial`` off the grid than a fourth of its step are skipped. Where training diverges at
    ``initial`` and next to it, the search goes down, if need be to the grid's lowest value.
    """
    step = (grid[-1] / grid[0]) ** (1 / (len(grid) - 1))
    values = list(grid)
    best = initial
    if initial not in grid:
        values = sorted([initial, *(v for v in grid if max(v / initial, initial / v) >= step**0.25)])
    while True:
        _grow(values, best)
        index = values.index(best)
        neighbourhood = values[index - 1 : index + 2]
        tried = list(dict.fromkeys([best, *neighbourhood]))
        losses = dict(zip(tried, (yield from losses_at(tried)), strict=True))
        better = min(tried, key=losses.__getitem__)
        if not math.isfinite(losses[better]) and best > grid[0]:
            best = values[index - 1]
            continue
        if better == best:
            break
        best, moves = better, moves - 1
        if moves < 0:
            break
    return _Best(best, losses[best], tuple(neighbourhood))  # at an end of these if no move was left


def grid_search(settings: TuneSettings, trials: Trials, initializer_range: float | None = None) -> Search[SearchResult]:
    """Find the best learning rate of the grid and, if that is tuned, the best initialisation.

    One coordinate after the other: the rate at the written initialisation, the initialisation at that rate, and at the
    best two of these the rate again, by descent from the current one, so that no entry is evaluated at one
    initialisation with a rate tuned at another. Grids grow where the best is at their edge.

    Args:
        settings: the grids and how often they may grow.
        trials: the runs to compare.
        initializer_range: the written initialisation; None leaves it out of the search.
    """
    grid, extensions = settings.learning_rates, settings.extensions
    rate = yield from _best_of_grid(grid, extensions, trials.over_rates(initializer_range))
    # if training diverged at all rates, only a lower rate could help, and the grid does not say how much lower
    if initializer_range is None or settings.initializer_range is None or not math.isfinite(rate.loss):
        return SearchResult(rate.value, initializer_range, rate.loss, rate.edge)

    def at_best_rate(stds: Sequence[float]) -> Search[list[float]]:
        return trials.losses([(rate.value, std) for std in stds])

    std = yield from _best_of_grid(sorted({*settings.initializer_range, initializer_range}), extensions, at_best_rate)
    losses = dict(zip(std.grid, (yield from at_best_rate(std.grid)), strict=True))
    rates = {initializer_range: rate}
    for value in sorted(std.grid, key=losses.__getitem__)[:2]:
        if value != initializer_range and math.isfinite(losses[value]):
            rates[value] = yield from _descend(grid, rate.value, extensions, trials.over_rates(value))
    best = min(rates, key=lambda value: rates[value].loss)
    on_edge = best in (std.grid[0], std.grid[-1])
    return SearchResult(rates[best].value, best, rates[best].loss, rates[best].edge, on_edge)


def one_rate(trials: Trials, rate: float) -> Search[SearchResult]:
    """Return the loss at a rate that is not searched, where trials differ in something else."""
    (loss,) = yield from trials.losses([(rate, None)])
    return SearchResult(rate, None, loss, False)


def check_neighbors(
    settings: TuneSettings, trials: Trials, rate: float, initializer_range: float | None = None
) -> Search[SearchResult]:
    """Find the better of ``rate`` and its neighbours in the grid, and so on up to ``settings.extensions`` times more.

    Raises:
        NonFiniteLossError: if training diverged at all of them.
    """
    losses_at = trials.over_rates(initializer_range)
    best = yield from _descend(settings.learning_rates, rate, settings.extensions, losses_at)
    if not math.isfinite(best.loss):
        raise NonFiniteLossError(f"training diverged at {rate:g} and the neighbouring rates; lower tune.learning_rates")
    return SearchResult(best.value, initializer_range, best.loss, best.edge)
