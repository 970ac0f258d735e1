"""Compute sums of sandwiches A X B^T, and hidden steps of rotor networks, in one kernel each (not tuned).

A tile holds one whole window of some tokens, so that the change of basis and all intermediate results stay on chip. In
blade coordinates, the kernel gathers a window's Pauli strings when it reads it, multiplies them by a Walsh-Hadamard
matrix and permutes the result inside the tile; when it writes a window, it does the inverse. A hidden step then applies
LayerNorm, permutation, activation and mixing to its branches. Its backward pass computes these again and writes the
gradients of the sandwiches; from them torch computes those of x and of the factors. The sum without a step is for
inference.
"""

# Legend: N tokens, T tokens of a tile, I / O input / output windows, W terms or branches, V = 2^n window, S blocks of a
# window with separate factors, M coordinates that share a pair of factors, L and R sizes of the factors; of the spin
# representation: BLOCKS, K rows and columns, F components. A name with PAD is a size padded to at least 16, as tensor
# products need: smaller matrices are repeated along the diagonal.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from relinear.functional import rotor as reference
from relinear.kernels.autograd import autocasted, differentiable_as, save
from relinear.kernels.triton import tiles

#: elements of a tile, if there are enough tokens
NUMBERS = 4096

EPSILON = tl.constexpr(1e-5)  # that of torch's layer norm


class _Tile(NamedTuple):
    """Compile-time constants of a kernel, named as in the legend; BLADE: whether coordinates are blades'."""

    BLADE: tl.constexpr
    T: tl.constexpr
    V: tl.constexpr
    BLOCKS: tl.constexpr
    K: tl.constexpr
    F: tl.constexpr
    S: tl.constexpr
    M: tl.constexpr
    L: tl.constexpr
    R: tl.constexpr
    K_PAD: tl.constexpr
    L_PAD: tl.constexpr
    R_PAD: tl.constexpr
    PRECISION: tl.constexpr


@triton.jit
def _factor(weight, SIZE: tl.constexpr, PAD: tl.constexpr):
    """Load the transpose of a matrix, repeated along the diagonal of (PAD, PAD), to multiply rows from the right."""
    row, column = tl.arange(0, PAD)[:, None], tl.arange(0, PAD)[None, :]
    at = (column % SIZE) * SIZE + row % SIZE
    return tl.load(weight + at, mask=row // SIZE == column // SIZE, other=0.0)


@triton.jit
def _turned(numbers, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Transpose each of the consecutive flat matrices (ROWS, COLUMNS)."""
    COUNT: tl.constexpr = numbers.numel // (ROWS * COLUMNS)
    turned = tl.permute(tl.reshape(numbers, (COUNT, ROWS, COLUMNS)), (0, 2, 1))
    return tl.reshape(turned, (numbers.numel,))


@triton.jit
def _times(numbers, matrix, PAD: tl.constexpr, PRECISION: tl.constexpr):
    """Multiply each flat row of PAD numbers by a matrix."""
    out = tl.dot(tl.reshape(numbers, (numbers.numel // PAD, PAD)), matrix, input_precision=PRECISION)
    return tl.reshape(out, (numbers.numel,))


@triton.jit
def _block_sums(matrix, at, coordinate, TILE: tl.constexpr):
    """Return (first + second, first - second) if the algebra has two blocks."""
    if TILE.BLOCKS == 2:
        matrix = tl.gather(matrix, at ^ (TILE.V // 2), 0) + tl.where(coordinate < TILE.V // 2, matrix, -matrix)
    return matrix


@triton.jit
def _read(x, first, window, windows, tokens, order, signs, walsh, TILE: tl.constexpr):
    """Return the spin coordinates (T V,) of one window of x (N, windows, V), from token ``first`` on."""
    at = tl.arange(0, TILE.T * TILE.V)
    coordinate, token = at % TILE.V, first + at // TILE.V
    start, ok = (token * windows + window) * TILE.V, token < tokens
    if TILE.BLADE:
        blades = tl.load(x + start + tl.load(order + coordinate), mask=ok, other=0.0)
        strings = blades.to(tl.float32) * tl.load(signs + coordinate)
        spectrum = _times(strings, _factor(walsh, TILE.K, TILE.K_PAD), TILE.K_PAD, "tf32x3")
        # (block, row, component, column) is found at (block, component, row ^ column, column)
        column, component = coordinate % TILE.K, coordinate // TILE.K % TILE.F
        row = coordinate // (TILE.K * TILE.F) % TILE.K
        block = coordinate // (TILE.K * TILE.F * TILE.K)
        source = ((block * TILE.F + component) * TILE.K + (row ^ column)) * TILE.K + column
        matrix = tl.gather(spectrum, at - coordinate + source, 0)
        matrix = _block_sums(matrix, at, coordinate, TILE).to(x.dtype.element_ty)
    else:
        matrix = tl.load(x + start + coordinate, mask=ok, other=0.0)
    return matrix


@triton.jit
def _strings(matrix, signs, walsh, TILE: tl.constexpr):
    """Return the Pauli strings (T V,) of spin coordinates: the inverse of ``_read``, up to the order of blades."""
    at = tl.arange(0, TILE.T * TILE.V)
    coordinate = at % TILE.V
    matrix = _block_sums(matrix, at, coordinate, TILE)
    # (block, component, row, column) is found at (block, row ^ column, component, column)
    column, row = coordinate % TILE.K, coordinate // TILE.K % TILE.K
    component = coordinate // (TILE.K * TILE.K) % TILE.F
    block = coordinate // (TILE.K * TILE.K * TILE.F)
    source = ((block * TILE.K + (row ^ column)) * TILE.F + component) * TILE.K + column
    spectrum = tl.gather(matrix, at - coordinate + source, 0)
    return _times(spectrum, _factor(walsh, TILE.K, TILE.K_PAD), TILE.K_PAD, "tf32x3") * tl.load(signs + coordinate)


@triton.jit
def _write(y, matrix, first, window, windows, tokens, order, signs, walsh, TILE: tl.constexpr):
    """Write a window, with the inverse of the change of basis in ``_read``, which is its transpose."""
    at = tl.arange(0, TILE.T * TILE.V)
    coordinate, token = at % TILE.V, first + at // TILE.V
    start, ok = (token * windows + window) * TILE.V, token < tokens
    if TILE.BLADE:
        matrix = _strings(matrix, signs, walsh, TILE)
        coordinate = tl.load(order + coordinate)
    tl.store(y + start + coordinate, matrix.to(y.dtype.element_ty), mask=ok)


@triton.jit
def _of_block(numbers, block, TILE: tl.constexpr):
    """Return the elements of one block, with zeros in place of the others."""
    if TILE.S > 1:
        numbers = tl.where(tl.arange(0, numbers.numel) // TILE.M % TILE.S == block, numbers, 0.0).to(numbers.dtype)
    return numbers


@triton.jit
def _add_sandwich(total, x, left, right, pair, TILE: tl.constexpr):
    """Return total (.., L_PAD) + A X B^T, transposed, for one pair of factors and X in spin coordinates."""
    for block in tl.static_range(TILE.S):
        part = _of_block(x, block, TILE)
        a = _factor(left + (pair * TILE.S + block) * TILE.L * TILE.L, TILE.L, TILE.L_PAD)
        b = _factor(right + (pair * TILE.S + block) * TILE.R * TILE.R, TILE.R, TILE.R_PAD)
        half = _turned(_times(part, b, TILE.R_PAD, TILE.PRECISION), TILE.L, TILE.M // TILE.L)
        half = tl.reshape(half.to(part.dtype), (x.numel // TILE.L_PAD, TILE.L_PAD))
        total = tl.dot(half, a, total, input_precision=TILE.PRECISION)
    return total


@triton.jit
def _sum_kernel(x, left, right, y, order, signs, walsh, tokens, terms, inputs, outputs, TILE: tl.constexpr):
    """Compute one output window of T tokens."""
    first, output = tl.program_id(0).to(tl.int64) * TILE.T, tl.program_id(1)
    total = tl.zeros((TILE.T * TILE.V // TILE.L_PAD, TILE.L_PAD), tl.float32)
    for window in range(0, inputs):
        source = _read(x, first, window, inputs, tokens, order, signs, walsh, TILE)
        for term in range(0, terms):
            pair = (term * outputs + output) * inputs + window
            total = _add_sandwich(total, source, left, right, pair, TILE)
    matrix = _turned(tl.reshape(total, (TILE.T * TILE.V,)), TILE.M // TILE.L, TILE.L)
    _write(y, matrix, first, output, outputs, tokens, order, signs, walsh, TILE)


def _tile(x: Tensor, left: Tensor, right: Tensor, blade: bool) -> tuple[tuple, _Tile, dict[str, int]]:
    """Return the tables of the change of basis, the tile and the compiler's options."""
    (tokens, _, window), rows, columns = x.shape, left.shape[-1], right.shape[-1]
    n = window.bit_length() - 1
    blocks, size, components, _ = reference.clifford.spin_shape(n)
    pads = tiles.pad(size), tiles.pad(rows), tiles.pad(columns)
    # enough rows for a product, but no more tokens than there are
    least = max(1, 16 * max(pads) // window)
    count = min(max(least, NUMBERS // window), max(least, triton.next_power_of_2(tokens)))
    shared = reference.shared_coordinates(window, left, right)
    factors = left.shape[3], shared, rows, columns
    tile = (blade, count, window, blocks, size, components, *factors, *pads, tiles.precision(x.dtype))
    # one stage: loads depend on one another, and large factors leave no room for a second copy
    options = {"num_warps": 8 if count * window >= NUMBERS else 4, "num_stages": 1}
    return (
        reference.clifford.string_tables(n, x) if blade else (None, None, None),
        _Tile(*map(tl.constexpr, tile)),
        options,
    )


@torch.library.custom_op("relinear::sandwich_windows", mutates_args=())
def _sum(x: Tensor, left: Tensor, right: Tensor, blade: bool) -> Tensor:
    """Return y (N, O, V) for x (N, I, V)."""
    terms, outputs, inputs = left.shape[:3]
    tokens, _, window = x.shape
    y = tiles.empty(x, tokens, outputs, window)
    tables, tile, options = _tile(x, left, right, blade)
    grid = tiles.cdiv(tokens, tile.T.value), outputs
    _sum_kernel[grid](x, left, right, y, *tables, tokens, terms, inputs, outputs, TILE=tile, **options)
    return y


@_sum.register_fake
def _(x, left, right, blade):
    return x.new_empty(x.shape[0], left.shape[1], x.shape[2])


def sandwich_windows(x: Tensor, left: Tensor, right: Tensor, basis: str = "spinor") -> Tensor:
    """Compute ``functional.rotor.sandwich_windows`` (same arguments and result), without gradients."""
    x, left, right = (t.contiguous() for t in autocasted(x, left, right))
    return _sum(x, left, right, basis == "blade")


@triton.jit
def _activated(h, slope, CURVE: tl.constexpr):
    """Return (activation, its derivative)."""
    if CURVE == "gelu":
        below = 0.5 * (1.0 + tl.erf(h * 0.7071067811865476))
        value, derivative = h * below, below + h * tl.exp(-0.5 * h * h) * 0.3989422804014327
    elif CURVE == "silu":
        opened = tl.sigmoid(h)
        value, derivative = h * opened, opened * (1.0 + h * (1.0 - opened))
    elif CURVE == "elu":
        power = tl.exp(tl.minimum(h, 0.0))
        value, derivative = tl.where(h > 0, h, power - 1.0), tl.where(h > 0, 1.0, power)
    else:
        derivative = tl.where(h > 0, 1.0, slope)
        value = h * derivative
    return value, derivative


@triton.jit
def _branch(
    x,
    left,
    right,
    orders,
    places,
    signs,
    walsh,
    branch,
    NORMALIZE: tl.constexpr,
    PERMUTE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return a branch before its activation (T V,), the coordinates that the permutation took, and the norm's scale."""
    at = tl.arange(0, TILE.T * TILE.V)
    coordinate = at % TILE.V
    total = tl.zeros((TILE.T * TILE.V // TILE.L_PAD, TILE.L_PAD), tl.float32)
    total = _add_sandwich(total, x, left, right, branch, TILE)
    z = _turned(tl.reshape(total, (TILE.T * TILE.V,)), TILE.M // TILE.L, TILE.L)
    if TILE.BLADE:
        z = _strings(z, signs, walsh, TILE)
    scale = tl.full((TILE.T,), 1.0, tl.float32)
    if NORMALIZE:  # does not depend on the order of coordinates
        rows = tl.reshape(z, (TILE.T, TILE.V))
        rows = rows - (tl.sum(rows, 1) / TILE.V)[:, None]
        scale = 1.0 / tl.sqrt(tl.sum(rows * rows, 1) / TILE.V + EPSILON)
        z = tl.reshape(rows * scale[:, None], (TILE.T * TILE.V,))
    taken = coordinate
    if PERMUTE:
        taken = tl.load(orders + branch * TILE.V + coordinate) - branch * TILE.V
    source = taken
    if TILE.BLADE:
        source = tl.load(places + taken)
    if PERMUTE or TILE.BLADE:
        z = tl.gather(z, at - coordinate + source, 0)
    return z, taken, scale


@triton.jit
def _step_kernel(
    x,
    left,
    right,
    slopes,
    mix,
    y,
    grad,
    to_branches,
    sums,
    orders,
    places,
    order,
    signs,
    walsh,
    tokens,
    branches,
    CURVE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PERMUTE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write y of T tokens. If ``grad``, the gradient of y, is passed, write instead that of the sandwiches (N, W, V),
    and these tokens' part of the gradients of slopes and mix."""
    first = tl.program_id(0).to(tl.int64) * TILE.T
    at = tl.arange(0, TILE.T * TILE.V)
    token = first + at // TILE.V
    matrix = _read(x, first, 0, 1, tokens, order, signs, walsh, TILE)
    total = tl.zeros((TILE.T * TILE.V,), tl.float32)
    if grad is not None:
        upstream = tl.load(grad + first * TILE.V + at, mask=token < tokens, other=0.0).to(tl.float32)
    for branch in range(0, branches):
        h, taken, scale = _branch(matrix, left, right, orders, places, signs, walsh, branch, NORMALIZE, PERMUTE, TILE)
        factor = tl.load(mix + branch).to(tl.float32)
        value, derivative = _activated(h, tl.load(slopes + branch).to(tl.float32), CURVE)
        total += value * factor
        if grad is not None:
            of_sums = sums + (tl.program_id(0) * branches + branch) * 2
            tl.store(of_sums, factor * tl.sum(upstream * tl.minimum(h, 0.0), 0))
            tl.store(of_sums + 1, tl.sum(upstream * value, 0))
            to_h = tl.reshape(upstream * derivative * factor, (TILE.T, TILE.V))
            if NORMALIZE:
                rows = tl.reshape(h, (TILE.T, TILE.V))
                mean, along = tl.sum(to_h, 1) / TILE.V, tl.sum(to_h * rows, 1) / TILE.V
                to_h = (to_h - mean[:, None] - rows * along[:, None]) * scale[:, None]
            to_h = tl.reshape(to_h, (TILE.T * TILE.V,)).to(to_branches.dtype.element_ty)
            tl.store(to_branches + (token * branches + branch) * TILE.V + taken, to_h, mask=token < tokens)
    if grad is None:
        tl.store(y + first * TILE.V + at, total.to(y.dtype.element_ty), mask=token < tokens)


def _step(
    x: Tensor, left: Tensor, right: Tensor, slopes: Tensor, mix: Tensor, grad: Tensor | None, *settings: Any
) -> Any:
    """Return y (N, V) for x (N, V), or gradients if ``grad``, that of y, is not None.

    They are those of the sandwiches (N, W, V), and of slopes and mix (W, 2).
    """
    seed, step, blade, normalize, activation = settings
    branches, window = left.shape[1], x.shape[1]
    # With factors of size 64 in half precision a tile has one token: tiles of two gave NaN on an H100 (Triton 3.6).
    one_token = left.shape[-1] == right.shape[-1] == 64 and x.element_size() == 2
    tables, tile, options = _tile((x[:1] if one_token else x).unsqueeze(1), left, right, blade)
    grid = (tiles.cdiv(x.shape[0], tile.T.value),)
    if grad is None:
        results: list[Any] = [tiles.empty(x, *x.shape), None, None, None]
    else:
        sums = tiles.empty(x, *grid, branches, 2, dtype=torch.float32)
        results = [None, grad, tiles.empty(x, x.shape[0], branches, window), sums]
    order = None if seed is None else reference.step_order(x, branches, seed, step)
    places = reference.clifford.string_places(window.bit_length() - 1, x) if blade else None
    curve = activation if callable(reference.ACTIVATIONS[activation]) else "prelu"
    flags = {"CURVE": curve, "NORMALIZE": normalize, "PERMUTE": order is not None}
    arguments = x, left, right, slopes, mix, *results, order, places, *tables, x.shape[0], branches
    _step_kernel[grid](*arguments, **flags, TILE=tile, **options)
    return results[0] if grad is None else (results[2], sums.sum(0))


#: arguments of a hidden step, for torch's operators
_STEP = (
    "Tensor x, Tensor left, Tensor right, Tensor slopes, Tensor mix, SymInt? seed, SymInt step, bool blade, "
    "bool normalize, str activation"
)


@torch.library.custom_op("relinear::rotor_step", mutates_args=(), schema=f"({_STEP}) -> Tensor")
def _forward(x: Tensor, *arguments: Any) -> Tensor:
    """Return y (N, V) for x (N, V)."""
    return _step(x, *arguments[:4], None, *arguments[4:])


@_forward.register_fake
def _(x, *arguments):
    return torch.empty_like(x)


@torch.library.custom_op(
    "relinear::rotor_step_backward", mutates_args=(), schema=f"(Tensor grad, {_STEP}) -> (Tensor, Tensor)"
)
def _backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sandwiches (N, W, V), and those of slopes and mix (W, 2)."""
    return _step(*arguments[:5], grad, *arguments[5:])


@_backward.register_fake
def _(grad, x, left, *arguments):
    branches = left.shape[1]
    return x.new_empty(x.shape[0], branches, x.shape[1]), x.new_empty(branches, 2, dtype=torch.float32)


def _sandwich_gradients(
    grad: Tensor, x: Tensor, left: Tensor, right: Tensor, blade: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x (N, V), left and right (1, W, 1, S, ..) from ``grad``, that of sandwiches (N, W, V)."""
    if blade:  # the change of basis is orthogonal
        x, grad = reference.clifford.to_spin(x), reference.clifford.to_spin(grad)
    window, (_, branches, _, blocks, rows, _), columns = x.shape[-1], left.shape, right.shape[-1]
    parts = window // reference.shared_coordinates(window, left, right)
    sizes = branches, parts, rows, rows
    a, b = left[0, :, 0].expand(sizes), right[0, :, 0].expand(branches, parts, columns, columns)
    inputs = x.view(len(x), parts, -1, columns)
    half = torch.einsum("npcr,wpdr->nwpcd", inputs, b).reshape(len(x), branches, parts, rows, -1)
    grad = grad.reshape(half.shape)
    to_left = torch.einsum("nwplc,nwpkc->wplk", grad, half)
    to_half = torch.einsum("wplk,nwplc->nwpkc", a, grad).reshape(len(x), branches, parts, -1, columns)
    to_right = torch.einsum("nwpcd,npcr->wpdr", to_half, inputs)
    to_x = torch.einsum("nwpcd,wpdr->npcr", to_half, b).reshape(x.shape)
    if blocks < parts:  # parts share their factors
        to_left, to_right = to_left.sum(1, keepdim=True), to_right.sum(1, keepdim=True)
    return reference.clifford.from_spin(to_x) if blade else to_x, to_left.view(left.shape), to_right.view(right.shape)


def _setup(ctx, inputs, output):
    save(ctx, inputs)


def _reference(x, left, right, slopes, mix, seed, step, blade, normalize, activation) -> Tensor:
    basis = "blade" if blade else "spinor"
    return reference.rotor_step(x, left, right, slopes, mix, seed, step, basis, normalize, activation)


@differentiable_as(_reference)
def _differentiate(ctx, grad):
    x, left, right, slopes, mix = ctx.saved_tensors[:5]
    to_branches, sums = _backward(grad.contiguous(), x, left, right, slopes, mix, *ctx.plain[5:])
    sandwiches = _sandwich_gradients(to_branches, x, left, right, ctx.plain[7])
    gradients = (*sandwiches, sums[:, 0].to(slopes.dtype), sums[:, 1].to(mix.dtype))
    need = list(ctx.needs_input_grad[:5])
    need[3] = need[3] and not callable(reference.ACTIVATIONS[ctx.plain[-1]])  # functions have no slopes
    return *(gradient if needed else None for gradient, needed in zip(gradients, need, strict=True)), *(None,) * 5


_forward.register_autograd(_differentiate, setup_context=_setup)


def rotor_step(x, left, right, slopes, mix, seed, step=0, basis="spinor", normalize=True, activation="prelu") -> Tensor:
    """Compute ``functional.rotor.rotor_step`` (same arguments and result)."""
    x, left, right, slopes, mix = (t.contiguous() for t in autocasted(x, left, right, slopes.expand(len(mix)), mix))
    return _forward(x, left, right, slopes, mix, seed, step, basis == "blade", normalize, activation)
