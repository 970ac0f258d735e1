"""Sweeps: search any settings of a run for the lowest validation loss; stopped and started again, they go on."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relinear.compare.recipe import apply_overrides, read_value
from relinear.compare.sharing import Piece, alone_at, carry_out, check_sharing, worker_log
from relinear.compare.tune import open_study, study_path
from relinear.compare.worker import InProcess, Worker
from relinear.core.config import shown
from relinear.data.corpora import open_corpus
from relinear.models import model_place
from relinear.system.files import read_json, write_json, writing
from relinear.system.lock import only_process_in
from relinear.system.written import check_ours
from relinear.train.settings import TrainSettings
from relinear.train.trainer import NonFiniteLossError

__all__ = ["SWEEP", "Parameter", "parse_parameter", "sweep"]

SWEEP = "sweep.json"
_RANGE = re.compile(r"(?P<low>[^,]+)\.\.(?P<high>[^,:]+)(?P<log>:log)?")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A setting to search: dotted name, and either a list of choices or a range (on a log scale if ``log``)."""

    name: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    @property
    def integer(self) -> bool:
        """Whether the range is one of whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def suggest(self, trial: Any) -> Any:
        """Return a value from an optuna trial."""
        if self.choices:
            # optuna's choices are plain values; anything else goes through its text
            return json.loads(trial.suggest_categorical(self.name, [json.dumps(choice) for choice in self.choices]))
        suggest = trial.suggest_int if self.integer else trial.suggest_float
        return suggest(self.name, self.low, self.high, log=self.log)


def parse_parameter(text: str) -> Parameter:
    """``learning_rate=1e-4..1e-2:log`` (a range) or ``operators.q_proj.rank=8,16,32`` (choices).

    Raises:
        ValueError: if it has neither form, or the range is empty.
    """
    name, equals, values = text.partition("=")
    name, values = name.strip(), values.strip()
    if not equals or not name or not values:
        raise ValueError(f"--param {shown(text)}: write it as name=LOW..HIGH, name=LOW..HIGH:log or name=A,B,C")
    found = _RANGE.fullmatch(values)
    if not found:
        choices = read_value(f"[{values}]", f"--param {shown(text)}")
        return Parameter(name, choices=tuple(choices))
    low, high = (read_value(found[end], f"--param {shown(text)}") for end in ("low", "high"))
    if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high)) or not low < high:
        raise ValueError(f"--param {shown(text)}: a range goes from a lower to a higher number")
    if found["log"] and low <= 0:
        raise ValueError(f"--param {shown(text)}: a log range starts above 0")
    return Parameter(name, low=low, high=high, log=bool(found["log"]))


def sweep(
    base: TrainSettings | Mapping[str, Any],
    parameters: list[Parameter],
    out_dir: str | Path,
    *,
    trials: int = 20,
    seed: int = 0,
    isolate: bool = True,
    shared: bool = False,
    on_progress: Callable[[int, dict[str, Any], dict[str, Any]], None] = lambda number, values, progress: None,
) -> list[dict[str, Any]]:
    """Train with settings that optuna's TPE sampler proposes, until ``trials`` runs have ended.

    What trial n proposes depends on ``seed``, n and the trials before it alone, so an interrupted sweep comes to the
    same end. Trials are kept in ``out_dir/optuna.db`` and ``out_dir/trials/``, the table in ``out_dir/sweep.json``.

    Args:
        base: settings of every run.
        parameters: what is searched, by names within ``base``.
        out_dir: directory of the sweep.
        trials: how many runs, those of earlier calls included.
        seed: of the sampler.
        isolate: train in processes of their own.
        shared: work on the same sweep as other calls with the same arguments, on this machine or on others that see
            ``out_dir``. Every trial is done by one of them; what a killed call had begun, another goes on with. What
            is proposed then depends on what had ended by then. Every call returns when all trials have ended.
        on_progress: called with the trial's number, its values, and the progress of its run as a mapping.

    Returns:
        ``{"values", "validation_loss", "perplexity", "folder"}`` a trial, best first; diverged ones last, with None.

    Raises:
        ValueError: for settings that are wrong whatever the trial, or a directory that holds another sweep.
        ImportError: if optuna is not installed.
    """
    if trials < 1:
        raise ValueError(f"trials must be at least 1, got {trials}")
    if not parameters:
        raise ValueError("nothing to search: give at least one parameter, such as learning_rate=1e-4..1e-2:log")
    base = TrainSettings.load(base)
    values = base.model_dump(mode="json", exclude_unset=True)
    for parameter in parameters:  # wrong names and ends are found before anything starts
        for end in parameter.choices or (parameter.low, parameter.high):
            trial = TrainSettings.load(apply_overrides(values, {parameter.name: end}), f"--param {parameter.name}")
            model_place(trial.model)
    open_corpus(base.data)
    out_dir = Path(out_dir)
    record = {"base": base.model_dump(mode="json"), "parameters": [_as_json(p) for p in parameters], "seed": seed}
    _check_same(out_dir, record)
    check_sharing(out_dir, "a sweep", shared)
    worker = Worker(worker_log(out_dir, shared)) if isolate else InProcess()
    work = _Sweep(values, record, parameters, out_dir, seed, shared, worker, on_progress)
    try:
        with writing(study_path(out_dir, shared)), contextlib.nullcontext() if shared else only_process_in(out_dir):
            return work.carry_out(trials)
    finally:
        worker.close()


def _as_json(parameter: Parameter) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(parameter)))


def _check_same(out_dir: Path, record: Mapping[str, Any]) -> None:
    path = out_dir / SWEEP
    check_ours(out_dir, "sweep")
    if not path.is_file():
        return
    try:
        before = read_json(path)
        before["base"] = TrainSettings.completed(before["base"])
        differing = [key for key in record if before[key] != record[key]]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is no record of a sweep ({error}); give another directory") from error
    if differing:
        raise ValueError(f"{out_dir} holds a sweep with another {', '.join(differing)}; give another --out")


def _ended(study: Any) -> list[Any]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.name in ("COMPLETE", "PRUNED")]


@dataclasses.dataclass
class _Sweep:
    """The trials of one sweep, and who trains them."""

    values: Mapping[str, Any]
    record: Mapping[str, Any]
    parameters: list[Parameter]
    out_dir: Path
    seed: int
    shared: bool
    worker: Worker | InProcess
    on_progress: Callable[[int, dict[str, Any], dict[str, Any]], None]

    def carry_out(self, trials: int) -> list[dict[str, Any]]:
        """Do whatever trial nobody else holds, until all have ended. A shared trial is held by the lock of a folder."""
        with alone_at(self.out_dir, "table", self.shared):
            _check_same(self.out_dir, self.record)  # first, so that whoever joins with other settings is refused
            if not (self.out_dir / SWEEP).is_file():
                write_json(self.out_dir / SWEEP, {**self.record, "trials": []})
        study = open_study(self.out_dir, "sweep", shared=self.shared)
        carry_out(self.out_dir, lambda: self._waiting(study, trials), self.shared)
        self._tell(study)
        return _table(study)

    def _tell(self, study: Any) -> None:
        """Write the table."""
        with alone_at(self.out_dir, "table", self.shared):
            _check_same(self.out_dir, self.record)
            write_json(self.out_dir / SWEEP, {**self.record, "trials": _table(study)})

    def _waiting(self, study: Any, trials: int) -> list[Piece]:
        """The trials that have not ended."""

        def piece(number: int) -> Piece:
            def is_done() -> bool:
                return number in _numbers(_ended(study))

            return Piece(f"{number:03d}", is_done, lambda: self._begun_or_new(study, number))

        ended = _numbers(_ended(study))
        return [piece(number) for number in range(trials) if number not in ended]

    def _begun_or_new(self, study: Any, number: int) -> None:
        running = [t for t in study.get_trials(deepcopy=False) if t.state.name == "RUNNING"]
        begun = [t for t in running if t.user_attrs.get("number") == number]
        self._trial(study, self._again(study, begun[-1]) if begun else self._proposed(study, number), number)
        self._tell(study)

    def _proposed(self, study: Any, number: int) -> Any:
        """A trial with new values."""
        import optuna

        study.sampler = optuna.samplers.TPESampler(seed=self.seed + number)
        trial = study.ask()
        chosen = {parameter.name: parameter.suggest(trial) for parameter in self.parameters}
        # Named by its values: a trial that was cut off is proposed again and goes on from its last checkpoint.
        digest = hashlib.blake2b(json.dumps(chosen, sort_keys=True).encode(), digest_size=4).hexdigest()
        trial.set_user_attr("folder", f"trials/{number:03d}-{digest}")
        trial.set_user_attr("values", chosen)
        trial.set_user_attr("number", number)
        return trial

    def _again(self, study: Any, begun: Any) -> Any:
        """The trial that a killed process had begun."""
        import optuna

        return optuna.trial.Trial(study, begun._trial_id)

    def _trial(self, study: Any, trial: Any, number: int) -> None:
        import optuna

        chosen, folder = trial.user_attrs["values"], self.out_dir / trial.user_attrs["folder"]
        settings = TrainSettings.load(apply_overrides(self.values, chosen), f"trial {number}")
        arguments = {"settings": settings.model_dump(mode="json"), "out_dir": str(folder)}
        try:
            result = self.worker.run("train", arguments, lambda progress: self.on_progress(number, chosen, progress))
        except NonFiniteLossError:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return
        study.tell(trial, result["validation_loss"])


def _numbers(ended: list[Any]) -> set[int]:
    return {trial.user_attrs.get("number", place) for place, trial in enumerate(ended)}  # the first versions noted none


def _table(study: Any) -> list[dict[str, Any]]:
    rows = [
        {
            "values": trial.user_attrs["values"],
            "validation_loss": trial.value if trial.state.name == "COMPLETE" else None,
            "perplexity": math.exp(trial.value) if trial.state.name == "COMPLETE" else None,
            "folder": trial.user_attrs["folder"],
        }
        for trial in _ended(study)
    ]
    return sorted(rows, key=lambda row: math.inf if row["validation_loss"] is None else row["validation_loss"])
