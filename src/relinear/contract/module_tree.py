"""Walk a model's modules, and name them as in a stock model."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

#: PEFT's name for the layer inside an adapter
BASE_LAYER = "base_layer"
#: what PEFT, FSDP and ``torch.compile`` add to names
_ADDED = re.compile(
    rf"^base_model\.(model\.)?(?=.)|\b({BASE_LAYER}|_orig_mod|\w*_wrapped_module|original_module|modules_to_save\.\w+)(\.|$)"
)


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


def stock_name(name: str) -> str:
    """Return ``q_proj`` for ``q_proj.base_layer``: a name without what PEFT, FSDP and ``torch.compile`` add."""
    return _ADDED.sub("", name).removesuffix(".")
