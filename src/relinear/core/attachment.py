"""Model-level attachments: what belongs to the model as a whole rather than to one linear layer.

A context manager, a residual method or a path-level modulator is an attachment: a config that changes a model in
place, is written into its checkpoint in the order of application, and is applied again before the weights are loaded.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

from torch import nn

from relinear.core.adapters import say_adapters_leave_out, train_new_parameters
from relinear.core.anatomy import unwrapped
from relinear.core.config import Config
from relinear.core.drawn import mark_drawn_

__all__ = ["AttachmentConfig", "attachments"]

#: attribute of a model, and of its base model, which may be saved by itself: the list of settings, one for both
_ATTRIBUTE = "_relinear_attachments"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttachmentConfig(Config):
    """Base of model-level settings; ``apply_`` is the public way to use one."""

    family: ClassVar[str] = "attachment"

    def check(self, model: nn.Module) -> None:
        """Raise ValueError, saying why and what to do, if ``model`` cannot take this; must change nothing."""

    def attach(self, model: nn.Module) -> None:
        """Add modules and hooks to ``model`` in place.

        Must work on a meta-device skeleton, before and after operators are in place, and register everything learnt as
        submodules or parameters, so that it is saved and loaded with the model. Hooks must be module-level functions or
        bound methods of submodules, so that ``deepcopy`` of the model carries them over correctly. Names of submodules
        start with ``relinear_``: surgery leaves them alone.
        """
        raise TypeError(f"{type(self).__name__} does not say how it is attached")

    def for_part(self, model: nn.Module) -> Self | None:
        """What of this concerns ``model``, the base of a model that has it, or one with another head; None: nothing."""
        return self

    def apply_(self, model: nn.Module) -> None:
        """Check, attach, and record the setting on the model; ``relinear.attach_`` also writes it into its config.

        A PEFT model's part goes onto the model inside; it trains there, and a warning says what PEFT does not save.
        """
        inside = unwrapped(model)
        self.check(inside)
        known = {id(parameter) for parameter in inside.parameters()}
        names = {name for name, _ in inside.named_modules()}
        self.attach(inside)
        parts = (vars(inside), vars(getattr(inside, "base_model", inside)))
        settings: list[AttachmentConfig] = next((part[_ATTRIBUTE] for part in parts if _ATTRIBUTE in part), [])
        settings.append(self)
        for part in parts:
            part[_ATTRIBUTE] = settings
        added = [n for n, _ in inside.named_modules() if n not in names and n.rpartition(".")[0] in names]
        for name in added:
            mark_drawn_(inside.get_submodule(name))
        if inside is not model:
            train_new_parameters(inside, known)
            say_adapters_leave_out(str(self), added)


def attachments(model: nn.Module) -> tuple[AttachmentConfig, ...]:
    """The settings attached to ``model``, to a part of it, or to what it is the base of, in order of application."""
    inside: Any = unwrapped(model)
    lists = {id(found): found for part in inside.modules() if (found := vars(part).get(_ATTRIBUTE))}
    settings = (setting.for_part(inside) for found in lists.values() for setting in found)
    return tuple(setting for setting in settings if setting is not None)
