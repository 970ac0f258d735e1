"""A few steps that bring a compressed decoder layer's output nearer to what the original's was."""

# Legend: B batch, T tokens, D hidden size

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["refine"]


def refine(
    run: Callable[[Tensor], Tensor],
    operators: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    wanted: Sequence[Tensor],
    *,
    steps: int,
    learning_rate: float,
    seed: int,
) -> tuple[float, float]:
    """Train ``operators`` together on the squared error of the layer's output; undone where it does not help.

    Adam with a cosine to 0, one batch a step; the last batch judges and is not trained on (unless it is the only one).

    Args:
        run: the decoder layer, (B, T, D) -> (B, T, D).
        operators: in it, what is trained.
        inputs, wanted: batches of the layer's inputs and of the outputs it should have.

    Returns:
        relative squared errors on the last batch before and after.
    """
    parameters = [p for operator in operators for p in operator.parameters()]
    flags = [p.requires_grad for p in parameters]
    start = [copy.deepcopy(operator.state_dict()) for operator in operators]
    scale = float(wanted[-1].double().square().mean()) or 1.0

    @torch.no_grad()
    def error() -> float:
        return float((run(inputs[-1]).double() - wanted[-1].double()).square().mean()) / scale

    before = error()
    optimizer = torch.optim.Adam(parameters, learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    count = max(1, len(inputs) - 1)
    with torch.enable_grad():
        for parameter in parameters:
            parameter.requires_grad_(True)
        for _ in range(steps):
            at = int(torch.randint(count, (), generator=generator))
            loss = (run(inputs[at]).float() - wanted[at].float()).square().mean() / scale
            # not backward(): other parameters of the layer must be left without gradients
            for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = grad
            optimizer.step()
            schedule.step()
    for parameter, flag in zip(parameters, flags, strict=True):
        parameter.requires_grad_(flag)
        parameter.grad = None
    after = error()
    if not after <= before:  # not a number counts as worse
        for operator, state in zip(operators, start, strict=True):
            operator.load_state_dict(state)
        after = before
    return before, after
