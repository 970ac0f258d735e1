"""Fitting operators within the model: to its final logits, or to what the module that holds them gives."""

# Legend: N blocks, T tokens a block, V vocabulary

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import le

import torch
from torch import Tensor, nn

from relinear.core.modes import frozen
from relinear.core.objective import kl_terms
from relinear.core.operator import Operator
from relinear.distill.fit import Course, Error, FitError, OnStep, Sums, better, improve, loss_value
from relinear.distill.record import output_of

__all__ = ["fit_jointly", "fit_logits", "held_out_perplexity", "swapped"]


@contextlib.contextmanager
def swapped(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Within the block ``model`` has ``modules`` under their names (aliases included in the mapping)."""
    before = {name: model.get_submodule(name) for name in modules}
    try:
        for name, module in modules.items():
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module)
        yield
    finally:
        for name, module in before.items():
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module)


class _InItsOwnDtype(nn.Module):
    """An operator that is trained in single precision, in a model that computes in another."""

    def __init__(self, operator: nn.Module) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.operator(x.to(next(self.operator.parameters()).dtype)).to(x.dtype)


@torch.no_grad()
def held_out_perplexity(
    model: nn.Module, blocks: Tensor, batch: int, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> float | None:
    """exp of the mean loss of every token (the first of each block aside) of blocks (N, T), by a model in eval mode.

    None if the model returns no logits.
    """
    device, total = next(model.parameters()).device, 0.0
    for start in range(0, len(blocks), batch):
        ids = blocks[start : start + batch].to(device)
        logits = getattr(model(input_ids=ids), "logits", None)
        if logits is None:
            return None
        for row, wanted in zip(logits[:, :-1], ids[:, 1:], strict=True):  # in float32 a whole batch may be gigabytes
            total += float(torch.nn.functional.cross_entropy(row.float(), wanted, reduction="sum"))
        on_progress(min(start + batch, len(blocks)), len(blocks))
    loss = total / blocks[:, 1:].numel()
    return math.exp(loss) if loss < 700 else math.inf


def _improve_within(
    model: nn.Module,
    operators: Mapping[str, Operator],
    blocks: Tensor,
    train_blocks: int,
    loss: Callable[[Tensor], Tensor],
    measure: Callable[[], Error],
    no_worse: Callable[[Error, Error], bool],
    course: Course,
    on_progress: OnStep,
) -> tuple[Error, Error]:
    """Train ``operators`` by ``improve`` on the first blocks; the model stays as it is."""
    device = next(model.parameters()).device
    unique = list({id(operator): operator for operator in operators.values()}.values())
    with frozen(model):
        return improve(
            unique, train_blocks, lambda rows: loss(blocks[rows].to(device)), measure, no_worse, course, on_progress
        )


def fit_logits(
    model: nn.Module,
    operators: Mapping[str, Operator],
    blocks: Tensor,
    *,
    originals: Mapping[str, nn.Module],
    train_blocks: int,
    course: Course,
    on_progress: OnStep = lambda step, steps, loss: None,
) -> tuple[float, float]:
    """Train ``operators`` together so that the model with them gives the logits of the model without them.

    Args:
        model: in eval mode; its own parameters stay as they are.
        operators: name -> operator to train, every alias of a layer included.
        blocks: token blocks (N, T); those from ``train_blocks`` on judge the fit.
        originals: modules that the model without the operators has under their names.
        course: its samples are blocks.

    Returns:
        KL(model || model with operators) in nats a token before and after, on the blocks held out. Where it ends worse
        than it began, the operators get their first parameters back.
    """

    def divergence(ids: Tensor) -> Tensor:
        with torch.no_grad(), swapped(model, originals):
            wanted = model(input_ids=ids).logits
        with swapped(model, operators):
            return kl_terms(model(input_ids=ids).logits, wanted).sum(-1).mean()

    @torch.no_grad()
    def measure() -> float:
        held_out, device = blocks[train_blocks:], next(model.parameters()).device
        parts = held_out.split(course.batch)
        return sum(float(divergence(part.to(device))) * len(part) for part in parts) / len(held_out)

    return _improve_within(model, operators, blocks, train_blocks, divergence, measure, le, course, on_progress)


def fit_jointly(
    model: nn.Module,
    operators: Mapping[str, Operator],
    holder: str,
    blocks: Tensor,
    *,
    originals: Mapping[str, nn.Module],
    loss: str,
    train_blocks: int,
    course: Course,
    on_progress: OnStep = lambda step, steps, loss: None,
) -> tuple[FitError, FitError]:
    """Train ``operators`` together so that the module ``holder``, which holds them, gives what it gives without them.

    Args:
        operators, blocks, originals, course: as for ``fit_logits``; operators may be in another dtype than the model.
        holder: name of a module.
        loss: "mse" or "cosine", of the output of ``holder``.

    Returns:
        errors of that output before and after, on the blocks held out. Where it ends worse than it began, the operators
        get their first parameters back.
    """
    device = next(model.parameters()).device
    cast = {id(operator): _InItsOwnDtype(operator).eval() for operator in operators.values()}
    placed = {name: cast[id(operator)] for name, operator in operators.items()}

    @torch.no_grad()
    def wanted(ids: Tensor) -> Tensor:
        with swapped(model, originals):
            return output_of(model, holder, ids).float()

    def got(ids: Tensor) -> Tensor:
        with swapped(model, placed):
            return output_of(model, holder, ids).float()

    @torch.no_grad()
    def measure() -> FitError:
        sums = Sums()
        for part in blocks[train_blocks:].split(course.batch):
            ids = part.to(device)
            sums.add(got(ids).flatten(0, -2), wanted(ids).flatten(0, -2))
        return sums.error()

    some = blocks[: min(train_blocks, course.batch)].to(device)
    mean_square = float(wanted(some).double().square().mean()) or 1.0

    def value(ids: Tensor) -> Tensor:
        return loss_value(loss, got(ids), wanted(ids), mean_square)

    no_worse = partial(better, loss)
    return _improve_within(model, operators, blocks, train_blocks, value, measure, no_worse, course, on_progress)
