"""Run searches in rounds of training runs: a search asks for runs until it has its result, an executor runs them."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from pathlib import Path
from typing import Any, Literal, TypeVar

from relinear.system.progress import Progress, ProgressCallback
from relinear.training.callbacks import estimated_seconds, read_metrics
from relinear.training.fitting import NonFiniteLossError
from relinear.training.run import read_final_loss, run_folder, train
from relinear.training.settings import TrainSettings

#: seconds between looks at what runs have written
_POLL = 1.0


@dataclasses.dataclass(frozen=True)
class Run:
    """Request a training run.

    Attributes:
        stage: whether the run tunes an entry, or trains it for the results.
        label: name of the run in progress and messages.
        settings: training settings of the run.
        folder: directory of the run.
    """

    stage: Literal["tune", "train"]
    label: str
    settings: TrainSettings
    folder: Path

    def loss(self) -> float | None:
        """Return the run's validation loss, infinite if it diverged; None if it has not ended.

        Raises:
            ValueError: if its folder holds another run.
        """
        record = run_folder(self.folder, self.settings).check(self.settings.model_dump(mode="json"))
        return read_final_loss(self.folder) if record else None


T = TypeVar("T")
#: yields rounds of runs, is sent the loss of each (infinite if it diverged), and returns its result
Search = Generator[list[Run], list[float], T]


def side_by_side(searches: Sequence[Search[T]]) -> Search[list[T]]:
    """Run independent searches at once: a round holds the runs that all of them ask for."""
    results: dict[int, T] = {}
    losses: dict[int, Any] = dict.fromkeys(range(len(searches)))
    while losses:
        requested: dict[int, list[Run]] = {}
        for index, losses_of_search in losses.items():
            try:
                requested[index] = searches[index].send(losses_of_search)
            except StopIteration as end:
                results[index] = end.value
        round_losses = iter((yield [run for runs in requested.values() for run in runs]) if requested else ())
        losses = {index: list(itertools.islice(round_losses, len(runs))) for index, runs in requested.items()}
    return [results[index] for index in range(len(searches))]


def run_search(search: Search[T], run_round: Callable[[list[Run]], list[float]]) -> T:
    """Return a search's result; ``run_round`` executes a round and returns the loss of every run."""
    losses: Any = None
    while True:
        try:
            losses = run_round(search.send(losses))
        except StopIteration as end:
            return end.value


def run_once(settings: Mapping[str, Any], folder: str) -> float:
    """Train, or resume; return the validation loss, infinite if training diverged."""
    try:
        return train(settings, folder).validation_loss or 0.0
    except NonFiniteLossError:
        return math.inf


class Engine:
    """Execute rounds of runs and report their progress.

    Args:
        executor: executes the runs.
        at_once: how many runs it executes at once, for the remaining time; 0 if that is unknown.
        on_progress: called with a ``Progress`` about once a second.
    """

    def __init__(self, executor: Executor, at_once: int, on_progress: ProgressCallback) -> None:
        self.executor = executor
        self.at_once = max(1, at_once)
        self.on_progress = on_progress
        #: stage -> runs and steps that are expected; a search may request more
        self._expected = {"tune": (0, 0), "train": (0, 0)}
        #: stage -> folder -> steps of requested runs
        self._requested: dict[str, dict[Path, int]] = {"tune": {}, "train": {}}
        #: folder -> steps of runs that have ended
        self._ended: dict[Path, int] = {}
        #: folder -> seconds and steps of whole runs whose pace is known
        self._paces: dict[Path, tuple[float, int]] = {}

    def expect(self, stage: str, runs: int, steps: int) -> None:
        """Add ``runs`` more runs of ``steps`` steps each to the total that progress is reported against."""
        expected_runs, expected_steps = self._expected[stage]
        self._expected[stage] = expected_runs + runs, expected_steps + runs * steps

    def _totals(self) -> tuple[int, int]:
        """Return the number of runs and steps in total, as far as it is known."""
        requested = self._requested.items()
        runs = sum(max(self._expected[stage][0], len(steps)) for stage, steps in requested)
        return runs, sum(max(self._expected[stage][1], sum(steps.values())) for stage, steps in requested)

    def run_round(self, runs: list[Run]) -> list[float]:
        """Execute the runs that have not ended; a failing run stops no other.

        Returns:
            Their losses, infinite if training diverged.

        Raises:
            ValueError, RuntimeError, ChildProcessError: the first failure, once the others have ended.
        """
        losses = {run.folder: loss for run in runs if (loss := run.loss()) is not None}
        self._ended |= {run.folder: run.settings.steps for run in runs if run.folder in losses}
        for run in runs:
            self._requested[run.stage][run.folder] = run.settings.steps
        failures: list[Exception] = []
        pending: dict[Future, Run] = {}
        for run in runs:
            if run.folder not in losses:
                if len(pending) < self.at_once:
                    self._report_runs([run])
                future = self.executor.submit(run_once, run.settings.model_dump(mode="json"), str(run.folder))
                pending[future] = run
                self._collect(pending, losses, failures, 0)
        while pending:
            if not self._collect(pending, losses, failures, _POLL):
                running = [run for future, run in pending.items() if future.running()]
                self._report_runs(running or list(pending.values()))
        if failures:
            raise failures[0]
        return [losses[run.folder] for run in runs]

    def _collect(
        self, pending: dict[Future, Run], losses: dict[Path, float], failures: list[Exception], seconds: float
    ) -> bool:
        """Take ended runs out of ``pending``, after at most ``seconds``; return whether any had ended."""
        done, _ = wait(pending, timeout=seconds, return_when=FIRST_COMPLETED)
        for future in done:
            run = pending.pop(future)
            try:
                losses[run.folder] = future.result()
            except Exception as error:
                if getattr(error, "errno", None) is None:  # else it names a file
                    error.args = (f"{run.label}: {error}",)
                failures.append(error)
                continue
            self._ended[run.folder] = run.settings.steps
            self._report_runs([run])
        return bool(done)

    def report_stage(self, stage: str, text: str) -> None:
        """Report work that is not a run."""
        self.on_progress(Progress(text, stage=stage, run=len(self._ended), runs=self._totals()[0]))

    def _read_metrics(self, run: Run) -> dict[str, Any]:
        """Return the last values in the metrics of a run."""
        rows = read_metrics(run.folder / "metrics.jsonl")
        if (seconds := estimated_seconds(rows, run.settings)) is not None:
            whole_run, _ = seconds
            self._paces[run.folder] = whole_run, run.settings.steps
        return {key: value for row in rows for key, value in row.items()}

    def _report_runs(self, runs: list[Run]) -> None:
        """Report runs by their metrics: the details of the first run that has begun, and the steps of all."""
        rows = [(run, self._read_metrics(run)) for run in runs]
        begun = [(run, row) for run, row in rows if row] or rows[:1]
        run, row = begun[0]
        text = run.label + (f" and {len(begun) - 1} more" if len(begun) > 1 else "")
        unfinished_steps = sum(row.get("step", 0) for run, row in begun if run.folder not in self._ended)
        self.on_progress(
            Progress(
                text,
                row.get("step", 0),
                run.settings.steps,
                run.stage,
                loss=row.get("loss"),
                validation_loss=row.get("validation_loss"),
                tokens_per_second=row.get("tokens_per_second"),
                run=len(self._ended),
                runs=self._totals()[0],
                seconds_left=self._seconds_left(unfinished_steps),
            )
        )

    def _seconds_left(self, unfinished_steps: int) -> float | None:
        """Return the seconds left, from the known paces; running runs have made ``unfinished_steps`` so far."""
        if not self._paces:
            return None
        seconds, steps = (sum(pace) for pace in zip(*self._paces.values(), strict=True))
        steps_left = max(0, self._totals()[1] - sum(self._ended.values()) - unfinished_steps)
        return seconds / steps * steps_left / self.at_once
