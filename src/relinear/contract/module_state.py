"""Restore training modes, requires_grad flags and dtypes of modules after a block; add, find and exchange hooks."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

_CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: torch's dictionaries of the hooks that run for all modules
GLOBAL_HOOKS = tuple(getattr(torch_module, f"_global{hooks}") for hooks in _CALL_HOOKS)
_ALL_HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith(("_forward", "_backward")))


@contextlib.contextmanager
def training_modes_restored(model: nn.Module) -> Iterator[None]:
    """Restore the training mode of every module after the block.

    ``model.train(mode)`` would give all modules one mode, also those that stay in eval mode, such as a frozen vision
    tower. A module that was added within the block gets the mode of the module that it replaced, else its parent's.
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
def observe_forwards(
    modules: Iterable[tuple[str, nn.Module]], hook: Callable[[str, nn.Module, tuple, Any], Any]
) -> Iterator[None]:
    """Call ``hook(name, module, args, output)`` after each forward of ``modules``; it may return another output."""
    with contextlib.ExitStack() as stack:
        for name, module in modules:
            stack.callback(module.register_forward_hook(functools.partial(hook, name)).remove)
        yield


def is_unhooked(module: Any) -> bool:
    """Return whether calling ``module`` only runs its class's forward: it has no hooks and no patched forward.

    Only then may an operator read the parameters of ``module`` without calling it.
    """
    attributes = module.__dict__
    hooked = any(attributes[hooks] for hooks in _CALL_HOOKS) or any(GLOBAL_HOOKS)
    return not hooked and "forward" not in attributes  # accelerate patches the instance's forward


def hook_dictionaries(modules: Iterable[nn.Module]) -> tuple[dict, ...]:
    """Return the dictionaries of the hooks that forwards of ``modules`` run, torch's global hooks among them.

    torch adds to these dictionaries and never replaces them, so they can be kept.
    """
    hooks = (module.__dict__[kind] for module in modules for kind in _CALL_HOOKS[:2])
    return *hooks, *GLOBAL_HOOKS[:2]


def swap_hooks_(source: nn.Module, target: nn.Module) -> None:
    """Exchange the hooks of a layer and its replacement; handles of hooks stay valid."""
    for name in _ALL_HOOKS:
        source.__dict__[name], target.__dict__[name] = target.__dict__[name], source.__dict__[name]


@contextlib.contextmanager
def in_dtype(tensors: Iterable[Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Hold ``tensors`` in ``dtype`` within the block; afterwards they have their former dtypes, perhaps rounded."""
    dtypes = {tensor: tensor.dtype for tensor in tensors}
    for tensor in dtypes:
        tensor.data = tensor.data.to(dtype)
    try:
        yield
    finally:
        for tensor, former in dtypes.items():
            tensor.data = tensor.data.to(former)
