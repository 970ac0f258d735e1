"""Sweeps: search any settings of a run for the lowest validation loss; stopped and started again, they go on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relinear.compare.recipe import apply_overrides, read_value
from relinear.compare.tune import open_study
from relinear.compare.worker import InProcess, Worker
from relinear.models import model_place
from relinear.system.files import write_json
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
        """A value from an optuna trial."""
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
        raise ValueError(f"--param {text!r}: write it as name=LOW..HIGH, name=LOW..HIGH:log or name=A,B,C")
    found = _RANGE.fullmatch(values)
    if not found:
        choices = read_value(f"[{values}]", f"--param {text!r}")
        return Parameter(name, choices=tuple(choices))
    low, high = (read_value(found[end], f"--param {text!r}") for end in ("low", "high"))
    if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high)) or not low < high:
        raise ValueError(f"--param {text!r}: a range goes from a lower to a higher number")
    if found["log"] and low <= 0:
        raise ValueError(f"--param {text!r}: a log range starts above 0")
    return Parameter(name, low=low, high=high, log=bool(found["log"]))


def sweep(
    base: TrainSettings | Mapping[str, Any],
    parameters: list[Parameter],
    out_dir: str | Path,
    *,
    trials: int = 20,
    seed: int = 0,
    isolate: bool = True,
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
    out_dir = Path(out_dir)
    record = {"base": base.model_dump(mode="json"), "parameters": [_as_json(p) for p in parameters], "seed": seed}
    _check_same(out_dir, record)
    study = open_study(out_dir, "sweep")
    write_json(out_dir / SWEEP, record | {"trials": _table(study)})
    worker = Worker(out_dir / "worker.log") if isolate else InProcess()
    try:
        while len(_ended(study)) < trials:
            _next_trial(study, values, parameters, out_dir, seed, worker, on_progress)
            write_json(out_dir / SWEEP, record | {"trials": _table(study)})
    finally:
        worker.close()
    return _table(study)


def _as_json(parameter: Parameter) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(parameter)))


def _check_same(out_dir: Path, record: Mapping[str, Any]) -> None:
    path = out_dir / SWEEP
    if not path.is_file():
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        differing = [key for key in record if before[key] != record[key]]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is no record of a sweep ({error}); give another directory") from error
    if differing:
        raise ValueError(f"{out_dir} holds a sweep with another {', '.join(differing)}; give another --out")


def _ended(study: Any) -> list[Any]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.name in ("COMPLETE", "PRUNED")]


def _next_trial(
    study: Any,
    values: Mapping[str, Any],
    parameters: list[Parameter],
    out_dir: Path,
    seed: int,
    worker: Worker | InProcess,
    on_progress: Callable[[int, dict[str, Any], dict[str, Any]], None],
) -> None:
    import optuna

    number = len(_ended(study))
    study.sampler = optuna.samplers.TPESampler(seed=seed + number)
    trial = study.ask()
    chosen = {parameter.name: parameter.suggest(trial) for parameter in parameters}
    # Named by its values: a trial that was cut off is proposed again and goes on from its last checkpoint.
    digest = hashlib.blake2b(json.dumps(chosen, sort_keys=True).encode(), digest_size=4).hexdigest()
    folder = out_dir / "trials" / f"{number:03d}-{digest}"
    trial.set_user_attr("folder", str(folder.relative_to(out_dir)))
    trial.set_user_attr("values", chosen)
    settings = TrainSettings.load(apply_overrides(values, chosen), f"trial {number}")
    arguments = {"settings": settings.model_dump(mode="json"), "out_dir": str(folder)}
    try:
        result = worker.run("train", arguments, lambda progress: on_progress(number, chosen, progress))
    except NonFiniteLossError:
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        return
    study.tell(trial, result["validation_loss"])


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
