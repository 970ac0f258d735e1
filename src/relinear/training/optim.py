"""Build parameter groups by parameter role, Adam, schedules, and muP's initialisation."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from relinear.contract.linear_layers import is_conv1d
from relinear.contract.operator import Operator, is_replaceable
from relinear.contract.parameter_roles import DeclaredFans, ParamRole
from relinear.hf.model_layout import output_head
from relinear.models import ReadoutScale
from relinear.models.heads import SCALE
from relinear.surgery.plan import attach_
from relinear.training.settings import FitSettings


def parameter_roles(model: nn.Module) -> dict[str, ParamRole]:
    """Return the role of every trainable parameter, by its first name in ``model``.

    Modules with ``param_roles()`` (operators, attached parts) answer for themselves, outermost first. Of the rest,
    matrices of linear layers decay; embeddings (also where the output head shares their weight), norms, biases and
    other vectors do not. An untied output head is the readout.
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
    stated, head = DeclaredFans(model), inner_output_head(model)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            role = stated.role(parameter, transposed=is_conv1d(module))  # which stores (in, out)
            readout = module is head and parameter.ndim > 1
            roles.setdefault(parameter, role._replace(readout=True, fan_out_scales=False) if readout else role)
    return {name: roles[p] for name, p in model.named_parameters() if p.requires_grad}


def inner_output_head(model: nn.Module) -> nn.Module | None:
    """Return ``output_head`` of the language model that ``model`` is or contains; None if there is none."""
    named = (module for module in model.modules() if callable(getattr(module, "get_output_embeddings", None)))
    return next(map(output_head, named), None)


def width_ratio(model: nn.Module, settings: FitSettings) -> float:
    """Return the width of the Hugging Face model that ``model`` is or holds, over the parametrisation's base width.

    With the standard parametrisation it is 1.

    Raises:
        ValueError: if the width cannot be known.
    """
    if settings.parametrization == "standard":
        return 1.0
    for module in model.modules():
        config = getattr(module, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else None
        if isinstance(width := getattr(text, "hidden_size", None), int):
            return width / settings.parametrization_base_width
    raise ValueError(
        f"parametrization='mup' needs a config with hidden_size, and {type(model).__name__} holds no Hugging Face "
        "model with one; use parametrization='standard'"
    )


def parameter_groups(model: nn.Module, settings: FitSettings) -> list[dict[str, Any]]:
    """Return groups for a torch optimiser: one for each pair of learning rate and weight decay.

    With ``parametrization="mup"`` the rate of every matrix falls with its fan-in as ``ParamRole.lr_scale`` says. The
    decay per step, rate times decay, stays the same.

    Raises:
        ValueError: if the model has nothing to train, or a tied head without the multiplier that "mup" needs.
    """
    ratio = width_ratio(model, settings)
    if ratio != 1:
        check_readout(model, ratio)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    parameters = dict(model.named_parameters())
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)} if settings.decay_embeddings else set()
    for name, role in parameter_roles(model).items():
        rate = settings.learning_rate * role.lr_multiplier
        if settings.fan_in_base is not None and role.fan_in is not None and role.fan_in_scales:
            rate *= settings.fan_in_base / role.fan_in
        decay = settings.weight_decay if role.weight_decay or parameters[name] in tables else 0.0
        factor = role.lr_scale(ratio)
        rate, decay = rate * factor, decay / factor
        groups.setdefault((rate, decay), []).append(parameters[name])
    if not groups:
        raise ValueError("the model has no trainable parameters; call model.requires_grad_(True) on what should learn")
    return [{"params": members, "lr": rate, "weight_decay": decay} for (rate, decay), members in groups.items()]


def check_readout(model: nn.Module, ratio: float) -> None:
    """Raise ValueError if the output head shares the embedding's weight and its logits are not scaled.

    Args:
        model: that is, or holds, the language model.
        ratio: its width over the base width.
    """
    head = inner_output_head(model)
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    if head is None or getattr(head, "weight", None) not in tables or hasattr(head, SCALE):
        return
    raise ValueError(
        f"parametrization='mup' with a tied output head needs relinear.models.ReadoutScale(factor={1 / ratio:g}) "
        "attached, or tie_word_embeddings=False"
    )


def build_optimizer(model: nn.Module, settings: FitSettings) -> torch.optim.Optimizer:
    """Return AdamW or Adam over ``parameter_groups``, in torch's fused form if possible."""
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[settings.optimizer]
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in model.parameters())
    groups = parameter_groups(model, settings)
    return kind(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=fused)


def build_schedule(optimizer: Any, settings: FitSettings) -> LRScheduler:
    """Return the schedule of the learning rate; every group keeps its ratio to the base rate.

    - cosine: linear warm-up, then half a cosine down to ``min_lr_ratio`` of the peak (transformers).
    - onecycle: torch's OneCycleLR (from 1/25 of the peak up over ``warmup``, down to 1/250,000), beta1 left alone.
    - noam: linear warm-up to the peak, then peak * sqrt(warmup / step); the scale of Vaswani et al. (2017) is in
      ``learning_rate``, which is the peak here.
    - constant: linear warm-up, then the peak.
    """
    from transformers import optimization

    if settings.schedule == "onecycle":
        # torch divides by the length of each part, and without a rise begins below the peak: both are the peak at once
        rise = 1 - 1e-6 if settings.warmup <= 1 or settings.steps == 1 else settings.warmup
        steps = max(settings.steps, 2)
        return OneCycleLR(
            optimizer,
            max_lr=[group["lr"] for group in optimizer.param_groups],
            total_steps=steps,
            pct_start=rise / steps,
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
def scale_stock_(model: Any, ratio: float, start: Literal["config", "torch"] = "config") -> None:
    """Scale the initial weights of a stock model, before attachments and operators are added.

    Matrices as ``ParamRole.init_std_scale`` says; embeddings, norms and biases stay as at the base width. An
    output head that shares the embedding's weight keeps it too, and gets ``ReadoutScale(factor=1 / ratio)``.

    Args:
        model: a fresh Hugging Face model.
        ratio: its width over the base width; at 1 nothing changes.
        start: how it was drawn, as ``TrainSettings.model_init``: at one standard deviation for all widths,
            or within 1 / sqrt(fan-in), biases and embeddings too.
    """
    if ratio == 1:
        return
    head, table = inner_output_head(model), model.get_input_embeddings()
    tied = head is not None and head.weight is table.weight
    parameters = dict(model.named_parameters())
    for name, role in parameter_roles(model).items():
        initialized = role._replace(init_law="constant" if start == "config" else "fan_in")
        parameters[name].mul_(initialized.init_std_scale(ratio))
    if start == "torch":
        biases = [m.bias for m in model.modules() if is_replaceable(m) and m.bias is not None]
        for parameter in [*biases, *([table.weight] if head is not None else [])]:
            parameter.mul_(math.sqrt(ratio))
    if tied:
        attach_(model, ReadoutScale(factor=1 / ratio))


@torch.no_grad()
def scale_added_(model: Any, ratio: float, stock: set[Tensor], *, fitted: bool = False) -> None:
    """Scale the initial weights of attachments and operators.

    Args:
        model: with all its parts in place.
        ratio: its width over the base width; at 1 nothing changes.
        stock: the parameters that it had before.
        fitted: whether operators were fitted to the weights that they replace; these are then not scaled.
    """
    if ratio == 1:
        return
    stock_names = set(stock)
    for module in model.modules():
        if fitted and isinstance(module, Operator):
            stock_names.update(module.parameters())
    parameters = dict(model.named_parameters())
    for name, role in parameter_roles(model).items():
        if parameters[name] not in stock_names:
            parameters[name].mul_(role.init_std_scale(ratio))
