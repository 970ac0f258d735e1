"""Fitting an operator to what a layer does: recorded inputs, the layer's own outputs, Adam."""

# Legend: M recorded tokens, I in_features, O out_features

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from relinear.core.context import context
from relinear.core.modes import evaluating
from relinear.core.operator import Operator

__all__ = [
    "Course",
    "Error",
    "FitError",
    "OnStep",
    "Pairs",
    "Sums",
    "better",
    "fit",
    "improve",
    "loss_value",
    "measure",
    "start_bias_",
]

Error = TypeVar("Error")
#: told the step, how many there are, and the loss
OnStep = Callable[[int, int, float], None]


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Inputs (M, I) with the function that gives the outputs to reproduce, and the contexts (M, C) or None.

    outputs: rows -> (rows, O); an index tensor or slice in.
    """

    inputs: Tensor
    outputs: Callable[[Tensor | slice], Tensor]
    contexts: Tensor | None = None

    def run(self, module: nn.Module, rows: Tensor | slice) -> Tensor:
        """Return what ``module`` gives for these rows."""
        reference = next(module.parameters())
        given: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self.contexts is not None:
            given = context(self.contexts[rows].to(reference))
        with given:
            return module(self.inputs[rows].to(reference))


@dataclasses.dataclass(frozen=True)
class FitError:
    """relative: sum of squared errors over sum of squares; cosine: mean cosine of a token's output with the wanted."""

    relative: float
    cosine: float


class Sums:
    """What a ``FitError`` is made of, in double precision, part by part."""

    def __init__(self) -> None:
        self._wrong = self._total = self._cosine = 0.0
        self._rows = 0

    def add(self, got: Tensor, wanted: Tensor) -> None:
        """Rows (N, O) of outputs, and of what was wanted."""
        got, wanted = got.double(), wanted.double()
        self._wrong += float((got - wanted).square().sum())
        self._total += float(wanted.square().sum())
        self._cosine += float(torch.nn.functional.cosine_similarity(got, wanted, dim=-1).sum())
        self._rows += len(got)

    def error(self) -> FitError:
        """Of all rows so far."""
        return FitError(self._wrong / max(self._total, 1e-30), self._cosine / self._rows)


def _parts(rows: slice, chunk: int = 4096) -> list[slice]:
    return [slice(start, min(start + chunk, rows.stop)) for start in range(rows.start, rows.stop, chunk)]


@torch.no_grad()
def measure(module: nn.Module, pairs: Pairs, rows: slice) -> FitError:
    """Errors of ``module`` (in eval mode) on ``rows``, accumulated in double precision."""
    sums = Sums()
    with evaluating(module):
        for part in _parts(rows):
            sums.add(pairs.run(module, part), pairs.outputs(part))
    return sums.error()


@torch.no_grad()
def start_bias_(module: Operator, pairs: Pairs, rows: slice, *, fitted: bool) -> None:
    """Start the bias of ``module`` at the mean of what it is to give.

    Args:
        rows: over which the mean is taken.
        fitted: whether the rest of it gives an estimate already (a closed-form fit): the mean is then of what is
            missing, and the bias that is there stays in.
    """
    assert module.bias is not None
    total: Tensor | float = 0.0
    with evaluating(module):
        for part in _parts(rows):
            wanted = pairs.outputs(part).double()
            total = total + (wanted - pairs.run(module, part).double() if fitted else wanted).sum(0)
    mean = total / (rows.stop - rows.start)
    module.bias.copy_(module.bias + mean if fitted else mean)


def better(kind: str, after: FitError, before: FitError) -> bool:
    """Return whether a fit by this loss ended no worse than it began; not a number counts as worse."""
    return after.cosine >= before.cosine if kind == "cosine" else after.relative <= before.relative


def loss_value(kind: str, got: Tensor, wanted: Tensor, mean_square: float) -> Tensor:
    """Return the loss "mse", relative to ``mean_square``, or "cosine" of outputs (..., O)."""
    if kind == "cosine":
        return 1 - torch.nn.functional.cosine_similarity(got, wanted, dim=-1).mean()
    return (got - wanted).square().mean() / mean_square


def _parameter_groups(module: nn.Module, learning_rate: float) -> list[dict]:
    """Adam's groups, with the learning-rate multipliers that an operator asks for."""
    roles = module.param_roles() if isinstance(module, Operator) else {}
    return [
        {"params": [parameter], "lr": learning_rate * (roles[name].lr_multiplier if name in roles else 1.0)}
        for name, parameter in module.named_parameters()
    ]


@dataclasses.dataclass(frozen=True)
class Course:
    """How modules are trained: passes over the samples, samples a step, Adam's peak learning rate, seed of the order.

    told_every: steps between two reports of progress.
    """

    epochs: int
    batch: int
    learning_rate: float
    seed: int
    told_every: int = 1


def improve(
    modules: Sequence[nn.Module],
    samples: int,
    loss: Callable[[Tensor], Tensor],
    measure: Callable[[], Error],
    no_worse: Callable[[Error, Error], bool],
    course: Course,
    on_progress: OnStep = lambda step, steps, loss: None,
) -> tuple[Error, Error]:
    """Train ``modules`` together in place: Adam, a cosine from the full rate to 0, auxiliary losses of operators added.

    Args:
        samples: how many there are to train on, in a new order each pass; what does not fill a step is left out.
        loss: of some of the samples, by their indices.
        measure: the error of the modules as they are, in evaluation mode.
        no_worse: whether the error after (first) is no worse than the one before; not a number counts as worse.
        on_progress: called with step, steps and the loss.

    Returns:
        the errors before and after. Where the second is worse, the modules get their first parameters back.
    """
    for module in modules:
        module.eval()
    before = measure()
    starts = [copy.deepcopy(module.state_dict()) for module in modules]
    for module in modules:
        module.train().requires_grad_(True)
    operators = [module for module in modules if isinstance(module, Operator)]
    groups = [group for module in modules for group in _parameter_groups(module, course.learning_rate)]
    optimizer = torch.optim.Adam(groups)
    batch = min(course.batch, samples)
    steps = course.epochs * (samples // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 0.5 * (1 + math.cos(math.pi * at / steps)))
    generator = torch.Generator().manual_seed(course.seed)
    step = 0
    for _ in range(course.epochs):
        for rows in torch.randperm(samples, generator=generator).split(batch):
            if len(rows) < batch:
                break
            value = loss(rows) + sum(added for operator in operators for added in operator.aux_losses().values())
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % course.told_every == 0 or step == steps:
                on_progress(step, steps, float(value.detach()))
    for module in modules:
        module.eval()
    after = measure()
    if no_worse(after, before):
        return before, after
    for module, start in zip(modules, starts, strict=True):
        module.load_state_dict(start)
    return before, before


def fit(
    module: nn.Module,
    pairs: Pairs,
    *,
    train_rows: int,
    loss: str,
    course: Course,
    on_progress: OnStep = lambda step, steps, loss: None,
) -> tuple[FitError, FitError]:
    """Train ``module`` in place on the first ``train_rows`` rows of ``pairs`` by ``improve``; the rows after judge it.

    Args:
        module: an operator (or linear layer) in the precision to train in.
        loss: "mse" or "cosine".

    Returns:
        errors before and after, on the rows that were held out.
    """
    held_out = slice(train_rows, len(pairs.inputs))
    mean_square = float(pairs.outputs(slice(0, min(train_rows, 16384))).double().square().mean()) or 1.0

    def value(rows: Tensor) -> Tensor:
        got = pairs.run(module, rows)
        return loss_value(loss, got, pairs.outputs(rows).to(got), mean_square)

    def error() -> FitError:
        return measure(module, pairs, held_out)

    return improve([module], train_rows, value, error, partial(better, loss), course, on_progress)
