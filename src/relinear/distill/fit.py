"""Fitting an operator to what a layer does: recorded inputs, the layer's own outputs, Adam."""

# Legend: M recorded tokens, I in_features, O out_features

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from relinear.core.context import context
from relinear.core.modes import evaluating
from relinear.core.operator import Operator

__all__ = [
    "FitError",
    "Pairs",
    "Sums",
    "better",
    "cosine_steps",
    "fit",
    "loss_value",
    "measure",
    "parameter_groups",
    "start_bias_",
]


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Inputs (M, I) with the function that gives the outputs to reproduce, and the contexts (M, C) or None.

    outputs: rows -> (rows, O); an index tensor or slice in.
    """

    inputs: Tensor
    outputs: Callable[[Tensor | slice], Tensor]
    contexts: Tensor | None = None

    def run(self, module: nn.Module, rows: Tensor | slice) -> Tensor:
        """What ``module`` gives for these rows."""
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
    """Whether a fit by this loss ended no worse than it began; not a number counts as worse."""
    return after.cosine >= before.cosine if kind == "cosine" else after.relative <= before.relative


def loss_value(kind: str, got: Tensor, wanted: Tensor, mean_square: float) -> Tensor:
    """The loss "mse", relative to ``mean_square``, or "cosine" of outputs (..., O)."""
    if kind == "cosine":
        return 1 - torch.nn.functional.cosine_similarity(got, wanted, dim=-1).mean()
    return (got - wanted).square().mean() / mean_square


def parameter_groups(module: nn.Module, learning_rate: float) -> list[dict]:
    """Adam's groups, with the learning-rate multipliers that an operator asks for."""
    roles = module.param_roles() if isinstance(module, Operator) else {}
    return [
        {"params": [parameter], "lr": learning_rate * (roles[name].lr_multiplier if name in roles else 1.0)}
        for name, parameter in module.named_parameters()
    ]


def cosine_steps(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A schedule from the full rate to 0."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))


def fit(
    module: nn.Module,
    pairs: Pairs,
    *,
    train_rows: int,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    loss: str,
    seed: int,
    on_progress: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> tuple[FitError, FitError]:
    """Train ``module`` in place on the first ``train_rows`` rows; the rows after these judge it.

    Where it ends worse than it began, it gets its first parameters back.

    Args:
        module: an operator (or linear layer) in the precision to train in.
        pairs: what to reproduce.
        loss: "mse" or "cosine".
        seed: of the order of rows.
        on_progress: called with step, steps and the loss every so often.

    Returns:
        errors before and after, on the rows that were held out.
    """
    held_out = slice(train_rows, len(pairs.inputs))
    mean_square = float(pairs.outputs(slice(0, min(train_rows, 16384))).double().square().mean()) or 1.0
    before = measure(module, pairs, held_out)
    start = copy.deepcopy(module.state_dict())
    module.train().requires_grad_(True)
    optimizer = torch.optim.Adam(parameter_groups(module, learning_rate))
    batch = min(batch_size, train_rows)
    steps = epochs * (train_rows // batch)
    schedule = cosine_steps(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    step = 0
    for _ in range(epochs):
        order = torch.randperm(train_rows, generator=generator)
        for rows in order.split(batch):
            if len(rows) < batch:
                break
            got = pairs.run(module, rows)
            value = loss_value(loss, got, pairs.outputs(rows).to(got), mean_square)
            if isinstance(module, Operator):
                value = value + sum(module.aux_losses().values())
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % 20 == 0 or step == steps:
                on_progress(step, steps, float(value.detach()))
    module.eval()
    after = measure(module, pairs, held_out)
    if not better(loss, after, before):
        module.load_state_dict(start)
        after = before
    return before, after
