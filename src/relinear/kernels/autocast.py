"""Autocast for autograd functions of our own, which torch does not know to lower."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["lowered"]


def lowered(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """The tensors as autocast would hand them to a matrix product (double precision stays); as they are without it."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, *others
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in (x, *others))
