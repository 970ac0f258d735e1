"""Check the inputs of operators and of functions that take a model; messages name the layer or the function."""

from typing import Any

import torch
from torch import Tensor, nn

from relinear.contract.config import Config
from relinear.settings.messages import quoted


def check_features(x: Any, width: int, layer: nn.Module) -> None:
    """Raise ValueError unless ``x`` is a floating-point tensor (..., width); the message names ``layer``."""
    if isinstance(x, Tensor) and x.ndim and x.shape[-1] == width and x.is_floating_point():
        return
    if isinstance(x, torch.fx.Proxy):  # torch.fx traces a tensor of unknown shape
        return
    name, config = getattr(layer, "name_in_model", ""), getattr(layer, "config", None)
    kind = f"{type(layer).__name__}, {config}" if isinstance(config, Config) else type(layer).__name__
    layer_name = f"{name} ({kind})" if name else kind
    got = f"a tensor of {x.dtype}, shape {tuple(x.shape)}" if isinstance(x, Tensor) else quoted(x)
    raise ValueError(f"{layer_name}: expected a floating-point tensor of shape (..., {width}), got {got}")


def check_model(model: Any, caller: str) -> None:
    """Raise ValueError, naming the function ``caller``, unless ``model`` is an ``nn.Module``."""
    if isinstance(model, nn.Module):
        return
    hint = "; load it first: relinear.from_pretrained(...)" if isinstance(model, str | bytes) else ""
    raise ValueError(f"{caller} takes a model (an nn.Module), got {quoted(model)}{hint}")


def check_finite(module: nn.Module, name: str = "") -> None:
    """Raise ValueError if a parameter of ``module``, called ``name`` in messages, holds NaN or infinite values."""
    for key, parameter in module.named_parameters(name):
        if not parameter.is_meta and not bool(torch.isfinite(parameter).all()):
            raise ValueError(f"{key} holds values that are not finite: load the model again, or restore its checkpoint")
