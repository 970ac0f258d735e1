"""How a model starts in the maximal update parametrisation: what was drawn by the standard rules is scaled in place."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from relinear.core.operator import Operator, is_linear
from relinear.models import ReadoutScale
from relinear.surgery.plan import attach_
from relinear.train.optim import output_head, parameter_roles


@torch.no_grad()
def scale_stock_(model: Any, ratio: float, start: Literal["config", "torch"] = "config") -> None:
    """Scale the weights of a stock model as it was drawn, before attachments and operators are put in.

    Matrices as ``ParamRole.start_at`` says; embeddings, norms and biases keep what they have at the base width. An
    output head that shares the embedding's weight keeps it too, and gets ``ReadoutScale(factor=1 / ratio)``.

    Args:
        model: a fresh Hugging Face model.
        ratio: its width over the base width; at 1 nothing changes.
        start: how it was drawn, as ``TrainSettings.model_start``: at the same standard deviation whatever the width,
            or within 1 / sqrt(fan-in), biases and embeddings too.
    """
    if ratio == 1:
        return
    head, table = output_head(model), model.get_input_embeddings()
    tied = head is not None and head.weight is table.weight
    parameters = dict(model.named_parameters())
    for name, role in parameter_roles(model).items():
        drawn = role._replace(start="constant" if start == "config" else "fan_in")
        parameters[name].mul_(drawn.start_at(ratio))
    if start == "torch":
        biases = [m.bias for m in model.modules() if is_linear(m) and m.bias is not None]
        for parameter in [*biases, *([table.weight] if head is not None else [])]:
            parameter.mul_(math.sqrt(ratio))
    if tied:
        attach_(model, ReadoutScale(factor=1 / ratio))


@torch.no_grad()
def scale_added_(model: Any, ratio: float, stock: set[Tensor], *, fitted: bool = False) -> None:
    """Scale what attachments and operators drew.

    Args:
        model: with all its parts in place.
        ratio: its width over the base width; at 1 nothing changes.
        stock: the parameters that it had before.
        fitted: whether operators took over the weights that they stand for, which then stay as they are.
    """
    if ratio == 1:
        return
    kept = set(stock)
    for module in model.modules():
        if fitted and isinstance(module, Operator):
            kept.update(module.parameters())
    parameters = dict(model.named_parameters())
    for name, role in parameter_roles(model).items():
        if parameters[name] not in kept:
            parameters[name].mul_(role.start_at(ratio))
