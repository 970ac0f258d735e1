"""What a model's ``config.json`` says about its operators and attachments, so that it can be rebuilt."""

from __future__ import annotations

from typing import Any

from torch import nn

from relinear.core.adapters import stock_name
from relinear.core.anatomy import unwrapped
from relinear.core.attachment import attachments
from relinear.core.aux import install_aux_hooks, named_operators

__all__ = ["FORMAT_VERSION", "METHOD", "record", "sync_record"]

METHOD = "relinear"  # the name of the quantizer that rebuilds a model
FORMAT_VERSION = 1


def record(model: nn.Module) -> dict[str, Any] | None:
    """Exact names and settings of what relinear put into ``model``; None where it put nothing."""
    operators = {stock_name(name): operator.config.to_dict() for name, operator in named_operators(model)}
    attached = [config.to_dict() for config in attachments(model)]
    if not operators and not attached:
        return None
    return {"quant_method": METHOD, "format_version": FORMAT_VERSION, "operators": operators, "attachments": attached}


def sync_record(model: nn.Module) -> None:
    """Bring ``model.config``, the model's hooks and the operators' names up to date; call it after every surgery.

    ``quantization_config`` is the one key of ``config.json`` by which transformers lets a third party rebuild layers
    before weights are loaded. A PEFT model's record and hooks are those of the model inside.
    """
    model = unwrapped(model)
    install_aux_hooks(model)
    for name, operator in named_operators(model):
        operator.name_in_model = name
    config = getattr(model, "config", None)
    if config is None:
        return
    values = record(model)
    if values is not None:
        config.quantization_config = values
    elif hasattr(config, "quantization_config"):
        del config.quantization_config
