"""Rows of a matrix in portions whose intermediates stay in the processor's cache."""

from __future__ import annotations

from torch import Tensor

__all__ = ["row_chunks"]

#: numbers in a portion on a CPU: two megabytes in single precision
CHUNK_NUMBERS = 1 << 19


def row_chunks(x: Tensor, numbers: int = CHUNK_NUMBERS) -> list[slice]:
    """Slices over the rows of x (N, M), of about ``numbers`` entries each; one slice off the CPU, and of no rows."""
    rows, columns = x.shape
    step = max(1, numbers // max(1, columns)) if x.device.type == "cpu" else max(1, rows)
    return [slice(start, min(start + step, rows)) for start in range(0, max(1, rows), step)]
