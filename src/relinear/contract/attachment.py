"""Attachments: parts of a model as a whole, such as ``ContextManager`` (it computes the context) and residual methods.

An attachment's config changes a model in place. Checkpoints record the configs in order, and loading applies them again
before the weights are loaded.
"""

import dataclasses
from typing import Any, ClassVar, Self

from torch import nn

from relinear.contract.config import Config
from relinear.contract.linear_layers import reference_tensor
from relinear.deprecated import adopt_renamed_attributes, with_attributes_of_0_2

#: beginning of the names of submodules that an attachment adds
PART_PREFIX = "relinear_"


@with_attributes_of_0_2
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttachmentConfig(Config):
    """Hold the settings of a model-level part; base class of ``ContextManager``, residual methods and others.

    ``relinear.attach_`` adds the part to a model. Subclasses override ``check`` and ``attach``.

    Examples:
        >>> relinear.contract.AttachmentConfig.read("context_manager:dim=8")
        ContextManager(dim=8, source='tokens', mixer='token', timescales=(2.0, 8.0, 32.0, 128.0))
    """

    family: ClassVar[str] = "attachment"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adopt_renamed_attributes(cls)

    def check(self, model: nn.Module) -> None:
        """Raise ValueError, saying why and what to do, if ``model`` does not support this; must change nothing.

        Without a ``check`` of its own, an attachment of one kind can be attached once.
        """

    def attach(self, model: nn.Module) -> None:
        """Add modules and hooks to ``model`` in place.

        Must work on the meta device, and both before and after layers are replaced. Register everything learnt as
        submodules or parameters, so that it is saved with the model. Hooks must be module-level functions or bound
        methods of submodules, so that ``deepcopy`` of the model copies them correctly. Names of submodules start with
        ``relinear_``; surgery does not touch these.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement attach")

    def for_model(self, model: nn.Module) -> Self | None:
        """Return the settings for ``model``, which has another head or is a part of the original; None to skip it."""
        return self


# Parts


def factory_kwargs_like(module: nn.Module) -> dict[str, Any]:
    """Return ``{"device", "dtype"}`` of a module's parameters, to create new ones with."""
    reference = reference_tensor(module)
    return {"device": reference.device, "dtype": reference.dtype}


def add_part(owner: nn.Module, name: str, part: nn.Module, like: nn.Module) -> None:
    """Register ``part`` in ``owner``, in its training mode, with ``requires_grad`` as in ``like``."""
    owner.add_module(name, part.train(owner.training).requires_grad_(reference_tensor(like).requires_grad))
