"""Walk a model's modules."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def outermost(model: nn.Module, is_wanted: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) for every module for which ``is_wanted`` is true, once; skip modules inside of these."""
    seen: set[int] = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, Any]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if is_wanted(module):
            yield name, module
            return
        for key, child in module.named_children():
            yield from walk(child, f"{name}.{key}" if name else key)

    yield from walk(model, "")
