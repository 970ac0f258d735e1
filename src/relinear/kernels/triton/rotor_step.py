"""A hidden step of a network of rotors in one kernel: all branches of a tile, from x to their mixture (untuned).

A tile is some tokens' numbers of the window. Each branch's sandwich, change of basis, LayerNorm, permutation,
activation and share of the mixture stay on chip. The backward pass computes the branches again and writes the gradients
of their sandwiches, from which those of x and of the factors come as for ``triton.rotor``.
"""

# Legend: as in triton.rotor; W branches

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from relinear.functional import rotor as reference
from relinear.kernels.autograd import differentiable_as, lowered, save
from relinear.kernels.triton import rotor, tiles

__all__ = ["rotor_step"]

EPSILON = tl.constexpr(1e-5)  # that of torch's layer norm


@triton.jit
def _activated(h, slope, CURVE: tl.constexpr):
    """(activation, its derivative)."""
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
def _sandwich(
    given,
    left,
    right,
    branch,
    S: tl.constexpr,
    M: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    L_PAD: tl.constexpr,
    R_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A X B^T of a branch, in spin coordinates."""
    total = tl.zeros((given.numel // L_PAD, L_PAD), tl.float32)
    for block in tl.static_range(S):
        pair = branch * S + block
        part = rotor._of_block(given, block, S, M)
        a = rotor._factor(left + pair * L * L, L, L_PAD, False)
        b = rotor._factor(right + pair * R * R, R, R_PAD, False)
        half = rotor._turned(rotor._times(part, b, R_PAD, PRECISION), L, M // L)
        half = tl.reshape(half.to(part.dtype), (given.numel // L_PAD, L_PAD))
        total = tl.dot(half, a, total, input_precision=PRECISION)
    return rotor._turned(tl.reshape(total, (given.numel,)), M // L, L)


@triton.jit
def _branch(
    given,
    left,
    right,
    orders,
    places,
    signs,
    walsh,
    branch,
    NORMALIZE: tl.constexpr,
    PERMUTE: tl.constexpr,
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
    """What a branch activates, (T V,), with the coordinate of its sandwich that each is and the scale of the norm."""
    at = tl.arange(0, T * V)
    coordinate = at % V
    z = _sandwich(given, left, right, branch, S, M, L, R, L_PAD, R_PAD, PRECISION)
    if BLADE:
        z = rotor._strings(z, signs, walsh, T, V, BLOCKS, K, F, K_PAD)
    scale = tl.full((T,), 1.0, tl.float32)
    if NORMALIZE:  # which knows no order
        rows = tl.reshape(z, (T, V))
        rows = rows - (tl.sum(rows, 1) / V)[:, None]
        scale = 1.0 / tl.sqrt(tl.sum(rows * rows, 1) / V + EPSILON)
        z = tl.reshape(rows * scale[:, None], (T * V,))
    taken = coordinate
    if PERMUTE:
        taken = tl.load(orders + branch * V + coordinate) - branch * V
    source = taken
    if BLADE:
        source = tl.load(places + taken)
    if PERMUTE or BLADE:
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
    """y of T tokens."""
    first = tl.program_id(0).to(tl.int64) * T
    given = rotor._read(x, first, 0, 1, tokens, order, signs, walsh, BLADE, T, V, BLOCKS, K, F, K_PAD)
    total = tl.zeros((T * V,), tl.float32)
    for branch in range(0, branches):
        h, _, _ = _branch(
            given, left, right, orders, places, signs, walsh, branch, NORMALIZE, PERMUTE, BLADE, T, V, BLOCKS, K, F,
            K_PAD, S, M, L, R, L_PAD, R_PAD, PRECISION,
        )  # fmt: skip
        value, _ = _activated(h, tl.load(slopes + branch).to(tl.float32), CURVE)
        total += value * tl.load(mix + branch).to(tl.float32)
    at = tl.arange(0, T * V)
    tl.store(y + first * V + at, total.to(y.dtype.element_ty), mask=first + at // V < tokens)


@triton.jit
def _gradient_kernel(
    grad,
    x,
    left,
    right,
    slopes,
    mix,
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
    """The gradient of the sandwiches (N, W, V) of T tokens, and what they add to those of slopes and mixture."""
    first = tl.program_id(0).to(tl.int64) * T
    at = tl.arange(0, T * V)
    token = first + at // V
    given = rotor._read(x, first, 0, 1, tokens, order, signs, walsh, BLADE, T, V, BLOCKS, K, F, K_PAD)
    upstream = tl.load(grad + first * V + at, mask=token < tokens, other=0.0).to(tl.float32)
    for branch in range(0, branches):
        h, taken, scale = _branch(
            given, left, right, orders, places, signs, walsh, branch, NORMALIZE, PERMUTE, BLADE, T, V, BLOCKS, K, F,
            K_PAD, S, M, L, R, L_PAD, R_PAD, PRECISION,
        )  # fmt: skip
        share = tl.load(mix + branch).to(tl.float32)
        value, derivative = _activated(h, tl.load(slopes + branch).to(tl.float32), CURVE)
        of_sums = sums + (tl.program_id(0) * branches + branch) * 2
        tl.store(of_sums, share * tl.sum(upstream * tl.minimum(h, 0.0), 0))
        tl.store(of_sums + 1, tl.sum(upstream * value, 0))
        slope = tl.reshape(upstream * derivative * share, (T, V))
        if NORMALIZE:
            rows = tl.reshape(h, (T, V))
            mean, along = tl.sum(slope, 1) / V, tl.sum(slope * rows, 1) / V
            slope = (slope - mean[:, None] - rows * along[:, None]) * scale[:, None]
        target = to_branches + (token * branches + branch) * V + taken
        tl.store(target, tl.reshape(slope, (T * V,)).to(to_branches.dtype.element_ty), mask=token < tokens)


def _meta(x: Tensor, left: Tensor, right: Tensor, blade: bool) -> tuple[tuple, dict[str, Any]]:
    """As of ``triton.rotor``, but for factors of 64 numbers in half precision, which take one token at a time: tiles of
    two gave numbers that are none on an H100 (Triton 3.6)."""
    given = x[:1] if left.shape[-1] == right.shape[-1] == 64 and x.element_size() == 2 else x
    return rotor._meta(given.unsqueeze(1), left, right, blade)


def _launch(
    kernel, x: Tensor, left: Tensor, right: Tensor, given: tuple, order: Tensor | None, settings: tuple
) -> None:
    """``kernel`` over tiles of tokens; ``given`` are its pointers up to the tables."""
    blade, normalize, activation = settings
    tables, meta = _meta(x, left, right, blade)
    places = reference.string_places(x) if blade else None
    curve = activation if callable(reference.ACTIVATIONS[activation]) else "prelu"
    flags = {"CURVE": curve, "NORMALIZE": normalize, "PERMUTE": order is not None}
    kernel[(tiles.cdiv(x.shape[0], meta["T"]),)](
        *given, order, places, *tables, x.shape[0], left.shape[1], **flags, **meta
    )


def _order(x: Tensor, left: Tensor, seed: int | None, step: int) -> Tensor | None:
    return None if seed is None else reference.step_order(x, left.shape[1], seed, step)


@torch.library.custom_op("relinear::rotor_step", mutates_args=())
def _forward(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    slopes: Tensor,
    mix: Tensor,
    seed: int | None,
    step: int,
    blade: bool,
    normalize: bool,
    activation: str,
) -> Tensor:
    """y (N, V) of x (N, V)."""
    y = tiles.empty(x, *x.shape)
    given, settings = (x, left, right, slopes, mix, y), (blade, normalize, activation)
    _launch(_step_kernel, x, left, right, given, _order(x, left, seed, step), settings)
    return y


@_forward.register_fake
def _(x, left, right, slopes, mix, seed, step, blade, normalize, activation):
    return torch.empty_like(x)


@torch.library.custom_op("relinear::rotor_step_backward", mutates_args=())
def _backward(
    grad: Tensor,
    x: Tensor,
    left: Tensor,
    right: Tensor,
    slopes: Tensor,
    mix: Tensor,
    seed: int | None,
    step: int,
    blade: bool,
    normalize: bool,
    activation: str,
    need: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, left and right, empty where there is no ``need`` of one; and those of slopes and mix, (W, 2)."""
    branches, order = left.shape[1], _order(x, left, seed, step)
    to_branches = tiles.empty(x, x.shape[0], branches, x.shape[1])
    _, meta = _meta(x, left, right, blade)
    sums = tiles.empty(x, tiles.cdiv(x.shape[0], meta["T"]), branches, 2, dtype=torch.float32)
    given, settings = (grad, x, left, right, slopes, mix, to_branches, sums), (blade, normalize, activation)
    _launch(_gradient_kernel, x, left, right, given, order, settings)
    to_x, to_left, to_right = rotor._backward(to_branches, x.unsqueeze(1), left, right, blade, need)
    return to_x.squeeze(1) if need[0] else to_x, to_left, to_right, sums.sum(0)


@_backward.register_fake
def _(grad, x, left, right, slopes, mix, seed, step, blade, normalize, activation, need):
    sizes = zip((x, left, right), need, strict=True)
    gradients = (t.new_empty(t.shape if wanted else 0) for t, wanted in sizes)
    return *gradients, x.new_empty(left.shape[1], 2, dtype=torch.float32)


def _setup(ctx, inputs, output):
    save(ctx, inputs)


def _reference(x, left, right, slopes, mix, seed, step, blade, normalize, activation) -> Tensor:
    basis = "blade" if blade else "spinor"
    return reference.rotor_step(x, left, right, slopes, mix, seed, step, basis, normalize, activation)


@differentiable_as(_reference)
def _differentiate(ctx, grad):
    need, (slopes, mix) = list(ctx.needs_input_grad[:5]), ctx.saved_tensors[3:5]
    need[3] = need[3] and not callable(reference.ACTIVATIONS[ctx.plain[-1]])  # which read no slopes
    *given, sums = _backward(grad.contiguous(), *ctx.saved_tensors[:5], *ctx.plain[5:], need[:3])
    given += [sums[:, 0].to(slopes.dtype), sums[:, 1].to(mix.dtype)]
    return *(gradient if wanted else None for gradient, wanted in zip(given, need, strict=True)), *(None,) * 5


_forward.register_autograd(_differentiate, setup_context=_setup)


def rotor_step(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    slopes: Tensor,
    mix: Tensor,
    seed: int | None,
    step: int = 0,
    basis: str = "spinor",
    normalize: bool = True,
    activation: str = "prelu",
) -> Tensor:
    """``functional.rotor.rotor_step`` (same arguments and result)."""
    x, left, right, slopes, mix = (t.contiguous() for t in lowered(x, left, right, slopes.expand(len(mix)), mix))
    return _forward(x, left, right, slopes, mix, seed, step, basis == "blade", normalize, activation)
