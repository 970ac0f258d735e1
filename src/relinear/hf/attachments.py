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
    inside = unwrapped(model)
    setting.check(inside)
    known = {id(parameter) for parameter in inside.parameters()}
    names = {name for name, _ in inside.named_modules()}
    setting.attach(inside)
    parts = (vars(inside), vars(getattr(inside, "base_model", inside)))
    settings: list[AttachmentConfig] = next((part[_ATTRIBUTE] for part in parts if _ATTRIBUTE in part), [])
    settings.append(setting)
    for part in parts:
        part[_ATTRIBUTE] = settings
    added = [n for n, _ in inside.named_modules() if n not in names and n.rpartition(".")[0] in names]
    for name in added:
        mark_initialized_(inside.get_submodule(name))
    if inside is not model:
        train_new_parameters(inside, known)
        warn_adapters_omit(str(setting), added)


def attachments(model: nn.Module) -> tuple[AttachmentConfig, ...]:
    """Return the settings of the parts attached to ``model`` or its submodules, in order of attachment."""
    inside: Any = unwrapped(model)
    lists = {id(listed): listed for part in inside.modules() if (listed := vars(part).get(_ATTRIBUTE))}
    settings = (setting.for_part(inside) for listed in lists.values() for setting in listed)
    return tuple(setting for setting in settings if setting is not None)


def remove_setting_(model: nn.Module, setting: AttachmentConfig) -> None:
    """Remove ``setting`` from the record on ``model``, after its part was removed."""
    vars(unwrapped(model))[_ATTRIBUTE].remove(setting)
