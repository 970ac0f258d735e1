"""The comparison: match sizes, tune, train every entry on every seed, measure speed; stop and go on at any point."""

from __future__ import annotations

import contextlib
import datetime
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relinear.compare.plan import Event, OnEvent, Planned, plan_comparison
from relinear.compare.results import comparison_result, entry_result
from relinear.compare.settings import CompareSettings
from relinear.compare.tune import open_study, tune_learning_rate
from relinear.compare.worker import InProcess, Worker
from relinear.data import prepare_data
from relinear.models import model_place
from relinear.system.files import write_json
from relinear.system.machine import describe_machine
from relinear.train.settings import TrainSettings
from relinear.train.trainer import NonFiniteLossError

__all__ = ["RESULTS", "Event", "Planned", "compare", "plan_comparison"]

RUN, RESULTS, SPEED = "run.json", "results.json", "speed.json"
FORMAT = 1


def compare(
    recipe: CompareSettings | Mapping[str, Any],
    out_dir: str | Path,
    *,
    isolate: bool = True,
    on_event: OnEvent = lambda event: None,
) -> dict[str, Any]:
    """Carry out a comparison and leave its results in ``out_dir``.

    ``out_dir`` gets ``run.json`` (recipe, sizes, machine), ``tuning/`` and ``runs/ENTRY/seed-N/`` (a run's own
    ``run.json`` and ``metrics.jsonl``), ``speed.json`` and, at the end, ``results.json``. Started again with the same
    recipe it goes on where it was, or returns the results if it had ended.

    Args:
        recipe: ``CompareSettings`` or a mapping of them.
        out_dir: directory of the comparison, made once everything has been checked.
        isolate: train every run in a process of its own, which alone makes its peak memory its own.
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
    described = recipe.model_dump(mode="json")
    _check_same(out_dir, described)
    if (out_dir / RESULTS).is_file():
        return json.loads((out_dir / RESULTS).read_text(encoding="utf-8"))
    for name in recipe.entries:
        model_place(recipe.settings_of(name).model)
    data = prepare_data(
        recipe.train.data, on_progress=lambda what, done: on_event(Event("data", what, done, detail={}))
    )
    for name in recipe.entries:
        if recipe.settings_of(name).data != recipe.train.data:
            raise ValueError(f"entries.{name}.set changes the data; all entries of a comparison share one corpus")
    planned = plan_comparison(recipe, data.vocab_size, on_event)
    with _lock(out_dir):
        _write_run(out_dir, described, planned)
        worker = Worker(out_dir / "worker.log") if isolate else InProcess()
        try:
            state = _Comparison(recipe, out_dir, planned, data, worker, on_event)
            results = state.carry_out()
        finally:
            worker.close()
        write_json(out_dir / RESULTS, results)
    return results


def _check_same(out_dir: Path, described: Mapping[str, Any]) -> None:
    path = out_dir / RUN
    if not path.is_file():
        if (out_dir / RESULTS).is_file():
            raise ValueError(f"{out_dir} holds {RESULTS} but no {RUN}; give another directory")
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["recipe"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is no record of a comparison ({error}); give another directory") from error
    differing = list(_differences(CompareSettings.completed(before), json.loads(json.dumps(described))))
    if differing:
        lines = "\n  ".join(differing)
        raise ValueError(
            f"{out_dir} holds a comparison with another recipe; give another --out, or go back to the old settings:"
            f"\n  {lines}"
        )


def _differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """``a.b: old -> new`` for every value in which two trees of JSON differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            inner = f"{path}.{key}" if path else key
            if key not in now:
                yield f"{inner}: {before[key]!r} -> (gone)"
            elif key not in before:
                yield f"{inner}: (not there) -> {now[key]!r}"
            else:
                yield from _differences(before[key], now[key], inner)
        if list(before) != list(now) and set(before) == set(now) and path == "entries":
            yield f"entries: order {', '.join(before)} -> {', '.join(now)}"
    elif before != now:
        yield f"{path}: {before!r} -> {now!r}"


@contextlib.contextmanager
def _lock(out_dir: Path) -> Iterator[None]:
    """One process at a time in ``out_dir``."""
    from filelock import FileLock, Timeout

    out_dir.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out_dir / ".lock", timeout=0):
            yield
    except Timeout:
        raise ValueError(f"another process is at work in {out_dir}; wait for it, or give another directory") from None


def _write_run(out_dir: Path, described: Mapping[str, Any], planned: list[Planned]) -> None:
    if (out_dir / RUN).is_file():
        return
    entries = {
        p.name: {
            "parameters": p.size.parameters,
            "flops_per_token": p.size.flops,
            "deviation": p.deviation,
            "settings": p.settings.model_dump(mode="json"),
        }
        for p in planned
    }
    record = {"format": FORMAT, "recipe": described, "entries": entries, "machine": describe_machine()}
    write_json(out_dir / RUN, record | {"command": _command(), "started": _now()})


def _command() -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


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
    ) -> None:
        self.recipe, self.out_dir, self.planned, self.data = recipe, out_dir, planned, data
        self.worker, self.on_event = worker, on_event
        self.ended = 0
        self.total = len(planned) * len(recipe.seeds)
        if recipe.tune is not None:
            self.total += sum(self._is_tuned(p.name) for p in planned) * len(recipe.tune.learning_rates)

    def carry_out(self) -> dict[str, Any]:
        tuned = {p.name: self._tune(p) for p in self.planned}
        rates = {p.name: tuned[p.name][0] if tuned[p.name] else p.settings.learning_rate for p in self.planned}
        runs = {p.name: [self._final_run(p, rates[p.name], seed) for seed in self.recipe.seeds] for p in self.planned}
        speed = self._speed()
        entries = [
            entry_result(p, rates[p.name], tuned[p.name][1] if tuned[p.name] else None, runs[p.name], speed.get(p.name))
            | {"dense": self.recipe.entries[p.name].dense}
            for p in self.planned
        ]
        record = json.loads((self.out_dir / RUN).read_text(encoding="utf-8"))
        return {
            "format": FORMAT,
            **comparison_result(self.recipe, self.data, self.planned, entries),
            **{key: record[key] for key in ("recipe", "machine", "command")},
            "finished": _now(),
        }

    # Tuning

    def _is_tuned(self, name: str) -> bool:
        return self.recipe.tune is not None and self.recipe.entries[name].learning_rate is None

    def _tune(self, planned: Planned) -> Any:
        tune = self.recipe.tune
        if tune is None or not self._is_tuned(planned.name):
            return None
        folder = self.out_dir / "tuning"
        steps = max(1, round(tune.fraction * planned.settings.steps))
        changes: dict[str, Any] = {"steps": steps, "seed": tune.seed, "eval_every": 0, "save_model": False}
        if planned.settings.warmup_steps is not None:
            changes["warmup_steps"] = min(steps - 1, round(tune.fraction * planned.settings.warmup_steps))

        def evaluate(rate: float) -> float | None:
            settings = planned.settings.updated(learning_rate=rate, **changes)
            what = f"tuning {planned.name}, learning rate {rate:g}"
            try:
                return self._run("tune", what, settings, folder / planned.name / f"{rate:g}")["validation_loss"]
            except NonFiniteLossError:
                return None

        return tune_learning_rate(tune, open_study(folder, planned.name), evaluate)

    # Training

    def _final_run(self, planned: Planned, rate: float, seed: int) -> dict[str, Any]:
        settings = planned.settings.updated(learning_rate=rate, seed=seed)
        what = planned.name if len(self.recipe.seeds) == 1 else f"{planned.name}, seed {seed}"
        folder = self.out_dir / "runs" / planned.name / f"seed-{seed}"
        return {"seed": seed} | self._run("train", what, settings, folder)

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

    def _speed(self) -> dict[str, Any]:
        path, speed = self.out_dir / SPEED, self.recipe.speed
        if speed.seconds == 0:
            return {}
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
        what = "measuring speed, all models in turn"

        def tell(progress: Mapping[str, Any]) -> None:
            self.on_event(Event("speed", what, progress["step"], progress["steps"], self.ended, self.total))

        self.on_event(Event("speed", what, 0, 0, self.ended, self.total))
        settings = {p.name: p.settings.model_dump(mode="json") for p in self.planned}
        entries = self.recipe.entries
        full = [p.name for p in self.planned if entries[p.name].dense and entries[p.name].how == "fixed"]
        reference = full[0] if full else "dense at full size"
        if not full:
            settings[reference] = self.recipe.train.model_dump(mode="json")
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
