"""Build the optimiser, its parameter groups and the learning-rate schedule; scale initial weights for muP."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from relinear.contract.linear_layers import is_conv1d
from relinear.contract.operator import Operator, is_replaceable
from relinear.contract.parameter_roles import DeclaredFans, ParamRole
from relinear.hf.model_config import text_config
from relinear.hf.model_layout import output_head
from relinear.models import ReadoutScale
from relinear.models.heads import SCALE
from relinear.surgery.plan import attach_
from relinear.training.settings import FitSettings


def parameter_roles(model: nn.Module) -> dict[str, ParamRole]:
    """Return the role of every trainable parameter, by its first name in ``model``.

    Modules with ``param_roles()`` (operators, attached parts) define the roles of their own parameters; the outermost
    module wins. Of the rest, matrices of linear layers have weight decay; embeddings (also where the output head shares
    their weight), norms, biases and other vectors have none. An untied output head is the readout.
    """
    roles: dict[Tensor, ParamRole] = {}
    for module in model.modules():
        if module is not model and callable(getattr(module, "param_roles", None)):
            named = dict(module.named_parameters())
            for name, role in module.param_roles().items():
                roles.setdefault(named[name], role)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            roles.setdefault(module.weight, ParamRole(None, weight_decay=False))
    declared_fans = DeclaredFans(model)
    head = inner_output_head(model)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            role = declared_fans.role(parameter, transposed=is_conv1d(module))  # Conv1D stores (in, out)
            readout = module is head and parameter.ndim > 1
            roles.setdefault(parameter, role._replace(readout=True, fan_out_scales=False) if readout else role)
    return {name: roles[p] for name, p in model.named_parameters() if p.requires_grad}


def inner_output_head(model: nn.Module) -> nn.Module | None:
    """Return the ``output_head`` of the language model that ``model`` is or contains; None if there is none."""
    candidates = (module for module in model.modules() if callable(getattr(module, "get_output_embeddings", None)))
    return next(map(output_head, candidates), None)


def width_ratio(model: nn.Module, settings: FitSettings) -> float:
    """Return the width of the Hugging Face model that ``model`` is or contains, divided by the base width of muP.

    With the standard parametrisation it is 1.

    Raises:
        ValueError: if no config in the model gives the width.
    """
    if settings.parametrization == "standard":
        return 1.0
    for module in model.modules():
        if isinstance(width := getattr(text_config(module), "hidden_size", None), int):
            return width / settings.parametrization_base_width
    raise ValueError(
        f"parametrization='mup' needs a config with hidden_size, and {type(model).__name__} contains no Hugging Face "
        "model with one; use parametrization='standard'"
    )


def parameter_groups(model: nn.Module, settings: FitSettings) -> list[dict[str, Any]]:
    """Return parameter groups for a torch optimiser: one for each pair of learning rate and weight decay.

    With ``parametrization="mup"`` ``ParamRole.lr_scale`` lowers the rate of every matrix with its fan-in. The decay per
    step (rate times decay) stays the same.

    Raises:
        ValueError: if the model has nothing to train, or a tied head without the multiplier that "mup" needs.
    """
    ratio = width_ratio(model, settings)
    if ratio != 1:
        check_readout(model, ratio)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    parameters = dict(model.named_parameters())
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    also_decayed = embeddings if settings.decay_embeddings else set()
    for name, role in parameter_roles(model).items():
        rate = settings.learning_rate * role.lr_multiplier
        decay = settings.weight_decay if role.weight_decay or parameters[name] in also_decayed else 0.0
        factor = role.lr_scale(ratio)
        rate, decay = rate * factor, decay / factor
        groups.setdefault((rate, decay), []).append(parameters[name])
    if not groups:
        raise ValueError("the model has no trainable parameters; call requires_grad_(True) on modules to train")
    return [{"params": members, "lr": rate, "weight_decay": decay} for (rate, decay), members in groups.items()]


def check_readout(model: nn.Module, ratio: float) -> None:
    """Raise ValueError if the output head shares the embedding's weight and its logits are not scaled.

    Args:
        model: is or contains the language model.
        ratio: its width divided by the base width.
    """
    head = inner_output_head(model)
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    if head is None or getattr(head, "weight", None) not in embeddings or hasattr(head, SCALE):
        return
    factor = f"{1 / ratio:g}"
    raise ValueError(
        "parametrization='mup' cannot lower the learning rate of an output head that shares the embedding's weight. It "
        f"needs the head's logits scaled by {factor} instead: attach relinear.models.ReadoutScale(factor={factor}), or "
        "build the model with tie_word_embeddings=False"
    )


def build_optimizer(model: nn.Module, settings: FitSettings) -> torch.optim.Optimizer:
    """Return AdamW or Adam over ``parameter_groups``, in torch's fused implementation if possible."""
    optimizer = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[settings.optimizer]
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in model.parameters())
    groups = parameter_groups(model, settings)
    return optimizer(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=fused)


def build_schedule(optimizer: Any, settings: FitSettings) -> LRScheduler:
    """Return the learning-rate schedule; every group keeps its ratio to the base rate.

    - cosine: linear warm-up, then half a cosine down to ``min_lr_ratio`` of the peak (transformers).
    - onecycle: torch's OneCycleLR (from 1/25 of the peak up over ``warmup``, down to 1/250,000) with constant beta1.
    - noam: linear warm-up to the peak, then peak * sqrt(warmup / step). ``learning_rate`` is the peak, so it includes
      the factor of Vaswani et al. (2017).
    - constant: linear warm-up, then the peak.
    """
    from transformers import optimization

    if settings.schedule == "onecycle":
        # Without warm-up the first step is to be at the peak. With pct_start=0 torch would make it lower, and with a
        # warm-up of exactly one step it would divide by zero, so the warm-up is just below one step.
        warmup = 1 - 1e-6 if settings.warmup <= 1 or settings.steps == 1 else settings.warmup
        steps = max(settings.steps, 2)
        return OneCycleLR(
            optimizer,
            max_lr=[group["lr"] for group in optimizer.param_groups],
            total_steps=steps,
            pct_start=warmup / steps,
            cycle_momentum=False,
        )
    if settings.schedule == "noam":
        return optimization.get_inverse_sqrt_schedule(optimizer, settings.warmup, timescale=max(settings.warmup, 1))
    if settings.schedule == "constant":
        return optimization.get_constant_schedule_with_warmup(optimizer, settings.warmup)
    return optimization.get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, settings.warmup, settings.steps, min_lr_rate=settings.min_lr_ratio
    )


# Initialisation in the maximal update parametrisation


@torch.no_grad()
def scale_stock_(model: Any, ratio: float, model_init: Literal["config", "torch"] = "config") -> None:
    """Scale the initial weights of a stock model for muP, before attachments and operators are added.

    Matrices are scaled by ``ParamRole.init_std_scale``; embeddings, norms and biases stay as at the base width. An
    output head that shares the embedding's weight keeps it too, and gets ``ReadoutScale(factor=1 / ratio)``.

    Args:
        model: a newly initialised Hugging Face model.
        ratio: its width divided by the base width; at 1 nothing changes.
        model_init: how its weights were drawn, as in ``TrainSettings``: "config" uses one standard deviation for all
            widths; "torch" draws within 1 / sqrt(fan-in), biases and embeddings too.
    """
    if ratio == 1:
        return
    head, table = inner_output_head(model), model.get_input_embeddings()
    tied = head is not None and head.weight is table.weight
    parameters = dict(model.named_parameters())
    for name, role in parameter_roles(model).items():
        initialized = role._replace(init_law="constant" if model_init == "config" else "fan_in")
        parameters[name].mul_(initialized.init_std_scale(ratio))
    if model_init == "torch":
        biases = [m.bias for m in model.modules() if is_replaceable(m) and m.bias is not None]
        for parameter in [*biases, *([table.weight] if head is not None else [])]:
            parameter.mul_(math.sqrt(ratio))
    if tied:
        attach_(model, ReadoutScale(factor=1 / ratio))


@torch.no_grad()
def scale_added_(model: Any, ratio: float, stock: set[Tensor], *, fitted: bool = False) -> None:
    """Scale the initial weights of attachments and operators for muP.

    Args:
        model: the model, with its attachments and operators in place.
        ratio: its width divided by the base width; at 1 nothing changes.
        stock: the model's parameters before attachments and operators were added.
        fitted: whether operators were fitted to the weights that they replace; these are then not scaled.
    """
    if ratio == 1:
        return
    unscaled = set(stock)
    for module in model.modules():
        if fitted and isinstance(module, Operator):
            unscaled.update(module.parameters())
    parameters = dict(model.named_parameters())
    for name, role in parameter_roles(model).items():
        if parameters[name] not in unscaled:
            parameters[name].mul_(role.init_std_scale(ratio))
