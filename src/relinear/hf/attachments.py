"""Attach the parts of a model as a whole, and keep what is attached to it."""

from typing import Any

from torch import nn

from relinear.contract.attachment import AttachmentConfig
from relinear.hf.initialization import mark_initialized_
from relinear.hf.peft_models import train_new_parameters, unwrapped, warn_adapters_omit

#: attribute with the list of settings; a model shares it with its base model, which may be saved alone
_ATTRIBUTE = "_relinear_attachments"


def apply_attachment_(model: nn.Module, setting: AttachmentConfig) -> None:
    """Check, attach, and record the setting on the model; ``relinear.attach_`` also writes it into its config.

    In a PEFT model the part is attached to the model inside, and trains; a warning says what PEFT does not save.
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
    """Return the settings attached to ``model`` or to a part of it, in the order of attachment."""
    inside: Any = unwrapped(model)
    lists = {id(listed): listed for part in inside.modules() if (listed := vars(part).get(_ATTRIBUTE))}
    settings = (setting.for_part(inside) for listed in lists.values() for setting in listed)
    return tuple(setting for setting in settings if setting is not None)


def remove_setting_(model: nn.Module, setting: AttachmentConfig) -> None:
    """Take ``setting``, of a part that is no longer there, from what is attached to ``model``."""
    vars(unwrapped(model))[_ATTRIBUTE].remove(setting)
