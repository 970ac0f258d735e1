"""Model-level attachments: what belongs to the model as a whole rather than to one linear layer.

A context manager, a residual method or a path-level modulator is an attachment: a config that changes a model in
place, is written into its checkpoint in the order of application, and is applied again before the weights are loaded.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import nn

from relinear.core.adapters import say_adapters_leave_out, train_new_parameters
from relinear.core.anatomy import unwrapped
from relinear.core.config import Config

__all__ = ["AttachmentConfig", "attachments"]

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

    def apply_(self, model: nn.Module) -> None:
        """Check, attach, and record the setting on the model; ``relinear.attach_`` also writes it into its config.

        A PEFT model's part goes onto the model inside; it trains there, and a warning says what PEFT does not save.
        """
        inside = unwrapped(model)
        self.check(inside)
        known = {id(parameter) for parameter in inside.parameters()}
        names = {name for name, _ in inside.named_modules()}
        self.attach(inside)
        setattr(inside, _ATTRIBUTE, (*attachments(inside), self))
        if inside is not model:
            train_new_parameters(inside, known)
            added = [n for n, _ in inside.named_modules() if n not in names and n.rpartition(".")[0] in names]
            say_adapters_leave_out(str(self), added)


def attachments(model: nn.Module) -> tuple[AttachmentConfig, ...]:
    """The settings attached to ``model``, in order of application."""
    return getattr(unwrapped(model), _ATTRIBUTE, ())
