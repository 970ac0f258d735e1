"""Fitting operators through the whole model: KL of its final logits, with the layers in place and replaced."""

# Legend: N blocks, T tokens a block, V vocabulary

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from relinear.core.operator import Operator
from relinear.distill.fit import cosine_steps, parameter_groups

__all__ = ["fit_logits", "held_out_perplexity", "swapped"]


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


def fit_logits(
    model: nn.Module,
    operators: Mapping[str, Operator],
    blocks: Tensor,
    *,
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
        batch: blocks a step.

    Returns:
        KL(model || model with operators) in nats a token before and after, on the blocks held out. Where it ends worse
        than it began, the operators get their first parameters back.
    """
    device = next(model.parameters()).device
    unique = {id(operator): operator for operator in operators.values()}.values()
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}

    @torch.no_grad()
    def teacher(ids: Tensor) -> Tensor:
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

    for operator in unique:
        operator.eval()
    before = measure()
    starts = [{k: v.clone() for k, v in operator.state_dict().items()} for operator in unique]
    model.requires_grad_(False)
    try:
        for operator in unique:
            operator.train().requires_grad_(True)
        groups = [group for operator in unique for group in parameter_groups(operator, learning_rate)]
        optimizer = torch.optim.Adam(groups)
        batch = min(batch, train_blocks)
        steps = epochs * (train_blocks // batch)
        schedule = cosine_steps(optimizer, steps)
        generator = torch.Generator().manual_seed(seed)
        step = 0
        for _ in range(epochs):
            for rows in torch.randperm(train_blocks, generator=generator).split(batch):
                if len(rows) < batch:
                    break
                ids = blocks[rows].to(device)
                wanted = teacher(ids)
                with swapped(model, operators):
                    value = _divergence(model, ids, wanted)
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
    after = measure()
    if not after <= before:
        for operator, start in zip(unique, starts, strict=True):
            operator.load_state_dict(start)
        after = before
    return before, after
