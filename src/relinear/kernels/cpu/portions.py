"""Rows of a matrix in portions whose intermediates stay in the processor's cache."""

from __future__ import annotations

from torch import Tensor

__all__ = ["PORTION_BYTES", "row_portions"]

#: size of a portion on a CPU
PORTION_BYTES = 1 << 21


def row_portions(x: Tensor, size: int = PORTION_BYTES) -> list[slice]:
    """Slices over the rows of x (N, M), of about ``size`` bytes each; one slice off the CPU, and of no rows."""
    rows, columns = x.shape
    step = max(1, size // (max(1, columns) * x.itemsize)) if x.device.type == "cpu" else max(1, rows)
    return [slice(start, min(start + step, rows)) for start in range(0, max(1, rows), step)]
