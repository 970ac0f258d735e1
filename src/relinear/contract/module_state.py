"""Restore the training modes, requires_grad flags and hooks of modules after a block; exchange hooks of two modules."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

_HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith(("_forward", "_backward")))


@contextlib.contextmanager
def training_modes_restored(model: nn.Module) -> Iterator[None]:
    """Restore the training mode of every module after the block.

    ``model.train(mode)`` would set all modules to the root's mode, also those that stay in eval mode, such as a frozen
    vision tower.
    A module that was added within the block gets the mode of the module that it replaced, else its parent's.
    """
    modules = list(model.named_modules())
    modes = [(module, module.training) for _, module in modules]
    old_ids = {id(module) for _, module in modules}
    modes_by_name = {name: module.training for name, module in modules}
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode  # ``module.train`` would change its children
        for name, module in model.named_modules():
            if id(module) not in old_ids:
                parent = model.get_submodule(name.rpartition(".")[0])
                module.training = modes_by_name.get(name, parent.training)


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into eval mode within the block, then restore every module's mode."""
    with training_modes_restored(model):
        model.eval()
        yield


@contextlib.contextmanager
def frozen_parameters(model: nn.Module) -> Iterator[None]:
    """Freeze all parameters within the block, then restore every ``requires_grad``."""
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
    model.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)


@contextlib.contextmanager
def forward_hooks_on(
    modules: Iterable[tuple[str, nn.Module]], hook: Callable[[str, nn.Module, tuple, Any], Any]
) -> Iterator[None]:
    """Call ``hook(name, module, args, output)`` after each forward of ``modules``; it may return another output."""
    with contextlib.ExitStack() as stack:
        for name, module in modules:
            stack.callback(module.register_forward_hook(functools.partial(hook, name)).remove)
        yield


def swap_hooks(source: nn.Module, target: nn.Module) -> None:
    """Exchange the hooks of a layer and its replacement; handles of hooks stay valid."""
    for name in _HOOKS:
        source.__dict__[name], target.__dict__[name] = target.__dict__[name], source.__dict__[name]
