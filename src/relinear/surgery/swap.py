"""Putting one module in the place of another, under every name that it goes by."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from relinear.core.drawn import mark_drawn_
from relinear.core.operator import swap_hooks

__all__ = ["swap_module"]


def swap_module(model: nn.Module, names: Iterable[str], source: nn.Module, target: nn.Module) -> None:
    """Put ``target`` where ``source`` stands at each of ``names``; hooks stay where they were registered."""
    swap_hooks(source, target)
    mark_drawn_(target)
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, target)
