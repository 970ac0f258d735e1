"""Many small runs of one architecture at once: weights stacked, one pass through all of them, an optimiser for each.

Small models wait for operations to start rather than for their work. Runs that differ in seed, rate, warm-up or
initialisation alone see the same operations, which ``torch.func.vmap`` starts once for all of them.
"""

# Legend: R runs, B batch, T tokens, V vocabulary

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state
from torch.utils.data import DataLoader, default_collate

from relinear.core.aux import IGNORED_LABEL, aux_losses, operator_metrics
from relinear.core.modes import evaluating
from relinear.data import prepare_data
from relinear.surgery import checkpoint as checkpoint_room
from relinear.system.files import write_json, write_text
from relinear.system.lock import only_process_in
from relinear.system.machine import PeakMemory, on_threads
from relinear.system.timing import seconds_of
from relinear.train.callbacks import Progress
from relinear.train.fit import TrainResult, training_device, training_dtype
from relinear.train.optim import build_optimizer, build_schedule
from relinear.train.run import build_model, described
from relinear.train.settings import TrainSettings
from relinear.train.trainer import DIVERGED, SteadySampler, block_losses, joined, write_block_losses

#: settings in which the runs of a stack may differ
_FREE = ("seed", "learning_rate", "warmup_steps", "warmup_ratio")
#: settings that a stack has no way for, unless they are the default
_PLAIN = ("accumulation", "compile", "gradient_checkpointing", "objective", "report_to")
#: seconds that measuring may take, and a stack: it keeps nothing on the way
_MEASURING, _LONGEST = 60, 600
_ROUNDS = 3


def stack_key(settings: TrainSettings) -> str:
    """Return what the runs of a stack have in common, as a text to compare."""
    values = settings.model_dump(mode="json", exclude=set(_FREE))
    values["model_overrides"].pop("initializer_range", None)
    return json.dumps(values, sort_keys=True)


def train_stacked(
    runs: Sequence[tuple[TrainSettings, Path]], on_progress: Callable[[Progress], None] = lambda progress: None
) -> dict[str, Any]:
    """Carry out runs at once where that is faster, and leave in each directory what ``train`` leaves there.

    A step of all is first timed against steps of one after the other. A run that diverges is recorded as such and
    holds up no other. A stack that is cut off leaves nothing and starts over.

    Args:
        runs: settings and directory of each; their ``stack_key`` is the same.
        on_progress: told of every step.

    Returns:
        ``{"refused": why}`` where nothing was done, else ``{"runs", "together_seconds", "alone_seconds"}``: the
        seconds of a step of all, and of as many steps of one.
    """
    shared = runs[0][0]
    defaults = {name: TrainSettings.model_fields[name].default for name in _PLAIN}
    own = [f"{name}={getattr(shared, name)!r}" for name in _PLAIN if getattr(shared, name) != defaults[name]]
    if training_dtype(shared, training_device(shared)) != torch.float32:
        own.append(f"dtype={shared.dtype!r}, whose rounding depends on the order of sums (float32 has one)")
    if own or len({stack_key(settings) for settings, _ in runs}) > 1:
        return {"refused": f"a stack has no {', '.join(own)}" if own else "runs of different models, data or budgets"}
    with on_threads(shared.threads):
        try:
            stack = _Stack(runs)
            measured = stack.measured()
        except (RuntimeError, TypeError, ValueError) as error:  # too large, too slow, or what vmap cannot see through
            return {"refused": str(error).splitlines()[0]}
        stack.train(on_progress)
    stack.leave(measured)  # with the machine as it is for runs alone
    return measured


class _Run:
    """One of the runs: its model is a view of the stack, its optimiser and schedule are those of a run alone."""

    def __init__(self, settings: TrainSettings, folder: Path, model: Any, data: Any) -> None:
        self.settings, self.folder, self.model = settings, folder, model
        per_run = settings.batch_size * settings.steps
        sampler = SteadySampler(len(data.train), per_run, settings.seed)
        self.batches = iter(DataLoader(data.train, settings.batch_size, sampler=sampler))
        self.rows: list[dict[str, Any]] = []
        self.diverged = ""
        self.rate, self.norm = settings.learning_rate, torch.zeros(())
        #: of the steps since the last row
        self.seen: list[dict[str, float]] = []
        self.blocks: list[Tensor | None] = []

    def begin(self) -> None:
        """Once the model's weights are where they are trained."""
        self.learning = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(self.model, self.settings)
        self.schedule = build_schedule(self.optimizer, self.settings)

    def step(self, step: int, values: dict[str, float]) -> None:
        """Move the weights by their gradients, unless the run has diverged."""
        self.check(values["loss"], "training loss", step)
        if self.diverged:
            return
        self.seen.append(values)
        self.norm = torch.nn.utils.clip_grad_norm_(self.learning, self.settings.max_grad_norm or math.inf)
        self.rate = float(self.schedule.get_last_lr()[0])
        self.optimizer.step()
        self.schedule.step()

    def check(self, value: float, what: str, step: int, most: float = math.inf) -> None:
        """Note that the run has diverged, where ``value`` says so; its weights stay as they are from then on."""
        if not self.diverged and not (math.isfinite(value) and value <= most):
            self.diverged = f"the {what} is {value:.4g} at step {step}, with a learning rate of {self.rate:.3g}"

    def log(self, step: int, last: dict[str, float], counted: dict[str, float]) -> None:
        """Add a row of the steps since the last one, as ``RunLog`` writes it."""
        if self.diverged:
            return
        means = {name: statistics.fmean(values[name] for values in self.seen) for name in self.seen[0]}
        self.seen, loss = [], means.pop("loss")
        first = next((row["loss"] for row in self.rows if "loss" in row), loss)
        self.check(loss, "training loss", step, DIVERGED * max(first, 1.0))
        row = {"step": step, "loss": loss, "grad_norm": float(self.norm), "learning_rate": self.rate}
        row |= {"cross_entropy": loss - sum(means.values())} | means
        self.rows.append(row | {name: value for name, value in last.items() if name != "loss"} | counted)

    def leave(self, data: Any, measured: dict[str, Any], peak: int) -> None:
        """Write what ``train`` writes; the last, whether the run has ended."""
        with only_process_in(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            record = described(self.settings, self.model, data) | {"stacked": measured}
            write_text(self.folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in self.rows))
            if self.diverged:
                record |= {"status": "failed", "error": self.diverged, "diverged": True}
            else:
                result = TrainResult.of_rows(
                    self.rows,
                    **record["model"],
                    tokens_per_second=next(r["tokens_per_second"] for r in reversed(self.rows) if "loss" in r),
                    peak_memory_bytes=peak,
                    steps=self.settings.steps,
                    out_dir=self.folder,
                )
                assert result.validation_loss is not None
                write_block_losses(self.folder / "block_losses.npy", self.blocks, result.validation_loss)
                if self.settings.save_model:
                    for parameter in self.model.parameters():
                        parameter.data = parameter.data.clone()  # of its own: a part of the stack would be saved whole
                    checkpoint_room.save_pretrained(self.model, self.folder / "model", tokenizer=data.tokenizer)
                record |= {"status": "done", "result": result.to_dict()}
            write_json(self.folder / "run.json", record)


class _Stack:
    """The runs' weights and buffers, stacked along a first dimension R."""

    def __init__(self, runs: Sequence[tuple[TrainSettings, Path]]) -> None:
        self.shared = runs[0][0]
        self.device = training_device(self.shared)
        self.data = prepare_data(self.shared.data)
        self.memory = PeakMemory(self.device)
        self.batch = self._placed(default_collate([self.data.train[index] for index in range(self.shared.batch_size)]))
        self.base = self._model(self.shared)
        self.fused = self.base.config._attn_implementation
        self._check_size(len(runs))
        self._attend("eager")  # fused attention has no batched form
        models = [self.base, *(self._model(settings) for settings, _ in runs[1:])]
        self.runs = [_Run(*run, model, self.data) for run, model in zip(runs, models, strict=True)]
        self.parameters, self.buffers = stack_module_state(models)
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        for index, run in enumerate(self.runs):
            for name, parameter in run.model.named_parameters():
                stacked = self.parameters[name]
                parameter.data = stacked.data[index]
                parameter.grad = None if stacked.grad is None else stacked.grad[index]
            for name, buffer in run.model.named_buffers():
                buffer.data = self.buffers[name][index]
            run.begin()

    def _model(self, settings: TrainSettings) -> Any:
        return build_model(settings, self.data.vocab_size).to(self.device).train()

    def _attend(self, how: str) -> None:
        self.base.set_attn_implementation(how)

    # What it costs

    def _check_size(self, runs: int) -> None:
        """Refuse models whose steps take too long to be measured, or that do not fit into memory together."""
        import psutil

        self.memory.start()
        before = self.memory.read()
        seconds_of(self._one)
        needed, seconds = runs * (self.memory.read() - before), seconds_of(self._one)
        there = torch.cuda.mem_get_info()[0] if self.device.type == "cuda" else psutil.virtual_memory().available
        if needed > there:
            raise RuntimeError(f"{runs} runs at once would take {needed / 2**30:.1f} GiB")
        if 2 * _ROUNDS * runs * seconds > _MEASURING:
            raise RuntimeError(f"a step of {seconds:.1f} s is work, not the start of operations")

    def _one(self) -> None:
        """The passes of a step of the first run, as it trains alone."""
        self.base(**self.batch, use_cache=False)["loss"].backward()

    def _all(self) -> None:
        """The passes of a step of every run."""
        self._passes([self.batch] * len(self.runs))

    def measured(self) -> dict[str, Any]:
        """Time both ways in turn; refuses where one run after the other is as fast."""
        self._evaluated(self.batch)
        self._all()
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(_ROUNDS):
            times[0].append(seconds_of(self._all))
            self._attend(self.fused)
            times[1].append(len(self.runs) * seconds_of(self._one))
            self._attend("eager")
        self._forget_gradients()
        together, alone = map(statistics.median, times)
        told = f"{len(self.runs)} runs at once take {together:.3g} s a step, one by one {alone:.3g} s"
        if together >= alone:
            raise RuntimeError(told)
        if together * self.shared.steps > _LONGEST:
            raise RuntimeError(f"{told}: more than {_LONGEST} s in all, with nothing kept on the way")
        return {"runs": len(self.runs), "together_seconds": together, "alone_seconds": alone}

    # A step

    def _placed(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: values.to(self.device) for name, values in batch.items()}

    def _passes(self, batches: Sequence[dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Losses (R,), their auxiliary terms and the operators' measurements by name; leaves gradients."""

        def run(parameters: Any, buffers: Any, batch: Any) -> Any:
            loss = functional_call(self.base, (parameters, buffers), kwargs={**batch, "use_cache": False})["loss"]
            return loss, aux_losses(self.base), operator_metrics(self.base)

        batch = {name: torch.stack([each[name] for each in batches]) for name in batches[0]}
        losses, terms, metrics = torch.vmap(run)(self.parameters, self.buffers, batch)
        losses.sum().backward()
        return losses, terms, metrics

    def _forget_gradients(self) -> None:
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.zero_()  # in place: the runs hold views of it

    def train(self, on_progress: Callable[[Progress], None]) -> None:
        """Take all runs through all steps."""
        shared, tokens, since, rate = self.shared, 0, time.perf_counter(), None
        self.memory.start()
        self._evaluate(0, 0)
        for step in range(1, shared.steps + 1):
            batches = [self._placed(next(run.batches)) for run in self.runs]
            tokens += batches[0]["input_ids"].numel()
            losses, terms, metrics = self._passes(batches)
            noted = _by_run({"loss": losses} | joined("aux", terms, torch.sum))
            for run, values in zip(self.runs, noted, strict=True):
                run.step(step, values)
            self._forget_gradients()
            if step % shared.log_every == 0 or step == shared.steps:
                rate = tokens / (time.perf_counter() - since)
                last = _by_run({"loss": losses} | joined("metric", metrics, torch.mean))
                for run, values in zip(self.runs, last, strict=True):
                    run.log(step, values, {"tokens": tokens, "tokens_per_second": rate})
            on_progress(Progress("train", step, shared.steps, losses.nanmean().item(), tokens_per_second=rate))
            if (shared.eval_every and step % shared.eval_every == 0) or step == shared.steps:
                self._evaluate(step, tokens)

    def leave(self, measured: dict[str, Any]) -> None:
        """Write every run; the memory of each is that of all."""
        self._attend(self.fused)
        for run in self.runs:
            run.leave(self.data, measured, self.memory.read())

    # Evaluation

    @torch.no_grad()
    def _evaluated(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Losses (R,) and logits (R, B, T, V)."""

        def run(parameters: Any, buffers: Any) -> Any:
            output = functional_call(self.base, (parameters, buffers), kwargs={**batch, "use_cache": False})
            return output["loss"], output["logits"]

        with evaluating(self.base):
            return torch.vmap(run)(self.parameters, self.buffers)

    def _evaluate(self, step: int, tokens: int) -> None:
        """Add a row of validation to every run; at the end their losses by block, too."""
        start, count, sums = time.perf_counter(), 0, torch.zeros(len(self.runs), dtype=torch.float64)
        bound = math.inf if step else self.shared.eval_start_tokens or math.inf
        size = self.shared.eval_batch_size or self.shared.batch_size
        for batch in map(self._placed, DataLoader(self.data.validation, size)):
            losses, logits = self._evaluated(batch)
            targets = int((batch["labels"][..., 1:] != IGNORED_LABEL).sum())
            sums, count = sums + losses.double().cpu() * targets, count + targets
            if step == self.shared.steps:
                for run, own in zip(self.runs, logits, strict=True):
                    run.blocks.append(block_losses({"logits": own}, batch["labels"]))
            if count >= bound:
                break
        counted = {"tokens": tokens, "seconds": time.perf_counter() - start}
        for run, loss in zip(self.runs, (sums / count).tolist(), strict=True):
            run.check(loss, "validation loss", step)
            if not run.diverged:
                row = {"step": step, "validation_loss": loss, "perplexity": math.exp(min(loss, 700.0))}
                run.rows.append(row | counted)


def _by_run(values: dict[str, Tensor]) -> list[dict[str, float]]:
    """Numbers by name, each (R,), as those of every run."""
    columns = torch.stack([value.detach().float() for value in values.values()], 1)
    return [dict(zip(values, row, strict=True)) for row in columns.tolist()]
