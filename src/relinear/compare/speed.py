"""Measure throughput of several models as ratios: in one process, in turn within every round."""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from relinear.compare.schema import Speed
from relinear.contract.inference import for_inference_
from relinear.system.machine import describe_machine, on_threads
from relinear.system.timing import Timing, interleave
from relinear.training.fitting import autocast_dtype, compiled, prepare_model_, training_device, training_step
from relinear.training.optim import build_optimizer
from relinear.training.run import build_model
from relinear.training.settings import TrainSettings

#: operations of a step that ``seconds_per_token`` times, by kind of device
_TIMED = {"cpu": 5e9, "cuda": 2e13}


def _timed_calls(settings: TrainSettings, vocab_size: int | None) -> tuple[Any, dict[str, Callable[[], Any]]]:
    """Return a model, and its training step and inference pass on random tokens, to be timed."""
    device = training_device(settings)
    model = build_model(settings, vocab_size).to(device)
    prepare_model_(model, settings)
    model.config.use_cache = False
    dtype = autocast_dtype(settings, device)
    shape = (settings.batch_size, settings.data.sequence_length)
    ids = torch.randint(vocab_size or model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(
        device
    )
    replayed = settings.compile == "reduce-overhead"
    step = training_step(model, ids, build_optimizer(model, settings), dtype, replayed)

    def train() -> None:
        model.train()
        step()

    @torch.no_grad()
    def infer() -> None:
        if model.training:
            for_inference_(model)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            model(input_ids=ids)

    return model, {"train": train, "inference": infer}


def measure_speed(
    settings: Mapping[str, Any],
    reference: str,
    vocab_size: int | None,
    seconds: float,
    rounds: int,
) -> dict[str, Speed]:
    """Return tokens per second of training steps and of inference passes (whole sequences), and their ratios.

    Inference is timed after ``relinear.for_inference_``. Training comes first, then inference. Every round times every
    model once, so that what slows the machine slows all of them, and ratios are of times in the same round.

    Args:
        settings: name -> TrainSettings (or a mapping of them); they give batch size, precision and threads.
        reference: the name that ratios refer to.
        vocab_size: size of the tokenizer's vocabulary.
        seconds: about how long to measure, warm-up included; at least three rounds are made.
        rounds: largest number of rounds.

    Returns:
        name -> train_ratio, inference_ratio, train_tokens_per_second, inference_tokens_per_second, rounds, reference,
        and the processor or GPU that it was measured on.
    """
    loaded = {name: TrainSettings.load(value) for name, value in settings.items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_threads(loaded[reference].threads))
        timed = {name: _timed_calls(value, vocab_size) for name, value in loaded.items()}
        for name, (model, _) in timed.items():
            stack.enter_context(compiled(model, loaded[name].compile))
        began = time.perf_counter()
        for call in 2 * [call for _, calls in timed.values() for call in calls.values()]:
            call()  # first touches of memory, compilation
        warm_up = time.perf_counter() - began
        count = max(3, min(rounds, int(2 * (seconds - warm_up) / warm_up)))
        machine = describe_machine()
        on_gpu = training_device(loaded[reference]).type == "cuda"
        processor = ", ".join(machine["gpus"]) if on_gpu else machine["processor"]
        speeds: dict[str, Any] = {
            name: {"reference": reference, "rounds": count, "processor": processor} for name in timed
        }
        for mode in ("train", "inference"):
            calls_of_mode = {name: calls[mode] for name, (_, calls) in timed.items()}
            timings = interleave(calls_of_mode, reference, rounds=count, min_seconds=0.0, warmup=1)
            for name, timing in timings.items():
                speeds[name] |= _throughput(mode, timing, loaded[name], loaded[reference])
    return speeds


def seconds_per_token(settings: TrainSettings, vocab_size: int, flops: int) -> float:
    """Estimate the seconds of training per token, from an uncompiled step on few tokens.

    Args:
        settings: training settings of the run.
        vocab_size: size of the tokenizer's vocabulary.
        flops: FLOPs of the forward pass for a token.
    """
    tokens = round(_TIMED.get(training_device(settings).type, _TIMED["cpu"]) / (3 * flops))
    length = min(settings.data.sequence_length, max(128, min(tokens, 256)))
    batch = max(1, min(settings.batch_size, tokens // length))
    data = settings.data.replace(sequence_length=length).model_dump()
    short = settings.replace(batch_size=batch, accumulation=1, compile=False, data=data)
    with on_threads(short.threads):
        _, calls = _timed_calls(short, vocab_size)
        return interleave({"": calls["train"]}, "", rounds=2, min_seconds=0.0)[""].seconds / (batch * length)


def _throughput(mode: str, timing: Timing, settings: TrainSettings, reference: TrainSettings) -> dict[str, float]:
    """Return tokens per second and their ratio to the reference's, as batch sizes may differ."""
    tokens, reference_tokens = (trained.batch_size * trained.data.sequence_length for trained in (settings, reference))
    return {
        f"{mode}_ratio": tokens / reference_tokens / timing.ratio,
        f"{mode}_tokens_per_second": tokens / timing.seconds,
    }
