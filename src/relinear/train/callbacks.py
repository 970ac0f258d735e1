"""What a run writes down and shows while it goes: metrics.jsonl, progress, throughput."""

import dataclasses
import errno
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback

from relinear.core.config import shown
from relinear.system.files import parse_json, read_text, write_text, writing


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run is: handed to ``on_progress`` after every step, evaluation and checkpoint.

    phase: what was just done, or is about to be (preparing and compiling take a while before the first step).
    loss: the last training loss logged; validation_loss: the last one measured.
    tokens_per_second: of the last steps logged; None before.
    batches: while "evaluating" takes a while, those done and all.
    """

    phase: Literal["prepare", "evaluating", "evaluate", "train", "save", "done"]
    step: int
    steps: int
    loss: float | None = None
    validation_loss: float | None = None
    tokens_per_second: float | None = None
    batches: tuple[int, int] = (0, 0)


class StopOnTerminate(TrainerCallback):
    """Ends training at the end of the step in which ``ask`` was called, with a checkpoint of it. All ranks agree."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._asked = False
        #: whether training was ended
        self.stopped = False

    def ask(self, *_: Any) -> None:
        """What SIGTERM calls."""
        self._asked = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size > 1:  # a signal reaches the ranks in different steps
            if self._asked:
                self._accelerator.set_trigger()
            self._asked = self._accelerator.check_trigger()
        if self._asked and state.global_step < state.max_steps:
            self.stopped = control.should_save = control.should_training_stop = True


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl`` without a last line that was cut off. Raises ValueError on a damaged file."""
    path = Path(path)
    lines, rows = read_text(path).splitlines() if path.exists() else [], []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line, f"{path}, line {number}")
        except ValueError:
            if number < len(lines):
                raise
            break
        if not isinstance(row, dict) or not all(isinstance(row.get(key), int) for key in ("step", "tokens")):
            raise ValueError(f"{path}, line {number} is no row of metrics: {shown(row)}")
        rows.append(row)
    return rows


class RunLog(TrainerCallback):
    """Writes ``metrics.jsonl``, keeps the same rows in ``rows``, and tells ``on_progress``.

    Training rows: step, loss, cross_entropy, aux/*, metric/*, learning_rate, grad_norm, tokens, tokens_per_second.
    Validation rows: step, validation_loss, perplexity, tokens. Tokens a second are those of the steps between two logs,
    without evaluations, checkpoints and the first two steps of a process, where compilation happens.

    Args:
        trainer: a ``RelinearTrainer``.
        path: of the file; None writes none.
        on_progress: called with a ``Progress``; None tells nobody.
    """

    warmup = 2

    def __init__(self, trainer: Any, path: Path | None, on_progress: Callable[[Progress], None] | None) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        #: tokens a second between logs
        self.rates: list[float] = []
        self._trainer, self._on_progress = trainer, on_progress
        self._steps = 0
        #: when steps began to be timed, and the tokens until then
        self._since: tuple[float, int] | None = None
        self._last: dict[str, float | None] = {"loss": None, "validation_loss": None, "tokens_per_second": None}

    @property
    def tokens_per_second(self) -> float | None:
        """Median over the run: what one pause of the machine does not change."""
        return statistics.median(self.rates) if self.rates else None

    def rewind(self, step: int) -> None:
        """Keep the rows up to ``step``, the checkpoint that the run continues from; -1 keeps none."""
        if self.path is None:
            return
        self.rows = [row for row in read_metrics(self.path) if row["step"] <= step]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))

    def check_there(self) -> None:
        """Raise FileNotFoundError if what was written is gone: a run must not end well in a directory made anew."""
        if self.path is not None and not self.path.exists():
            said = "the directory of the run was removed or became unreachable while the run was at work"
            raise FileNotFoundError(errno.ENOENT, said, str(self.path.parent))

    def tell(self, phase: Any, step: int, batches: tuple[int, int] = (0, 0)) -> None:
        """Report to ``on_progress``."""
        if self._on_progress is not None:
            self._on_progress(Progress(phase, step, self._trainer.settings.steps, **self._last, batches=batches))

    def _time_from_here(self) -> None:
        if self._steps >= self.warmup:
            self._since = time.perf_counter(), self._trainer.tokens_seen

    def _rate(self) -> float | None:
        """Tokens a second since steps were last timed from; None while warming up."""
        if self._since is None or self._trainer.tokens_seen == self._since[1]:
            return None
        rate = (self._trainer.tokens_seen - self._since[1]) / (time.perf_counter() - self._since[0])
        self.rates.append(rate)
        return rate

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps += 1
        if self._steps == self.warmup:
            self._time_from_here()
        if control.should_save or control.should_training_stop:
            if state.is_world_process_zero:
                self.check_there()
            control.should_log = True  # so that averages of a resumed run cover the same steps
        if state.is_world_process_zero and not control.should_log:
            self.tell("train", state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        row: dict[str, Any] = {"step": state.global_step}
        if "loss" in logs:
            skipped = ("epoch", "step")
            row |= {k: v for k, v in logs.items() if k not in skipped and isinstance(v, int | float)}
            row |= {"tokens": self._trainer.tokens_seen, "tokens_per_second": self._rate()}
        elif "eval_loss" in logs:
            row |= {"validation_loss": logs["eval_loss"], "perplexity": logs["eval_perplexity"]}
            row |= {"tokens": self._trainer.tokens_seen, "seconds": logs["eval_seconds"]}
        else:
            return
        self._last |= {key: row[key] for key in self._last if key in row}
        row = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
        }
        if state.is_world_process_zero:
            self.rows.append(row)
            if self.path is not None:
                self.check_there()
                with writing(self.path), self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            self.tell("train" if "loss" in logs else "evaluate", state.global_step)
        self._time_from_here()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.tell("save", state.global_step)
        self._time_from_here()
