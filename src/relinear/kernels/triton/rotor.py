"""Sums of sandwiches A X B^T in one kernel: the change of basis and what lies between stay on chip (untuned).

A tile is some tokens' numbers of one window, all of them. In blade coordinates a window's strings are gathered as it is
read, transformed by a Walsh-Hadamard product and skewed inside the tile; on the way out the same backwards. That change
is orthogonal, so that the gradient of x is the same kernel with transposed factors, the left one first: general ones do
not commute where both act on the components of a number.
"""

# Legend: N tokens, T tokens of a tile, I / O input / output windows, W terms, V = 2^n window, S blocks of a window with
# factors of their own, M coordinates that share factors, L and R sizes of the factors; of the spin representation:
# BLOCKS, K rows and columns, F components. A name with PAD is the size of a product that holds 16 / size copies of a
# matrix on its diagonal, where the matrix alone would be too small for one.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from relinear.functional import rotor as reference
from relinear.kernels.autograd import differentiable_as, lowered, save
from relinear.kernels.triton import tiles

__all__ = ["sandwich_windows"]

#: numbers in a tile, where the tokens are enough
NUMBERS = 4096

#: programs that sum the gradients of factors, about
PROGRAMS = 256


@triton.jit
def _factor(weight, SIZE: tl.constexpr, PAD: tl.constexpr, ACROSS: tl.constexpr):
    """(PAD, PAD) with the transpose of a matrix on its diagonal, or where ACROSS the matrix itself: so that rows are
    multiplied from the right."""
    row, column = tl.arange(0, PAD)[:, None], tl.arange(0, PAD)[None, :]
    at = (row % SIZE) * SIZE + column % SIZE if ACROSS else (column % SIZE) * SIZE + row % SIZE
    return tl.load(weight + at, mask=row // SIZE == column // SIZE, other=0.0)


@triton.jit
def _turned(numbers, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Flat matrices (ROWS, COLUMNS), one after another, each transposed."""
    COUNT: tl.constexpr = numbers.numel // (ROWS * COLUMNS)
    turned = tl.permute(tl.reshape(numbers, (COUNT, ROWS, COLUMNS)), (0, 2, 1))
    return tl.reshape(turned, (numbers.numel,))


@triton.jit
def _times(numbers, matrix, PAD: tl.constexpr, PRECISION: tl.constexpr):
    """Flat rows of PAD numbers, each times a matrix."""
    out = tl.dot(tl.reshape(numbers, (numbers.numel // PAD, PAD)), matrix, input_precision=PRECISION)
    return tl.reshape(out, (numbers.numel,))


@triton.jit
def _block_sums(matrix, at, coordinate, V: tl.constexpr, BLOCKS: tl.constexpr):
    """(first + second, first - second) of two blocks."""
    if BLOCKS == 2:
        matrix = tl.gather(matrix, at ^ (V // 2), 0) + tl.where(coordinate < V // 2, matrix, -matrix)
    return matrix


@triton.jit
def _read(
    x,
    first,
    window,
    windows,
    tokens,
    order,
    signs,
    walsh,
    BLADE: tl.constexpr,
    T: tl.constexpr,
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    K_PAD: tl.constexpr,
):
    """Spin coordinates (T V,) of one window of x (N, windows, V), from token ``first`` on."""
    at = tl.arange(0, T * V)
    coordinate, token = at % V, first + at // V
    start, ok = (token * windows + window) * V, token < tokens
    if BLADE:
        given = tl.load(x + start + tl.load(order + coordinate), mask=ok, other=0.0)
        strings = given.to(tl.float32) * tl.load(signs + coordinate)
        spectrum = _times(strings, _factor(walsh, K, K_PAD, True), K_PAD, "tf32x3")
        # (block, row, component, column) is found at (block, component, row ^ column, column)
        column, component, row = coordinate % K, coordinate // K % F, coordinate // (K * F) % K
        block = coordinate // (K * F * K)
        source = ((block * F + component) * K + (row ^ column)) * K + column
        matrix = tl.gather(spectrum, at - coordinate + source, 0)
        matrix = _block_sums(matrix, at, coordinate, V, BLOCKS).to(x.dtype.element_ty)
    else:
        matrix = tl.load(x + start + coordinate, mask=ok, other=0.0)
    return matrix


@triton.jit
def _strings(
    matrix,
    signs,
    walsh,
    T: tl.constexpr,
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    K_PAD: tl.constexpr,
):
    """Strings (T V,) of spin coordinates: the way back of ``_read``, up to the order of blades."""
    at = tl.arange(0, T * V)
    coordinate = at % V
    matrix = _block_sums(matrix, at, coordinate, V, BLOCKS)
    # (block, component, row, column) is found at (block, row ^ column, component, column)
    column, row, component = coordinate % K, coordinate // K % K, coordinate // (K * K) % F
    block = coordinate // (K * K * F)
    source = ((block * K + (row ^ column)) * F + component) * K + column
    spectrum = tl.gather(matrix, at - coordinate + source, 0)
    return _times(spectrum, _factor(walsh, K, K_PAD, True), K_PAD, "tf32x3") * tl.load(signs + coordinate)


@triton.jit
def _write(
    y,
    matrix,
    first,
    window,
    windows,
    tokens,
    order,
    signs,
    walsh,
    BLADE: tl.constexpr,
    T: tl.constexpr,
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    K_PAD: tl.constexpr,
):
    """The way back of ``_read``, its transpose."""
    at = tl.arange(0, T * V)
    coordinate, token = at % V, first + at // V
    start, ok = (token * windows + window) * V, token < tokens
    if BLADE:
        matrix = _strings(matrix, signs, walsh, T, V, BLOCKS, K, F, K_PAD)
        coordinate = tl.load(order + coordinate)
    tl.store(y + start + coordinate, matrix.to(y.dtype.element_ty), mask=ok)


@triton.jit
def _of_block(numbers, block, S: tl.constexpr, M: tl.constexpr):
    """The numbers of one block, zeros in the others."""
    if S > 1:
        numbers = tl.where(tl.arange(0, numbers.numel) // M % S == block, numbers, 0.0).to(numbers.dtype)
    return numbers


@triton.jit
def _sum_kernel(
    x,
    left,
    right,
    y,
    order,
    signs,
    walsh,
    tokens,
    terms,
    inputs,
    outputs,
    per_input,
    per_output,
    ACROSS: tl.constexpr,
    BLADE: tl.constexpr,
    T: tl.constexpr,
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    K_PAD: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    L_PAD: tl.constexpr,
    R_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One output window of T tokens. Factors lie ``per_input`` and ``per_output`` apart from window to window."""
    first, output = tl.program_id(0).to(tl.int64) * T, tl.program_id(1)
    # right factors first and left ones last, transposed ones the other way round; sums are those of the last product
    PAD: tl.constexpr = R_PAD if ACROSS else L_PAD
    total = tl.zeros((T * V // PAD, PAD), tl.float32)
    for window in range(0, inputs):
        given = _read(x, first, window, inputs, tokens, order, signs, walsh, BLADE, T, V, BLOCKS, K, F, K_PAD)
        for term in range(0, terms):
            for block in tl.static_range(S):
                pair = (term * inputs * outputs + output * per_output + window * per_input) * S + block
                part = _of_block(given, block, S, M)
                a = _factor(left + pair * L * L, L, L_PAD, ACROSS)
                b = _factor(right + pair * R * R, R, R_PAD, ACROSS)
                if ACROSS:
                    half = _turned(_times(_turned(part, L, M // L), a, L_PAD, PRECISION), M // L, L)
                    half = tl.reshape(half.to(part.dtype), (T * V // PAD, PAD))
                    total = tl.dot(half, b, total, input_precision=PRECISION)
                else:
                    half = _turned(_times(part, b, R_PAD, PRECISION), L, M // L)
                    half = tl.reshape(half.to(part.dtype), (T * V // PAD, PAD))
                    total = tl.dot(half, a, total, input_precision=PRECISION)
    matrix = tl.reshape(total, (T * V,))
    if not ACROSS:
        matrix = _turned(matrix, M // L, L)
    _write(y, matrix, first, output, outputs, tokens, order, signs, walsh, BLADE, T, V, BLOCKS, K, F, K_PAD)


@triton.jit
def _factor_kernel(
    grad,
    x,
    other,
    to_factor,
    order,
    signs,
    walsh,
    tokens,
    per_part,
    inputs,
    outputs,
    LEFT: tl.constexpr,
    BLADE: tl.constexpr,
    T: tl.constexpr,
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    K_PAD: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    L_PAD: tl.constexpr,
    R_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of one left or right factor from one part of the tokens, given the ``other`` factor; what lies between
    the two is computed again rather than kept. One side at a time: the tiles of large factors leave room for no more.
    """
    part, pair = tl.program_id(0), tl.program_id(1)
    block, window, output = pair % S, pair // S % inputs, pair // (S * inputs) % outputs
    PAD: tl.constexpr = L_PAD if LEFT else R_PAD
    total = tl.zeros((PAD, PAD), tl.float32)
    if LEFT:
        factor = _factor(other + pair * R * R, R, R_PAD, False)
    else:
        factor = _factor(other + pair * L * L, L, L_PAD, True)
    for start in range(0, per_part, T):
        first = part.to(tl.int64) * per_part + start
        given = _read(x, first, window, inputs, tokens, order, signs, walsh, BLADE, T, V, BLOCKS, K, F, K_PAD)
        given = _of_block(given, block, S, M)
        slope = _read(grad, first, output, outputs, tokens, order, signs, walsh, BLADE, T, V, BLOCKS, K, F, K_PAD)
        slope = _turned(slope, L, M // L)
        if LEFT:
            given = _turned(_times(given, factor, R_PAD, PRECISION).to(given.dtype), L, M // L)
        else:
            slope = _turned(_times(slope, factor, L_PAD, PRECISION).to(slope.dtype), M // L, L)
        slope, given = tl.reshape(slope, (T * V // PAD, PAD)), tl.reshape(given, (T * V // PAD, PAD))
        total = tl.dot(tl.trans(slope), given, total, input_precision=PRECISION)
    target = (part.to(tl.int64) * tl.num_programs(1) + pair) * PAD * PAD
    at = tl.arange(0, PAD)
    tl.store(to_factor + target + at[:, None] * PAD + at[None, :], total)


def _meta(x: Tensor, left: Tensor, right: Tensor, blade: bool) -> tuple[tuple, dict[str, Any]]:
    """The tables of the change of basis, and the compile-time arguments."""
    (tokens, _, window), blocks = x.shape, left.shape[3]
    rows, columns = left.shape[-1], right.shape[-1]
    (spin_blocks, size, components, _), *tables = reference.spin_tables(x)
    pads = {"K_PAD": tiles.pad(size), "L_PAD": tiles.pad(rows), "R_PAD": tiles.pad(columns)}
    # rows enough for a product, tokens no more than there are
    least = max(1, 16 * max(pads.values()) // window)
    count = min(max(least, NUMBERS // window), max(least, triton.next_power_of_2(tokens)))
    meta = {
        "BLADE": blade,
        "T": count,
        "V": window,
        "BLOCKS": spin_blocks,
        "K": size,
        "F": components,
        "S": blocks,
        "M": reference.shared_coordinates(window, left, right),
        "L": rows,
        "R": columns,
        "PRECISION": tiles.precision(x.dtype),
        "num_warps": 8 if count * window >= NUMBERS else 4,
        "num_stages": 1,  # loads wait for one another anyway, and large factors leave no room for a second copy
    }
    return tuple(tables) if blade else (None, None, None), meta | pads


def _sum(x: Tensor, left: Tensor, right: Tensor, blade: bool, across: bool) -> Tensor:
    terms, outputs, inputs = left.shape[:3]
    per_input, per_output = 1, inputs
    if across:
        outputs, inputs, per_input, per_output = inputs, outputs, per_output, per_input
    tokens, _, window = x.shape
    y = tiles.empty(x, tokens, outputs, window)
    tables, meta = _meta(x, left, right, blade)
    sizes = tokens, terms, inputs, outputs, per_input, per_output
    _sum_kernel[(tiles.cdiv(tokens, meta["T"]), outputs)](x, left, right, y, *tables, *sizes, ACROSS=across, **meta)
    return y


@torch.library.custom_op("relinear::sandwich_windows", mutates_args=())
def _forward(x: Tensor, left: Tensor, right: Tensor, blade: bool) -> Tensor:
    """y (N, O, V) of x (N, I, V)."""
    return _sum(x, left, right, blade, across=False)


@_forward.register_fake
def _(x, left, right, blade):
    return x.new_empty(x.shape[0], left.shape[1], x.shape[2])


def _to_factor(grad: Tensor, x: Tensor, left: Tensor, right: Tensor, blade: bool, of_left: bool) -> Tensor:
    """Gradient of one side's factors."""
    factor, other = (left, right) if of_left else (right, left)
    (_, outputs, inputs, _), pairs, tokens = left.shape[:4], left.shape[:4].numel(), x.shape[0]
    tables, meta = _meta(x, left, right, blade)
    per_part = meta["T"] * tiles.cdiv(tokens, meta["T"] * tiles.cdiv(PROGRAMS, pairs))
    parts, pad = tiles.cdiv(tokens, per_part), tiles.pad(factor.shape[-1])
    sums = tiles.empty(x, parts, pairs, pad, pad, dtype=torch.float32)
    _factor_kernel[(parts, pairs)](
        grad, x, other, sums, *tables, tokens, per_part, inputs, outputs, LEFT=of_left, **meta
    )
    # over parts, and over the copies on the diagonal
    copies = sums.sum(0).view(pairs, -1, factor.shape[-1], pad // factor.shape[-1], factor.shape[-1])
    return copies.diagonal(dim1=1, dim2=3).sum(-1).view(factor.shape).to(factor.dtype)


@torch.library.custom_op("relinear::sandwich_windows_backward", mutates_args=())
def _backward(
    grad: Tensor, x: Tensor, left: Tensor, right: Tensor, blade: bool, need: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, left and right; empty where there is no ``need`` of them."""
    return (
        _sum(grad, left, right, blade, across=True) if need[0] else tiles.empty(x, 0),
        _to_factor(grad, x, left, right, blade, of_left=True) if need[1] else tiles.empty(x, 0),
        _to_factor(grad, x, left, right, blade, of_left=False) if need[2] else tiles.empty(x, 0),
    )


@_backward.register_fake
def _(grad, x, left, right, blade, need):
    return tuple(x.new_empty(t.shape if wanted else 0) for t, wanted in zip((x, left, right), need, strict=True))


def _setup(ctx, inputs, output):
    save(ctx, inputs)


def _reference(x, left, right, blade) -> Tensor:
    return reference.sandwich_windows(x, left, right, "blade" if blade else "spinor")


@differentiable_as(_reference)
def _differentiate(ctx, grad):
    need = list(ctx.needs_input_grad[:3])
    given = _backward(grad.contiguous(), *ctx.saved_tensors[:3], ctx.plain[3], need)
    return *(gradient if wanted else None for gradient, wanted in zip(given, need, strict=True)), None


_forward.register_autograd(_differentiate, setup_context=_setup)


def sandwich_windows(x: Tensor, left: Tensor, right: Tensor, basis: str = "spinor") -> Tensor:
    """``functional.rotor.sandwich_windows`` (same arguments and result)."""
    x, left, right = (t.contiguous() for t in lowered(x, left, right))
    return _forward(x, left, right, basis == "blade")
