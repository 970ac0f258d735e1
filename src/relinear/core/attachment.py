"""Model-level attachments: what belongs to the model as a whole rather than to one linear layer.

A context manager, a residual method or a path-level modulator is an attachment: a config that changes a model in
place, is written into its checkpoint in the order of application, and is applied again before the weights are loaded.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import nn

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
        """Check, attach, and record the setting on the model; ``relinear.attach_`` also writes it into its config."""
        self.check(model)
        self.attach(model)
        setattr(model, _ATTRIBUTE, (*attachments(model), self))


def attachments(model: nn.Module) -> tuple[AttachmentConfig, ...]:
    """The settings attached to ``model``, in order of application."""
    return getattr(model, _ATTRIBUTE, ())
