"""Guards for the length of a block: modules get their modes back, parameters their flags, and hooks are taken away."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def training_modes_restored(model: nn.Module) -> Iterator[None]:
    """Give every module the mode back that it had before the block.

    ``model.train(mode)`` would give all of them the mode of the root: a submodule that was kept in evaluation mode (a
    frozen tower, dropout that is off) would start to drop out and to update its statistics. A module that was added
    meanwhile gets the mode of the one that it replaced, else that of its parent.
    """
    named = list(model.named_modules())
    modes = [(module, module.training) for _, module in named]
    known = {id(module) for _, module in named}
    modes_by_name = {name: module.training for name, module in named}
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode  # not by ``train``, which would reach what the module holds
        for name, module in model.named_modules():
            if id(module) not in known:
                around = model.get_submodule(name.rpartition(".")[0])
                module.training = modes_by_name.get(name, around.training)


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluate within the block, then give every module its own mode back."""
    with training_modes_restored(model):
        model.eval()
        yield


@contextlib.contextmanager
def frozen_parameters(model: nn.Module) -> Iterator[None]:
    """Freeze all parameters within the block, then give each its own flag back."""
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
    model.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)


@contextlib.contextmanager
def forward_hooks_on(
    modules: Iterable[tuple[str, nn.Module]], see: Callable[[str, nn.Module, tuple, Any], None]
) -> Iterator[None]:
    """Call ``see(name, module, args, output)`` after each forward of ``modules`` within the block."""
    handles = [module.register_forward_hook(functools.partial(see, name)) for name, module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
