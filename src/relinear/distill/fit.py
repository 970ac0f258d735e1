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

__all__ = ["FitError", "Pairs", "cosine_steps", "fit", "measure", "parameter_groups"]


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


@torch.no_grad()
def measure(module: nn.Module, pairs: Pairs, rows: slice, chunk: int = 4096) -> FitError:
    """Errors of ``module`` (in eval mode) on ``rows``, accumulated in double precision."""
    wrong = total = cosine = 0.0
    with evaluating(module):
        for start in range(rows.start, rows.stop, chunk):
            part = slice(start, min(start + chunk, rows.stop))
            got, wanted = pairs.run(module, part).double(), pairs.outputs(part).double()
            wrong += float((got - wanted).square().sum())
            total += float(wanted.square().sum())
            cosine += float(torch.nn.functional.cosine_similarity(got, wanted, dim=-1).sum())
    return FitError(wrong / max(total, 1e-30), cosine / (rows.stop - rows.start))


def _loss(kind: str, got: Tensor, wanted: Tensor, mean_square: float) -> Tensor:
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
            value = _loss(loss, got, pairs.outputs(rows).to(got), mean_square)
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
    better = after.cosine >= before.cosine if loss == "cosine" else after.relative <= before.relative
    if not better:  # not a number counts as worse
        module.load_state_dict(start)
        after = before
    return before, after
