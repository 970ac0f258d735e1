"""Shared by the kernels: a tile of a matrix product, and the sizes of tiles (untuned)."""

# Legend: N rows, K summed dimension

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

#: columns of an output tile, and numbers of the summed dimension that are loaded at a time
COLUMNS, STEP = 128, 32

cdiv = triton.cdiv


def rows(tokens: int) -> int:
    """Return rows of an output tile."""
    return 16 if tokens <= 16 else 64 if tokens <= 2048 else 128


def warps(tile_rows: int) -> int:
    """Return the number of warps for a tile of this many rows and ``COLUMNS`` columns."""
    return 8 if tile_rows > 16 else 4


def depth(dtype: torch.dtype) -> int:
    """Return the stages of the loads' pipeline: as many as fit into 99 KB of shared memory."""
    return 2 if dtype == torch.float32 else 3


def pad(size: int) -> int:
    """Return the power of two to which a dimension inside a tile is padded: at least 16, as products need."""
    return max(16, triton.next_power_of_2(size))


def precision(dtype: torch.dtype) -> str:
    """Return how products of single-precision numbers are taken: as torch takes its own."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


class Tile(NamedTuple):
    """Compile-time constants of a product's kernel."""

    ROWS: tl.constexpr
    COLUMNS: tl.constexpr
    STEP: tl.constexpr
    PRECISION: tl.constexpr


def launch(kernel: Any, sizes: tuple[int, ...], dtype: torch.dtype, *given: Any, **fixed: Any) -> None:
    """Run ``kernel(*given, TILE)`` for every tile of a result.

    Args:
        kernel: of a product.
        sizes: rows and columns of the result, and parts of so many columns if there are several.
        dtype: of the factors.
        given: the kernel's arguments; what is None is not there for the compiler.
        fixed: sizes of the tile that are the kernel's own, and what else it is compiled for.
    """
    (tokens, columns), tile_rows = sizes[:2], rows(sizes[0])
    chosen: dict[str, Any] = {"ROWS": tile_rows, "COLUMNS": COLUMNS, "STEP": STEP, "PRECISION": precision(dtype)}
    chosen |= {"num_warps": warps(tile_rows), "num_stages": depth(dtype)} | fixed
    grid = cdiv(tokens, chosen["ROWS"]), cdiv(columns, chosen["COLUMNS"]), *sizes[2:]
    tile = Tile(*(tl.constexpr(chosen.pop(name)) for name in Tile._fields))
    kernel[grid](*given, TILE=tile, **chosen)


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a result; an empty tensor if it is not wanted."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


@triton.jit
def add_product(total, a, a_row, row, row_ok, b, b_column, b_step, column, column_ok, size, TILE: tl.constexpr):
    """Return total[n, c] + sum_k a[row_n, k] b[column_c, k]; ``a`` has row stride ``a_row`` and adjacent columns, ``b``
    the strides ``b_column`` and ``b_step`` for its column and for k."""
    for start in range(0, size, TILE.STEP):
        k = start + tl.arange(0, TILE.STEP)
        k_ok = k < size
        left = tl.load(a + row[:, None] * a_row + k[None, :], mask=row_ok[:, None] & k_ok[None, :], other=0.0)
        right = tl.load(
            b + column[None, :] * b_column + k[:, None] * b_step, mask=column_ok[None, :] & k_ok[:, None], other=0.0
        )
        total = tl.dot(left, right, total, input_precision=TILE.PRECISION)
    return total
