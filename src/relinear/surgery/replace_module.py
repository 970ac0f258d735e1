"""Replace modules of a model; hooks stay where they were registered."""

from collections.abc import Iterable

from torch import nn

from relinear.contract.attachment import PART_PREFIX
from relinear.contract.module_state import swap_hooks_
from relinear.hf.initialization import mark_initialized_


def replace_module_(model: nn.Module, names: Iterable[str], source: nn.Module, target: nn.Module) -> None:
    """Replace ``source`` by ``target`` under each of ``names``; ``target`` takes over its hooks and attached parts."""
    swap_hooks_(source, target)
    for key in [key for key in source._modules if key.startswith(PART_PREFIX)]:
        target.add_module(key, source._modules.pop(key))
    mark_initialized_(target)
    for name in names:
        model.set_submodule(name, target)
