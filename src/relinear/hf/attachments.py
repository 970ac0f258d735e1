"""Attach model-level parts (context managers, residual methods, ...) and record their settings on the model."""

from typing import Any

from torch import nn

from relinear.contract.attachment import AttachmentConfig
from relinear.hf.initialization import mark_initialized_
from relinear.hf.peft_models import train_new_parameters, unwrapped, warn_adapters_omit

#: attribute with the list of settings; a model shares the list with its base model, which may be saved alone
_ATTRIBUTE = "_relinear_attachments"


def apply_attachment_(model: nn.Module, setting: AttachmentConfig) -> None:
    """Check and attach a part, and record its setting on the model; ``relinear.attach_`` also records it in the config.

    In a PEFT model the part is attached to the wrapped model and trains. A warning says that PEFT will not save it.
    """
    hf_model = unwrapped(model)
    setting.check(hf_model)
    old_parameters = {id(parameter) for parameter in hf_model.parameters()}
    old_names = {name for name, _ in hf_model.named_modules()}
    setting.attach(hf_model)
    owners = (vars(hf_model), vars(getattr(hf_model, "base_model", hf_model)))
    settings: list[AttachmentConfig] = next((owner[_ATTRIBUTE] for owner in owners if _ATTRIBUTE in owner), [])
    settings.append(setting)
    for owner in owners:
        owner[_ATTRIBUTE] = settings
    added = [n for n, _ in hf_model.named_modules() if n not in old_names and n.rpartition(".")[0] in old_names]
    for name in added:
        mark_initialized_(hf_model.get_submodule(name))
    if hf_model is not model:
        train_new_parameters(hf_model, old_parameters)
        warn_adapters_omit(str(setting), added)


def attachments(model: nn.Module) -> tuple[AttachmentConfig, ...]:
    """Return the settings of the parts attached to ``model`` or its submodules, in order of attachment."""
    hf_model: Any = unwrapped(model)
    lists = {id(listed): listed for part in hf_model.modules() if (listed := vars(part).get(_ATTRIBUTE))}
    settings = (setting.for_part(hf_model) for listed in lists.values() for setting in listed)
    return tuple(setting for setting in settings if setting is not None)


def remove_setting_(model: nn.Module, setting: AttachmentConfig) -> None:
    """Remove ``setting`` from the record on ``model``, after its part was removed."""
    vars(unwrapped(model))[_ATTRIBUTE].remove(setting)
