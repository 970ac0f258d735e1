"""Attach model-level parts (``ContextManager``, residual methods, ...) and record their configs on the model."""

from typing import Any

from torch import nn

from relinear.contract.attachment import PART_PREFIX, AttachmentConfig
from relinear.hf.initialization import PART_MARK, mark_initialized_, package_of
from relinear.hf.peft_models import unfreeze_new_parameters_, unwrapped, warn_adapters_omit

#: attribute with the list of configs; a model shares the list with its base model, which may be saved alone
_ATTRIBUTE = "_relinear_attachments"


def apply_attachment_(model: nn.Module, config: AttachmentConfig) -> None:
    """Check and attach a part, and record its config on the model.

    ``relinear.attach_`` also writes the record in ``model.config`` (``finish_surgery_``). In a PEFT model the part is
    attached to the wrapped model and trains. A warning says that PEFT will not save it.
    """
    hf_model = unwrapped(model)
    config.check(hf_model)
    checks_itself = type(config).check is not AttachmentConfig.check
    if not checks_itself and any(type(other) is type(config) for other in attachments(hf_model)):
        raise ValueError(f"{type(hf_model).__name__} has a {config.kind} already")
    old_parameters = {id(parameter) for parameter in hf_model.parameters()}
    old = dict(hf_model.named_modules())
    config.attach(hf_model)
    added = [n for n, _ in hf_model.named_modules() if n not in old and n.rpartition(".")[0] in old]
    for name in added:
        owner, _, part_name = name.rpartition(".")
        if hf_model.get_submodule(owner) is old[owner] and not part_name.startswith(PART_PREFIX):
            raise ValueError(f"{config.kind}: the submodule {name} must have a name that begins with {PART_PREFIX}")
    owners = (vars(hf_model), vars(getattr(hf_model, "base_model", hf_model)))
    configs: list[AttachmentConfig] = next((owner[_ATTRIBUTE] for owner in owners if _ATTRIBUTE in owner), [])
    configs.append(config)
    for owner in owners:
        owner[_ATTRIBUTE] = configs
    for name in added:
        part = hf_model.get_submodule(name)
        for module in part.modules():
            if package_of(module) == package_of(config):
                setattr(module, PART_MARK, True)
        mark_initialized_(part)
    if hf_model is not model:
        unfreeze_new_parameters_(hf_model, old_parameters)
        warn_adapters_omit(str(config), added)


def attachments(model: nn.Module) -> tuple[AttachmentConfig, ...]:
    """Return the configs of the parts attached to ``model`` or its submodules, in order of attachment."""
    hf_model: Any = unwrapped(model)
    configs = (config.for_model(hf_model) for listed in _lists(hf_model) for config in listed)
    return tuple(config for config in configs if config is not None)


def forget_attachment_(model: nn.Module, config: AttachmentConfig) -> None:
    """Remove ``config`` from the records on ``model`` and its submodules, after its part was removed."""
    for listed in _lists(unwrapped(model)):
        listed[:] = [other for other in listed if other != config]


def _lists(model: nn.Module) -> list[list[AttachmentConfig]]:
    """Return the different lists of configs on ``model`` and its submodules."""
    lists = (listed for module in model.modules() if (listed := vars(module).get(_ATTRIBUTE)))
    return list({id(listed): listed for listed in lists}.values())
