"""Replace modules of a model; hooks stay where they were registered."""

from collections.abc import Iterable

from torch import nn

from relinear.hf.initialization import mark_initialized_

_HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith(("_forward", "_backward")))


def swap_hooks(source: nn.Module, target: nn.Module) -> None:
    """Exchange the hooks of a layer and its replacement; handles of hooks stay valid."""
    for name in _HOOKS:
        source.__dict__[name], target.__dict__[name] = target.__dict__[name], source.__dict__[name]


def swap_module(model: nn.Module, names: Iterable[str], source: nn.Module, target: nn.Module) -> None:
    """Replace ``source`` by ``target`` under each of ``names``; ``target`` takes over its hooks."""
    swap_hooks(source, target)
    mark_initialized_(target)
    for name in names:
        model.set_submodule(name, target)
