"""Attachments: parts of a model as a whole, such as ``ContextManager`` (it computes the context) and residual methods.

An attachment's config changes a model in place. Checkpoints record the configs in order, and loading applies them again
before the weights are loaded.
"""

import dataclasses
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from relinear.contract.config import Config
from relinear.deprecated import RenamedAttribute, adopt_renamed_attributes


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttachmentConfig(Config):
    """Hold the settings of a model-level part; base class of ``ContextManager``, residual methods and others.

    ``relinear.attach_`` adds the part to a model. Subclasses override ``check`` and ``attach``.

    Examples:
        >>> relinear.contract.AttachmentConfig.read("context_manager:dim=8")
        ContextManager(dim=8, source='tokens', mixer='token', timescales=(2.0, 8.0, 32.0, 128.0))
    """

    family: ClassVar[str] = "attachment"
    # an earlier name, which works for one more version
    for_part = RenamedAttribute("for_model")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adopt_renamed_attributes(cls)

    def check(self, model: nn.Module) -> None:
        """Raise ValueError, saying why and what to do, if ``model`` does not support this; must change nothing."""

    def attach(self, model: nn.Module) -> None:
        """Add modules and hooks to ``model`` in place.

        Must work on the meta device, and both before and after layers are replaced. Register everything learnt as
        submodules or parameters, so that it is saved with the model. Hooks must be module-level functions or bound
        methods of submodules, so that ``deepcopy`` of the model copies them correctly. Names of submodules start with
        ``relinear_``; surgery does not touch these.
        """
        raise TypeError(f"{type(self).__name__} does not implement attach")

    def for_model(self, model: nn.Module) -> Self | None:
        """Return the settings for ``model``, which has another head or is a part of the original; None to skip it."""
        return self


# Parts and their hooks


def factory_kwargs_like(module: nn.Module) -> dict[str, Any]:
    """Return ``{"device", "dtype"}`` of a module's parameters, to create new ones with."""
    reference = next(p for p in module.parameters() if p.is_floating_point())
    return {"device": reference.device, "dtype": reference.dtype}


def add_part(owner: nn.Module, name: str, part: nn.Module, like: nn.Module) -> None:
    """Register ``part`` in ``owner``, in its training mode, with ``requires_grad`` as in ``like``."""
    requires_grad = next(p.requires_grad for p in like.parameters() if p.is_floating_point())
    owner.add_module(name, part.train(owner.training).requires_grad_(requires_grad))


class ResidualHooks:
    """Hooks that replace an activation y by ``part(x, y)``, where x is an earlier module's input.

    ``save_input`` saves x, and ``replace_output`` or ``replace_input`` replaces y, a later module's output or input.
    The part is ``owner.name``, looked up at every call, so that PEFT may wrap it. All hooks run inside the decoder
    layer's forward, so gradient checkpointing recomputes them together. x is released after use.
    """

    def __init__(self, owner: nn.Module, name: str) -> None:
        self.owner, self.name = owner, name
        self.x: Tensor | None = None

    def save_input(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Save x; a forward pre-hook, with keyword arguments, of the module that reads it."""
        self.x = args[0] if args else kwargs["hidden_states"]

    def pop_input(self) -> Tensor:
        """Return x and forget it."""
        x, self.x = self.x, None
        assert x is not None, "ResidualHooks: the module that reads x did not run before the one that returns y"
        return x

    def replace_output(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Replace y; a forward hook of the module that returns it."""
        return apply_to_output(module, output, self.pop_input(), getattr(self.owner, self.name))

    def replace_input(self, module: nn.Module, args: tuple) -> tuple[Any, ...]:
        """Replace y; a forward pre-hook of the module that reads it."""
        return (getattr(self.owner, self.name)(self.pop_input(), args[0]), *args[1:])

    def __getstate__(self) -> dict[str, Any]:
        # a forward that failed may have left a tensor with a graph, which cannot be copied
        return self.__dict__ | {"x": None}


def apply_to_output(module: nn.Module, output: Any, x: Any, part: Any) -> Any:
    """Return the output of ``module`` with ``part(x, y)`` instead of y; y is the output or its first element.

    Raises:
        ValueError: if the shapes of y and x (or the first of several x) differ, so that they would be broadcast.
    """
    y, stream = output[0] if isinstance(output, tuple) else output, x[0] if isinstance(x, list) else x
    if y.shape != stream.shape:
        raise ValueError(
            f"{type(module).__name__} returned shape {tuple(y.shape)}, not {tuple(stream.shape)} as the residual "
            "stream; modules in the sub-block must keep this shape"
        )
    return (part(x, y), *output[1:]) if isinstance(output, tuple) else part(x, y)
