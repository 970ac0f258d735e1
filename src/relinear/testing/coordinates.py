"""Run muP's coordinate check: do activations keep their size across model widths, so that learning rates transfer?"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from relinear.contract.module_state import observe_forwards
from relinear.deprecated import with_attributes_of_0_2
from relinear.hf.model_layout import decoder_layers
from relinear.hf.sub_blocks import sub_blocks

#: kinds of activations that are measured, in the order of a forward pass
KINDS = ("residual stream", "attention output", "MLP output", "logits")
#: kind -> list over steps of (scale, change since initialisation)
_Run = dict[str, list[tuple[float, float]]]


@with_attributes_of_0_2
@dataclasses.dataclass(frozen=True)
class Coordinates:
    """Root mean squares of one kind of activation: for each width a list over steps 0, 1, ...

    Attributes:
        scale: root mean square of the activation; None if training diverged.
        change: the same of its change since initialisation.
    """

    scale: list[list[float | None]]
    change: list[list[float | None]]

    @property
    def ratio(self) -> float | None:
        """Return the largest scale over the smallest after the last step, across widths; None if training diverged."""
        last = [steps[-1] for steps in self.scale if steps[-1] is not None]
        return max(last) / min(last) if len(last) == len(self.scale) and min(last) > 0 else None


def check_coordinates(
    make_model: Callable[[int, int], tuple[Any, torch.optim.Optimizer]],
    widths: Sequence[int],
    ids: Tensor,
    *,
    steps: int = 6,
    seeds: Sequence[int] = (0, 1, 2),
) -> dict[str, Coordinates]:
    """Train a model of several widths on one batch, and measure its activations before every step and after the last.

    If activations, or their changes in training, grow or shrink with the width, the best learning rate at one width is
    not the best at another. Keep the size of attention heads constant.

    Args:
        make_model: (width, seed) -> a decoder and the optimizer of its parameters.
        widths: at least two widths.
        ids: (batch, tokens), the batch of every step.
        steps: optimiser steps.
        seeds: seeds of the weights; scales are geometric means over them.

    Returns:
        ``Coordinates`` by kind: "residual stream", "attention output", "MLP output", "logits". The learning rate
        transfers if every ``ratio`` is small, below 2, say.

    Raises:
        ValueError: for fewer than two widths, one step or one seed.
    """
    if len(set(widths)) < 2 or steps < 1 or not seeds:
        raise ValueError(f"expected at least two widths, one step and one seed, got {widths}, {steps} and {seeds}")
    runs = [[_run(*make_model(width, seed), seed, ids, steps) for seed in seeds] for width in widths]
    return {kind: _coordinates(runs, kind) for kind in KINDS}


def _run(model: Any, optimizer: torch.optim.Optimizer, seed: int, ids: Tensor, steps: int) -> _Run:
    torch.manual_seed(seed)  # for the noise that operators draw
    model.train().config.use_cache = False
    with _recording(model) as recorded:
        initial: dict[str, list[Tensor]] = {}
        measured: _Run = {kind: [] for kind in KINDS}
        for step in range(steps + 1):
            recorded.clear()
            output = model(input_ids=ids, labels=ids)
            recorded["logits"] = [output.logits.detach()]
            initial = initial or dict(recorded)
            for kind in KINDS:
                changes = [now - before for now, before in zip(recorded[kind], initial[kind], strict=True)]
                measured[kind].append((_rms(recorded[kind]), _rms(changes)))
            if step < steps:
                optimizer.zero_grad()
                output.loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    return measured


@contextlib.contextmanager
def _recording(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Record the outputs of layers and sub-blocks within a ``with`` block, by kind, in order."""
    recorded: dict[str, list[Tensor]] = {}

    def record(kind: str, module: nn.Module, args: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        recorded.setdefault(kind, []).append(value.detach())

    modules = [(KINDS[0], layer) for layer in decoder_layers(model)]
    blocks = sub_blocks(model, plain=False)
    modules += [(KINDS[1] if block.role == "attention" else KINDS[2], block.module) for block in blocks]
    with observe_forwards(modules, record):
        yield recorded


def _rms(values: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(value.square().mean()) for value in values) / len(values))


def _coordinates(runs: Sequence[Sequence[Mapping[str, Any]]], kind: str) -> Coordinates:
    """Return the geometric means over seeds, for every width."""
    scale, change = (
        [
            [_mean([step[index] for step in steps]) for steps in zip(*(run[kind] for run in seeds), strict=True)]
            for seeds in runs
        ]
        for index in (0, 1)
    )
    return Coordinates(scale, change)


def _mean(values: Sequence[float]) -> float | None:
    if not all(map(math.isfinite, values)):
        return None
    return math.exp(sum(map(math.log, values)) / len(values)) if min(values) > 0 else 0.0
