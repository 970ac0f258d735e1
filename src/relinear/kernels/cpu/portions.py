"""Rows of a matrix in portions whose intermediates stay in the processor's cache."""

from torch import Tensor

#: size of a portion on a CPU
PORTION_BYTES = 1 << 21
#: the same for outputs whose gradients are computed at a time: smaller ones make small products
BACKWARD_PORTION = 1 << 22
#: larger portions are a multiple of so many rows: a bfloat16 product over an odd number of them (a weight's gradient)
#: takes up to a quarter longer
ROWS = 64


def row_portions(x: Tensor, size: int = PORTION_BYTES) -> list[slice]:
    """Slices over the rows of x (N, M), of about ``size`` bytes each; one slice off the CPU, and of no rows."""
    rows, columns = x.shape
    step = max(1, size // (max(1, columns) * x.itemsize)) if x.device.type == "cpu" else max(1, rows)
    step = max(1, round(step / ROWS)) * ROWS if step >= ROWS else step
    return [slice(start, min(start + step, rows)) for start in range(0, max(1, rows), step)]
