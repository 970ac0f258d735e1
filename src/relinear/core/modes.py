"""Evaluation as a guard: every module gets the mode back that it had, frozen ones in a model that trains, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

__all__ = ["evaluating", "same_modes"]


@contextlib.contextmanager
def same_modes(model: nn.Module) -> Iterator[None]:
    """``with same_modes(model): ...`` gives every module the mode back that it had before.

    ``model.train(mode)`` would give all of them the mode of the root: a submodule that was kept in evaluation mode (a
    frozen tower, dropout that is off) would start to drop out and to update its statistics.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode  # not by ``train``, which would reach what the module holds


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """``with evaluating(model): ...`` runs in evaluation mode, then gives every module its own mode back."""
    with same_modes(model):
        model.eval()
        yield
