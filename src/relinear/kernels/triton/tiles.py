"""Parts that the Triton kernels share: the product of one tile, and the sizes of tiles (not tuned)."""

# Legend: N rows, K summed dimension

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

#: columns of an output tile, and elements of the summed dimension that are loaded at a time
COLUMNS, STEP = 128, 32

cdiv = triton.cdiv


def rows(tokens: int) -> int:
    """Return the number of rows of an output tile."""
    return 16 if tokens <= 16 else 64 if tokens <= 2048 else 128


def warps(tile_rows: int) -> int:
    """Return the number of warps for a tile of this many rows and ``COLUMNS`` columns."""
    return 8 if tile_rows > 16 else 4


def depth(dtype: torch.dtype) -> int:
    """Return the number of pipeline stages for loads: as many as fit into 99 KB of shared memory."""
    return 2 if dtype == torch.float32 else 3


def pad(size: int) -> int:
    """Return the power of two to which a dimension inside a tile is padded: at least 16, as products need."""
    return max(16, triton.next_power_of_2(size))


def precision(dtype: torch.dtype) -> str:
    """Return the precision of float32 products: that of torch's matrix products."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


class Tile(NamedTuple):
    """Compile-time constants of a kernel that computes products."""

    ROWS: tl.constexpr
    COLUMNS: tl.constexpr
    STEP: tl.constexpr
    PRECISION: tl.constexpr


def launch(kernel: Any, sizes: tuple[int, ...], dtype: torch.dtype, *arguments: Any, **constants: Any) -> None:
    """Run ``kernel(*arguments, TILE)`` for every tile of a result.

    Args:
        kernel: a Triton kernel that computes a product.
        sizes: rows and columns of the result, and the number of parts if it has several of so many columns.
        dtype: dtype of the factors.
        arguments: the kernel's arguments; code for those that are None is not compiled.
        constants: further compile-time constants and options, which override the default sizes of the tile.
    """
    (tokens, columns), tile_rows = sizes[:2], rows(sizes[0])
    options: dict[str, Any] = {"ROWS": tile_rows, "COLUMNS": COLUMNS, "STEP": STEP, "PRECISION": precision(dtype)}
    options |= {"num_warps": warps(tile_rows), "num_stages": depth(dtype)} | constants
    grid = cdiv(tokens, options["ROWS"]), cdiv(columns, options["COLUMNS"]), *sizes[2:]
    tile = Tile(*(tl.constexpr(options.pop(name)) for name in Tile._fields))
    kernel[grid](*arguments, TILE=tile, **options)


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a tensor of ``shape`` on the device of ``like``."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


@triton.jit
def add_product(total, a, a_row, row, row_ok, b, b_column, b_step, column, column_ok, size, TILE: tl.constexpr):
    """Return total[n, c] + sum_k a[row_n, k] b[column_c, k].

    ``a`` has the row stride ``a_row`` and adjacent columns; ``b`` has the strides ``b_column`` and ``b_step`` for its
    column and for k.
    """
    for start in range(0, size, TILE.STEP):
        k = start + tl.arange(0, TILE.STEP)
        k_ok = k < size
        left = tl.load(a + row[:, None] * a_row + k[None, :], mask=row_ok[:, None] & k_ok[None, :], other=0.0)
        right = tl.load(
            b + column[None, :] * b_column + k[:, None] * b_step, mask=column_ok[None, :] & k_ok[:, None], other=0.0
        )
        total = tl.dot(left, right, total, input_precision=TILE.PRECISION)
    return total
