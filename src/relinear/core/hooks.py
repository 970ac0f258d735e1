"""Looking at what modules put out, for the length of a block."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

__all__ = ["watching"]


@contextlib.contextmanager
def watching(
    modules: Iterable[tuple[str, nn.Module]], see: Callable[[str, nn.Module, tuple, Any], None]
) -> Iterator[None]:
    """``with watching(modules, see): ...`` calls ``see(name, module, args, output)`` after each of their forwards."""
    handles = [module.register_forward_hook(functools.partial(see, name)) for name, module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
