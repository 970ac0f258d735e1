"""Throughput of several models as ratios: measured in one process, one after another within every round."""

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from relinear.core.inference import for_inference_
from relinear.system.machine import describe_machine, on_threads
from relinear.train.fit import checkpointing, compiled
from relinear.train.optim import build_optimizer
from relinear.train.run import build_model
from relinear.train.settings import TrainSettings
from relinear.train.trainer import training_device, training_dtype


def training_step(
    model: Any, ids: Tensor, optimizer: torch.optim.Optimizer, dtype: torch.dtype | None, replayed: bool = False
) -> Callable[[], None]:
    """Return a call that makes a step as training does: forward, backward, and the optimiser's.

    Args:
        model: in training mode. ids: (B, T), its labels, too.
        optimizer: of its parameters.
        dtype: of autocast; None computes in what the weights have.
        replayed: whether steps are CUDA graphs.
    """

    def step() -> None:
        if replayed:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(ids.device.type, dtype=dtype, enabled=dtype is not None):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Subject:
    """A model with a training step and an inference pass to be timed, on random tokens of the training's shape."""

    def __init__(self, settings: TrainSettings, vocab_size: int) -> None:
        self.device = training_device(settings)
        self.model = build_model(settings, vocab_size).to(self.device)
        if settings.dtype == "pure_bfloat16":
            self.model.to(torch.bfloat16)
        if settings.gradient_checkpointing:
            checkpointing(self.model, True)
        self.compile = settings.compile
        self.model.config.use_cache = False
        dtype = training_dtype(settings, self.device)
        self.autocast = None if settings.dtype == "pure_bfloat16" or dtype == torch.float32 else dtype
        shape = (settings.batch_size, settings.data.sequence_length)
        self.ids = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(self.device)
        optimizer, replayed = build_optimizer(self.model, settings), settings.compile == "reduce-overhead"
        self.step = training_step(self.model, self.ids, optimizer, self.autocast, replayed)
        self.seconds: dict[str, list[float]] = {"train": [], "inference": []}

    def train(self) -> None:
        self.model.train()
        self.step()

    @torch.no_grad()
    def inference(self) -> None:
        if self.model.training:
            for_inference_(self.model)
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            self.model(input_ids=self.ids)

    def time(self, what: str) -> float:
        work = getattr(self, what)
        if what == "inference":
            work()  # what operators prepare once for new weights is no part of inference
        self._wait()
        start = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure_speed(
    settings: Mapping[str, Any],
    reference: str,
    vocab_size: int,
    seconds: float,
    rounds: int,
    on_progress: Callable[[dict[str, Any]], None] = lambda progress: None,
) -> dict[str, dict[str, Any]]:
    """Return tokens per second of training steps and of inference passes (whole sequences), and their ratios.

    Inference is that of ``relinear.for_inference_``.

    Every round times every model once, so that what slows the machine slows all of them; a ratio is the median over
    rounds of (time of the reference / time of the model) in the same round.

    Args:
        settings: name -> TrainSettings (or a mapping of them); they give batch size, precision and threads.
        reference: the name that ratios refer to.
        vocab_size: of the tokenizer.
        seconds: about how long to measure, warm-up included; at least three rounds are made.
        rounds: at most so many.
        on_progress: called with ``{"step", "steps"}`` after every round.

    Returns:
        name -> train_ratio, inference_ratio, train_tokens_per_second, inference_tokens_per_second, rounds, reference,
        and the processor or GPU that it was measured on.
    """
    loaded = {name: TrainSettings.load(value) for name, value in settings.items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_threads(loaded[reference].threads))
        subjects = {name: _Subject(value, vocab_size) for name, value in loaded.items()}
        for subject in subjects.values():
            stack.enter_context(compiled(subject.model, subject.compile))
        start = time.perf_counter()
        for _ in range(2):  # first touches of memory, compilation
            for subject in subjects.values():
                subject.train()
                subject.inference()
        warm = time.perf_counter() - start
        count = max(3, min(rounds, int(2 * (seconds - warm) / warm)))
        for done in range(count):
            for subject in subjects.values():
                for what, times in subject.seconds.items():
                    times.append(subject.time(what))
            on_progress({"step": done + 1, "steps": count})
    machine = describe_machine()
    on_gpu = subjects[reference].device.type == "cuda"
    processor = {"processor": ", ".join(machine["gpus"]) if on_gpu else machine["processor"]}
    return {name: _figures(subject, subjects[reference], reference) | processor for name, subject in subjects.items()}


def _figures(subject: _Subject, reference: _Subject, name: str) -> dict[str, Any]:
    figures: dict[str, Any] = {"reference": name, "rounds": len(subject.seconds["train"])}
    for what, times in subject.seconds.items():
        more = subject.ids.numel() / reference.ids.numel()  # batches of entries may differ
        ratios = [more * base / own for base, own in zip(reference.seconds[what], times, strict=True)]
        figures[f"{what}_ratio"] = statistics.median(ratios)
        figures[f"{what}_tokens_per_second"] = subject.ids.numel() / statistics.median(times)
    return figures
