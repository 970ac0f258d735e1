"""Record a model's operators and attachments in its ``config.json``, so that it can be rebuilt."""

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from relinear.contract.operator import Operator, named_operators
from relinear.contract.plugins import packages_of
from relinear.hf.attachments import attachments
from relinear.hf.peft_models import stock_name, unwrapped
from relinear.hf.training_loss import install_auxiliary_hooks
from relinear.settings.messages import quoted

METHOD = "relinear"  # name of the transformers quantizer that rebuilds a model
LOADER = "configuration_relinear"  # module saved in a checkpoint, by which programs load it without importing relinear
FORMAT_VERSION = 1


def make_record(model: nn.Module) -> dict[str, Any] | None:
    """Return the exact names and settings of the operators and attachments of ``model``; None if it has none."""
    operators = {stock_name(name): operator.config.to_dict() for name, operator in named_operators(model)}
    attached = [config.to_dict() for config in attachments(model)]
    if not operators and not attached:
        return None
    values = {"quant_method": METHOD, "format_version": FORMAT_VERSION, "operators": operators, "attachments": attached}
    packages = packages_of([*(operator.config for _, operator in named_operators(model)), *attachments(model)])
    return values | ({"packages": packages} if packages else {})


def check_not_quantized(model: Any) -> None:
    """Raise ValueError if another method has quantized ``model``: a config holds one ``quantization_config``."""
    quantization = getattr(getattr(model, "config", None), "quantization_config", None)
    if quantization is None:
        return
    method = _method(quantization)
    if method != METHOD and getattr(model, "is_quantized", True):
        raise ValueError(f"the model is quantized ({method}); dequantize it first by model.dequantize()")


def record_in_config(config: Any) -> dict[str, Any] | None:
    """Return relinear's record in ``config.quantization_config``; None if there is none or another method's."""
    return parse_record(getattr(config, "quantization_config", None))


def parse_record(quantization: Any) -> dict[str, Any] | None:
    """Return a ``quantization_config``, an object or a mapping, as relinear's record; None if it is not one."""
    if _method(quantization) != METHOD:
        return None
    return dict(quantization if isinstance(quantization, Mapping) else vars(quantization))


def _method(quantization: Any) -> Any:
    is_mapping = isinstance(quantization, Mapping)
    return quantization.get("quant_method") if is_mapping else getattr(quantization, "quant_method", None)


def without_loader(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a ``config.json`` without the ``auto_map`` entry of relinear's loader."""
    remaining = dict(values)
    auto_map = remaining.pop("auto_map", None) or {}
    if not isinstance(auto_map, Mapping):
        raise ValueError(f"config.json: auto_map must be an object, got {quoted(auto_map)}")
    auto_map = {key: value for key, value in auto_map.items() if not str(value).startswith(LOADER)}
    return remaining | ({"auto_map": auto_map} if auto_map else {})


def finish_surgery_(model: nn.Module) -> None:
    """Update the record in ``model.config``, the loss hooks and the operators' names; call it after every surgery.

    The record is ``quantization_config``, through which transformers lets third parties rebuild layers. In a PEFT model
    the record and hooks go to the wrapped model. A changed record is written to a copy of the config, as other models
    may share it. A model without a head may be part of another model and keeps the shared config.
    """
    whole, model = model, unwrapped(model)
    install_auxiliary_hooks(model)
    for name, module in model.named_modules():
        if isinstance(module, Operator):
            module.name_in_model = stock_name(name)
    if getattr(model, "config", None) is None:
        return
    values = make_record(model)
    if values != record_in_config(model.config):
        is_whole = getattr(model, "base_model", model) is not model
        config: Any = _copy_shared_config(model, whole) if is_whole else model.config
        if values is not None:
            config.quantization_config = values
        else:
            del config.quantization_config


def _copy_shared_config(model: Any, whole: nn.Module) -> Any:
    """Give ``model``, a part of ``whole``, a shallow copy of its config, and return it."""
    shared, copied = model.config, copy.copy(model.config)
    for module in whole.modules():
        for key, value in vars(module).items():
            if value is shared:
                vars(module)[key] = copied
    return copied
