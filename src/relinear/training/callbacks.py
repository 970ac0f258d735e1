"""Trainer callbacks: write metrics.jsonl, report progress and throughput, stop on SIGTERM, track latents' moments."""

# Legend: R latent size

import errno
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from relinear.activations.hooks import Activation, observe
from relinear.activations.latent_recording import LatentDistribution
from relinear.settings.messages import quoted
from relinear.system import files
from relinear.system.progress import Progress, ProgressCallback, no_progress
from relinear.training.settings import FitSettings


class StopOnTerminate(TrainerCallback):
    """Save a checkpoint and end training after the step in which ``request`` was called; all ranks stop together."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._requested = False
        #: whether this callback ended training
        self.stopped = False

    def request(self, *_: Any) -> None:
        """Ask for the stop; takes the arguments of a signal handler."""
        self._requested = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size > 1:  # a signal may reach the ranks during different steps
            if self._requested:
                self._accelerator.set_trigger()
            self._requested = self._accelerator.check_trigger()
        if self._requested and state.global_step < state.max_steps:
            self.stopped = control.should_save = control.should_training_stop = True


def estimated_seconds(
    rows: Sequence[Mapping[str, Any]], settings: FitSettings, step: int = 0
) -> tuple[float, float] | None:
    """Estimate the seconds of a whole run, and those that remain after ``step``; None before steps were timed.

    Steps and evaluations count with their times in ``rows`` of metrics.jsonl.
    """
    timed = [row for row in rows if row.get("tokens_per_second")]
    if not timed:
        return None
    seconds_per_step = (
        timed[-1]["tokens"] / timed[-1]["step"] / statistics.median(row["tokens_per_second"] for row in timed)
    )
    evaluated = [row["seconds"] for row in rows if "perplexity" in row]
    seconds_per_evaluation = statistics.mean(evaluated) if evaluated else 0.0
    evaluations = 1 + math.ceil(settings.steps / (settings.eval_every or settings.steps))
    whole = seconds_per_step * settings.steps + seconds_per_evaluation * evaluations
    return whole, max(0.0, whole - seconds_per_step * step - seconds_per_evaluation * len(evaluated))


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a ``metrics.jsonl``; drop a truncated last line. Raises ValueError for a damaged file."""
    path = Path(path)
    lines = files.read_text(path).splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = files.parse_json(line, f"{path}, line {number}")
        except ValueError:
            if number < len(lines):
                raise
            break
        if not isinstance(row, dict) or not all(isinstance(row.get(key), int) for key in ("step", "tokens")):
            raise ValueError(f"{path}, line {number} is not a row of metrics: {quoted(row)}")
        rows.append(row)
    return rows


class RunLog(TrainerCallback):
    """Write ``metrics.jsonl``, collect the same rows in ``rows``, and call ``on_progress``.

    Training rows: step, loss, cross_entropy, aux/*, metric/*, learning_rate, grad_norm, tokens, tokens_per_second.
    Validation rows: step, validation_loss, perplexity, tokens. Tokens per second are those of the steps between two
    logs, without evaluations, checkpoints and the first two steps of a process, which compile.

    Args:
        trainer: a ``RelinearTrainer``.
        path: path of ``metrics.jsonl``; None writes no file.
        on_progress: called after every step, evaluation and checkpoint.
    """

    warmup = 2

    def __init__(self, trainer: Any, path: Path | None, on_progress: ProgressCallback) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        #: tokens per second between logs
        self.rates: list[float] = []
        self._trainer = trainer
        self._on_progress = on_progress or no_progress  # None was the default before
        self._steps = 0
        #: when timing last started, and the tokens seen until then
        self._timing_started: tuple[float, int] | None = None
        self._latest: dict[str, Any] = {"loss": None, "validation_loss": None, "tokens_per_second": None}

    @property
    def tokens_per_second(self) -> float | None:
        """Return the median over the run; a pause of the machine does not change it."""
        return statistics.median(self.rates) if self.rates else None

    def rewind(self, step: int) -> None:
        """Drop the rows after ``step``, the checkpoint from which the run resumes; -1 drops all."""
        if self.path is None:
            return
        self.rows = [row for row in read_metrics(self.path) if row["step"] <= step]
        files.write_text(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))

    def check_folder_exists(self) -> None:
        """Raise FileNotFoundError if the run's directory is gone: the run must not go on in a new, empty one."""
        if self.path is not None and not self.path.exists():
            message = "the directory of the run was removed or became unreachable during the run"
            raise FileNotFoundError(errno.ENOENT, message, str(self.path.parent))

    def report(self, stage: str, step: int) -> None:
        """Call ``on_progress`` after a step; ``stage`` is the kind of work just done or about to start."""
        settings = self._trainer.settings
        estimate = estimated_seconds(self.rows, settings, step)
        text = "preparing" if stage == "prepare" else "training"
        seconds_left = estimate and estimate[1]
        self._on_progress(Progress(text, step, settings.steps, stage, seconds_left=seconds_left, **self._latest))

    def report_batch(self, batch: int, batches: int) -> None:
        """Call ``on_progress`` for a batch of a long evaluation."""
        self._on_progress(Progress("evaluating", batch, batches, "evaluate", **self._latest))

    def _restart_timing(self) -> None:
        if self._steps >= self.warmup:
            self._timing_started = time.perf_counter(), self._trainer.tokens_seen

    def _measured_rate(self) -> float | None:
        """Return tokens per second since timing last started; None while warming up."""
        if self._timing_started is None or self._trainer.tokens_seen == self._timing_started[1]:
            return None
        rate = (self._trainer.tokens_seen - self._timing_started[1]) / (time.perf_counter() - self._timing_started[0])
        self.rates.append(rate)
        return rate

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps += 1
        if self._steps == self.warmup:
            self._restart_timing()
        if control.should_save or control.should_training_stop:
            if state.is_world_process_zero:
                self.check_folder_exists()
            control.should_log = True  # so that a resumed run averages over the same steps
        if state.is_world_process_zero and not control.should_log:
            self.report("train", state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        row: dict[str, Any] = {"step": state.global_step}
        if "loss" in logs:
            skipped = ("epoch", "step")
            row |= {k: v for k, v in logs.items() if k not in skipped and isinstance(v, int | float)}
            row |= {"tokens": self._trainer.tokens_seen, "tokens_per_second": self._measured_rate()}
        elif "eval_loss" in logs:
            row |= {"validation_loss": logs["eval_loss"], "perplexity": logs["eval_perplexity"]}
            row |= {"tokens": self._trainer.tokens_seen, "seconds": logs["eval_seconds"]}
        else:
            return
        self._latest |= {key: row[key] for key in self._latest if key in row}
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        if state.is_world_process_zero:
            self.rows.append(row)
            if self.path is not None:
                self.check_folder_exists()
                with files.os_errors_named(self.path), self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            self.report("train" if "loss" in logs else "evaluate", state.global_step)
        self._restart_timing()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.report("save", state.global_step)
        self._restart_timing()


# Running moments of latents


FILE = "latent_moments.json"
_SUMS = ("tokens", "mu", "mu_squared", "variance")


class LatentMoments(TrainerCallback):
    """Keep the running mean and standard deviation of every latent, a mixture of N(mu, sigma^2) over tokens.

    Each observed step multiplies the earlier sums by ``decay``, so that the moments follow the training. They are
    written to ``latent_moments.json`` in every checkpoint (and read from there on resume) and, at the end, in the run's
    directory; ``moments()`` returns them in between. With several ranks only the first rank's tokens count.

    Args:
        every: steps between two observations (which compute nothing extra; a compiled model has a second graph).
        decay: factor on the weight of the earlier observations at each new one; with 1 all count equally.

    Raises:
        ValueError: if ``every`` is below 1 or ``decay`` outside of (0, 1].

    Examples:
        >>> moments = relinear.training.LatentMoments(every=1)  # for relinear.fit(..., callbacks=[moments])
        >>> moments.moments()
        {}
    """

    def __init__(self, every: int = 10, decay: float = 0.99) -> None:
        if every < 1 or not 0 < decay <= 1:
            raise ValueError(f"every must be at least 1 and decay in (0, 1], got every={every}, decay={decay}")
        self.every, self.decay = every, decay
        self._sums: dict[str, dict[str, Tensor]] = {}
        self._observing: AbstractContextManager | None = None

    def moments(self) -> dict[str, LatentDistribution]:
        """Return the mean and standard deviation (R,) by operator name, in float64 on the CPU."""
        return {name: _distribution(sums) for name, sums in self._sums.items()}

    @torch.no_grad()
    def _observe_latent(self, name: str, latent: Activation) -> None:
        mu, sigma = (t.detach().flatten(0, -2).double() for t in (latent.mu, latent.sigma))
        new = (torch.tensor(len(mu), dtype=torch.float64), mu.sum(0), mu.square().sum(0), sigma.square().sum(0))
        old = self._sums.get(name, dict.fromkeys(_SUMS, 0.0))
        self._sums[name] = {key: old[key] + value.cpu() for key, value in zip(_SUMS, new, strict=True)}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / FILE
        if state.global_step and saved.is_file():
            self._sums = _read_sums(saved)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 and self._observing is None:
            self._sums = {n: {k: v * self.decay for k, v in sums.items()} for n, sums in self._sums.items()}
            self._observing = observe(model, self._observe_latent)
            self._observing.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._observing is not None:
            self._observing.__exit__(None, None, None)
            self._observing = None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            self._write(folder / FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_step_end(args, state, control)
        if state.is_world_process_zero:
            folder = Path(args.output_dir)
            # In runs of relinear the output_dir of transformers is the run's folder "checkpoints".
            self._write((folder.parent if folder.name == "checkpoints" else folder) / FILE)

    def _write(self, path: Path) -> None:
        latents = {
            name: {"mean": moments.mean.tolist(), "std": moments.std.tolist()}
            | {"sums": {key: value.tolist() for key, value in self._sums[name].items()}}
            for name, moments in self.moments().items()
        }
        files.write_json(path, {"format": 1, "every": self.every, "decay": self.decay, "latents": latents})


def read_moments(path: str | Path) -> dict[str, LatentDistribution]:
    """Return the moments by operator name that ``LatentMoments`` wrote.

    Args:
        path: the file, or the run's directory that holds it.

    Raises:
        ValueError: if ``LatentMoments`` did not write the file.
        FileNotFoundError: if there is no file.

    Examples:
        >>> model, ids = relinear.from_preset("tiny"), torch.randint(258, (8, 32))
        >>> _ = relinear.replace_(model, {"q_proj": relinear.HDPL(rank=4)}, layers=0)
        >>> rows, moments = [{"input_ids": row, "labels": row} for row in ids], relinear.training.LatentMoments(every=1)
        >>> _ = relinear.fit(model, rows, relinear.training.FitSettings(steps=2), out_dir="run", callbacks=[moments])
        >>> list(relinear.training.read_moments("run"))
        ['model.layers.0.self_attn.q_proj']
    """
    path = Path(path)
    return {name: _distribution(sums) for name, sums in _read_sums(path / FILE if path.is_dir() else path).items()}


def _distribution(sums: dict[str, Tensor]) -> LatentDistribution:
    tokens, mu, mu_squared, variance = (sums[key] for key in _SUMS)
    mean = mu / tokens
    return LatentDistribution(mean, ((mu_squared + variance) / tokens - mean.square()).clamp(min=0).sqrt())


def _read_sums(path: Path) -> dict[str, dict[str, Tensor]]:
    with files.damaged_file_errors(
        path, "not a file of latent moments of this version", "choose another, or train again"
    ):
        content = files.read_json(path)
        if content["format"] != 1:
            raise ValueError(f"format {quoted(content['format'])}")
        return {name: _sums(latent["sums"]) for name, latent in dict(content["latents"]).items()}


def _sums(values: dict[str, Any]) -> dict[str, Tensor]:
    tokens, *sums = (torch.tensor(values[key], dtype=torch.float64) for key in _SUMS)
    if tokens.dim() or len({tuple(value.shape) for value in sums}) > 1:
        raise ValueError(f"sums of unequal sizes {[tuple(value.shape) for value in sums]}")
    return dict(zip(_SUMS, (tokens, *sums), strict=True))
