"""Fitting operators within the model: to its final logits, or to what the module that holds them gives."""

# Legend: N blocks, T tokens a block, V vocabulary

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from relinear.core.operator import Operator
from relinear.distill.fit import FitError, Sums, better, cosine_steps, loss_value, parameter_groups
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


def _divergence(model: nn.Module, ids: Tensor, teacher: Tensor) -> Tensor:
    student = model(input_ids=ids).logits.float().log_softmax(-1)
    return torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="none").sum(-1).mean()


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


def _train(
    model: nn.Module,
    operators: Mapping[str, Operator],
    blocks: Tensor,
    loss: Callable[[Tensor], Tensor],
    *,
    epochs: int,
    batch: int,
    learning_rate: float,
    seed: int,
    on_progress: Callable[[int, int, float], None],
) -> None:
    """Train ``operators`` together on blocks (N, T); ``loss`` is of some of these. The model stays as it is."""
    device = next(model.parameters()).device
    unique = {id(operator): operator for operator in operators.values()}.values()
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
    model.requires_grad_(False)
    try:
        for operator in unique:
            operator.train().requires_grad_(True)
        groups = [group for operator in unique for group in parameter_groups(operator, learning_rate)]
        optimizer = torch.optim.Adam(groups)
        batch = min(batch, len(blocks))
        steps = epochs * (len(blocks) // batch)
        schedule = cosine_steps(optimizer, steps)
        generator = torch.Generator().manual_seed(seed)
        step = 0
        for _ in range(epochs):
            for rows in torch.randperm(len(blocks), generator=generator).split(batch):
                if len(rows) < batch:
                    break
                value = loss(blocks[rows].to(device))
                value = value + sum(loss for operator in unique for loss in operator.aux_losses().values())
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
                schedule.step()
                step += 1
                on_progress(step, steps, float(value.detach()))
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
    for operator in unique:
        operator.eval()


def _states(operators: Mapping[str, Operator]) -> list[tuple[Operator, dict[str, Tensor]]]:
    unique = {id(operator): operator for operator in operators.values()}.values()
    return [(operator.eval(), {k: v.clone() for k, v in operator.state_dict().items()}) for operator in unique]


def fit_logits(
    model: nn.Module,
    operators: Mapping[str, Operator],
    blocks: Tensor,
    *,
    originals: Mapping[str, nn.Module],
    train_blocks: int,
    epochs: int,
    batch: int,
    learning_rate: float,
    seed: int,
    on_progress: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> tuple[float, float]:
    """Train ``operators`` together so that the model with them gives the logits of the model without them.

    Args:
        model: in eval mode; its own parameters stay as they are.
        operators: name -> operator to train, every alias of a layer included.
        blocks: token blocks (N, T); those from ``train_blocks`` on judge the fit.
        originals: modules that the model without the operators has under their names.
        batch: blocks a step.

    Returns:
        KL(model || model with operators) in nats a token before and after, on the blocks held out. Where it ends worse
        than it began, the operators get their first parameters back.
    """
    device = next(model.parameters()).device

    @torch.no_grad()
    def teacher(ids: Tensor) -> Tensor:
        with swapped(model, originals):
            return model(input_ids=ids).logits.float().log_softmax(-1)

    @torch.no_grad()
    def measure() -> float:
        values = []
        for part in blocks[train_blocks:].split(batch):
            ids = part.to(device)
            wanted = teacher(ids)
            with swapped(model, operators):
                values.append(float(_divergence(model, ids, wanted)) * len(part))
        return sum(values) / (len(blocks) - train_blocks)

    def loss(ids: Tensor) -> Tensor:
        wanted = teacher(ids)
        with swapped(model, operators):
            return _divergence(model, ids, wanted)

    starts = _states(operators)
    before = measure()
    _train(
        model,
        operators,
        blocks[:train_blocks],
        loss,
        epochs=epochs,
        batch=batch,
        learning_rate=learning_rate,
        seed=seed,
        on_progress=on_progress,
    )
    after = measure()
    if not after <= before:
        for operator, start in starts:
            operator.load_state_dict(start)
        after = before
    return before, after


def fit_jointly(
    model: nn.Module,
    operators: Mapping[str, Operator],
    holder: str,
    blocks: Tensor,
    *,
    originals: Mapping[str, nn.Module],
    loss: str,
    train_blocks: int,
    epochs: int,
    batch: int,
    learning_rate: float,
    seed: int,
    on_progress: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> tuple[FitError, FitError]:
    """Train ``operators`` together so that the module ``holder``, which holds them, gives what it gives without them.

    Args:
        operators, blocks, originals, batch: as for ``fit_logits``; operators may be in another dtype than the model.
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
        for part in blocks[train_blocks:].split(batch):
            ids = part.to(device)
            sums.add(got(ids).flatten(0, -2), wanted(ids).flatten(0, -2))
        return sums.error()

    starts = _states(operators)
    before = measure()
    some = blocks[: min(train_blocks, batch)].to(device)
    mean_square = float(wanted(some).double().square().mean()) or 1.0
    _train(
        model,
        operators,
        blocks[:train_blocks],
        lambda ids: loss_value(loss, got(ids), wanted(ids), mean_square),
        epochs=epochs,
        batch=batch,
        learning_rate=learning_rate,
        seed=seed,
        on_progress=on_progress,
    )
    after = measure()
    if not better(loss, after, before):
        for operator, start in starts:
            operator.load_state_dict(start)
        after = before
    return before, after
