"""Put one module where another stands; hooks stay where they were registered."""

from collections.abc import Iterable

from torch import nn

from relinear.hf.initialization import mark_initialized_

_HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith(("_forward", "_backward")))


def swap_hooks(source: nn.Module, target: nn.Module) -> None:
    """Exchange the hooks of a layer and of its replacement, so that hooks stay where they were registered.

    Their handles stay valid.
    """
    for name in _HOOKS:
        source.__dict__[name], target.__dict__[name] = target.__dict__[name], source.__dict__[name]


def swap_module(model: nn.Module, names: Iterable[str], source: nn.Module, target: nn.Module) -> None:
    """Put ``target`` where ``source`` stands at each of ``names``; hooks stay where they were registered."""
    swap_hooks(source, target)
    mark_initialized_(target)
    for name in names:
        model.set_submodule(name, target)
