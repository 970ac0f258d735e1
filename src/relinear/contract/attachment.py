"""Model-level attachments: what belongs to the model as a whole rather than to one linear layer.

A context manager, a residual method or a path-level modulator is an attachment: a config that changes a model in
place, is written into its checkpoint in the order of application, and is applied again before the weights are loaded.
"""

import dataclasses
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from relinear.contract.config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttachmentConfig(Config):
    """Hold the settings of a model-level part: the base of context managers and residual methods.

    ``relinear.attach_`` puts the part into a model. A part of your own overrides ``check`` and ``attach``.

    Examples:
        >>> relinear.contract.AttachmentConfig.read("context_manager:dim=8")
        ContextManager(dim=8, source='tokens', mixer='token', timescales=(2.0, 8.0, 32.0, 128.0))
    """

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
        """Return the settings to rebuild on ``model``, a part of the original or with another head; None to skip."""
        return self


# Parts and their hooks


def factory_kwargs_like(module: nn.Module) -> dict[str, Any]:
    """Return ``{"device", "dtype"}`` of a module's parameters, for new ones."""
    reference = next(p for p in module.parameters() if p.is_floating_point())
    return {"device": reference.device, "dtype": reference.dtype}


def add_part(owner: nn.Module, name: str, part: nn.Module, like: nn.Module) -> None:
    """Register ``part`` in ``owner``, in its mode, trained if the parameters of ``like`` are."""
    trained = next(p.requires_grad for p in like.parameters() if p.is_floating_point())
    owner.add_module(name, part.train(owner.training).requires_grad_(trained))


class ResidualHooks:
    """Give a part of a model x, which an earlier module reads, and y, which a later one reads or returns, by hooks.

    The part is ``owner.name``, looked up at every call, so that PEFT may wrap it; its ``forward(x, y)`` returns what
    replaces y. Both hooks run inside the decoder layer's forward, so gradient checkpointing recomputes them
    together, and x is released as soon as it was used.
    """

    def __init__(self, owner: nn.Module, name: str) -> None:
        self.owner, self.name = owner, name
        self.x: Tensor | None = None

    def save_input(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Save x, as a forward pre-hook with keywords of the module that reads it."""
        self.x = args[0] if args else kwargs["hidden_states"]

    def pop_input(self) -> Tensor:
        """Return x and forget it."""
        x, self.x = self.x, None
        assert x is not None, "ResidualHooks: the module that reads x did not run before the one that returns y"
        return x

    def replace_output(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Replace y, as a forward hook of the module that returns it."""
        return apply_to_output(module, output, self.pop_input(), getattr(self.owner, self.name))

    def replace_input(self, module: nn.Module, args: tuple) -> tuple[Any, ...]:
        """Replace y, as a forward pre-hook of the module that reads it."""
        return (getattr(self.owner, self.name)(self.pop_input(), args[0]), *args[1:])

    def __getstate__(self) -> dict[str, Any]:
        # A forward that failed half-way may have left a tensor with a graph, which cannot be copied.
        return self.__dict__ | {"x": None}


def apply_to_output(module: nn.Module, output: Any, x: Any, part: Any) -> Any:
    """Return ``output`` of ``module``, a tensor y or a tuple that starts with one, with ``part(x, y)`` for y.

    Raises:
        ValueError: if y has another shape than x (the first of several), so that it would be broadcast.
    """
    y, stream = output[0] if isinstance(output, tuple) else output, x[0] if isinstance(x, list) else x
    if y.shape != stream.shape:
        raise ValueError(
            f"{type(module).__name__} returned shape {tuple(y.shape)}, not {tuple(stream.shape)} as the residual "
            "stream; modules in the sub-block must keep it"
        )
    return (part(x, y), *output[1:]) if isinstance(output, tuple) else part(x, y)
