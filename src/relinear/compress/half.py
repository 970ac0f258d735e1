"""Models at no more than half precision, which is how they are counted and saved where bytes are the budget."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["at_half_precision", "round_to_half_"]


@contextlib.contextmanager
def at_half_precision(model: Any) -> Iterator[None]:
    """Within the block parameters in single precision are in bfloat16; afterwards they are wide again, but rounded.

    In bfloat16, for it has the range of what was trained in it or in single precision.
    """
    wide = {p: p.dtype for p in model.parameters() if p.is_floating_point() and p.element_size() > 2}
    stated = model.config.dtype
    for parameter in wide:
        parameter.data = parameter.data.bfloat16()
    try:
        yield
    finally:
        for parameter, dtype in wide.items():
            parameter.data = parameter.data.to(dtype)
        model.config.dtype = stated


def round_to_half_(model: Any) -> None:
    """Give parameters the values that they have once they are saved at half precision."""
    with at_half_precision(model):
        pass
