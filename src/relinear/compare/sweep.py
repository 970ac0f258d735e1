"""Sweeps: search any settings of a run for the lowest validation loss; stopped and started again, they go on."""

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from relinear.compare.recipe import apply_overrides, read_value
from relinear.compare.sharing import Piece, all_of, alone_at, carry_out
from relinear.compare.worker import InProcess, Worker, at_work
from relinear.core.config import shown
from relinear.data.corpora import open_corpus
from relinear.models import model_place
from relinear.system.files import read_json, understood, write_json
from relinear.system.lock import only_process_in
from relinear.system.written import check_ours
from relinear.train.settings import TrainSettings
from relinear.train.trainer import NonFiniteLossError

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

    def distribution(self) -> Any:
        """Return what optuna draws from."""
        from optuna import distributions

        if self.choices:  # optuna's are plain values; anything else goes through its text
            return distributions.CategoricalDistribution([json.dumps(choice) for choice in self.choices])
        if isinstance(self.low, int) and isinstance(self.high, int):
            return distributions.IntDistribution(self.low, self.high, log=self.log)
        return distributions.FloatDistribution(self.low, self.high, log=self.log)


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
        return Parameter(name, choices=tuple(read_value(f"[{values}]", f"--param {shown(text)}")))
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
    same end. Trials are runs in ``out_dir/trials/``, the table of what they came to is ``out_dir/sweep.json``.

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
    if importlib.util.find_spec("optuna") is None:
        raise ImportError("sweeps need optuna: pip install 'relinear[sweep]'")
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
    with only_process_in(out_dir, shared=shared), at_work(out_dir, isolate, shared) as worker:
        return _Sweep(values, record, parameters, out_dir, shared, worker, on_progress).carry_out(trials)


def _as_json(parameter: Parameter) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(parameter)))


def _check_same(out_dir: Path, record: Mapping[str, Any]) -> None:
    path = out_dir / SWEEP
    check_ours(out_dir, "sweep")
    if not path.is_file():
        return
    with understood(path, "no record of a sweep", "give another directory"):
        before = read_json(path)
        before["base"] = TrainSettings.completed(before["base"])
        differing = [key for key in record if before[key] != record[key]]
    if differing:
        raise ValueError(f"{out_dir} holds a sweep with another {', '.join(differing)}; give another --out")


@dataclasses.dataclass
class _Sweep:
    """The trials of one sweep, and who trains them. What was proposed and what ended stands in ``sweep.json``."""

    values: Mapping[str, Any]
    record: Mapping[str, Any]
    parameters: list[Parameter]
    out_dir: Path
    shared: bool
    worker: "Worker | InProcess"  # tests put a function in its place
    on_progress: Callable[[int, dict[str, Any], dict[str, Any]], None]

    def carry_out(self, trials: int) -> list[dict[str, Any]]:
        """Do whatever trial nobody else holds, until all have ended."""
        with self._noted():
            pass  # first, so that whoever joins with other settings is refused
        carry_out(self.out_dir, all_of([self._piece(number) for number in range(trials)]), self.shared)
        return self._read()["trials"]

    def _read(self) -> dict[str, Any]:
        path = self.out_dir / SWEEP
        return read_json(path) if path.is_file() else {**self.record, "trials": []}

    @contextlib.contextmanager
    def _noted(self) -> Iterator[dict[str, Any]]:
        """Hold ``sweep.json`` and write it with what was changed in it."""
        with alone_at(self.out_dir, "table", self.shared):
            _check_same(self.out_dir, self.record)
            found = self._read()
            yield found
            write_json(self.out_dir / SWEEP, found)

    def _piece(self, number: int) -> Piece:
        return Piece(
            f"{number:03d}", lambda: number in map(_number, self._read()["trials"]), lambda: self._trial(number)
        )

    def _trial(self, number: int) -> None:
        with self._noted() as found:
            begun = found.setdefault("begun", {})
            if str(number) not in begun:
                begun[str(number)] = self._proposed(number, found["trials"])
            chosen = begun[str(number)]
        # Named by its values: one that was cut off goes on from its last checkpoint.
        digest = hashlib.blake2b(json.dumps(chosen, sort_keys=True).encode(), digest_size=4).hexdigest()
        folder, loss = f"trials/{number:03d}-{digest}", None
        settings = TrainSettings.load(apply_overrides(self.values, chosen), f"trial {number}")
        arguments = {"settings": settings.model_dump(mode="json"), "out_dir": str(self.out_dir / folder)}
        with contextlib.suppress(NonFiniteLossError):
            result = self.worker.run("train", arguments, lambda progress: self.on_progress(number, chosen, progress))
            loss = result["validation_loss"]
        perplexity = None if loss is None else math.exp(loss)
        row = {"values": chosen, "validation_loss": loss, "perplexity": perplexity, "folder": folder}
        with self._noted() as found:
            del found["begun"][str(number)]
            found["trials"] = sorted([*found["trials"], row], key=_rank)

    def _proposed(self, number: int, ended: list[dict[str, Any]]) -> dict[str, Any]:
        """New values, from those of the trials that have ended and what these came to."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self.record["seed"] + number))
        searched = {parameter.name: parameter.distribution() for parameter in self.parameters}
        discrete = {parameter.name for parameter in self.parameters if parameter.choices}
        for row in sorted(ended, key=_number):
            values = {name: json.dumps(v) if name in discrete else v for name, v in row["values"].items()}
            state = optuna.trial.TrialState["PRUNED" if row["validation_loss"] is None else "COMPLETE"]
            known = {"params": values, "distributions": searched, "value": row["validation_loss"], "state": state}
            study.add_trial(optuna.trial.create_trial(**known))
        proposed = study.ask(searched).params
        return {name: json.loads(value) if name in discrete else value for name, value in proposed.items()}


def _number(row: Mapping[str, Any]) -> int:
    return int(Path(row["folder"]).name.partition("-")[0])


def _rank(row: Mapping[str, Any]) -> float:
    """Best first, those that diverged last."""
    return math.inf if row["validation_loss"] is None else row["validation_loss"]
