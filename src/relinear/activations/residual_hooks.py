"""Hooks that replace an activation by a function of it and an earlier one, as residual methods do."""

from typing import Any

from torch import Tensor, nn


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
    y = output[0] if isinstance(output, tuple) else output
    stream = x[0] if isinstance(x, list) else x
    if y.shape != stream.shape:
        raise ValueError(
            f"{type(module).__name__} returned shape {tuple(y.shape)}, not {tuple(stream.shape)} as the residual "
            "stream; modules in the sub-block must keep this shape"
        )
    return (part(x, y), *output[1:]) if isinstance(output, tuple) else part(x, y)
