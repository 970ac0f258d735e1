"""The table of Triton kernels: what each must equal, and the shapes it is held to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

import relinear
from relinear import kernels
from relinear.functional import ccl as reference_ccl
from relinear.functional import cgt as reference_cgt
from relinear.functional import hdpl as reference_hdpl
from relinear.functional import rotor as reference_rotor
from relinear.functional import transponder as reference_transponder
from relinear.kernels.triton import ccl, cgt, hdpl, rotor, transponder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel.

    Args:
        name: kind of its operator.
        reference, fast: functions of the same signature.
        small: argument lists for the interpreter: a tuple is a shape of normal numbers (the last, the fan-in, scales
            a matrix), anything else is passed on.
        large: argument lists for the compiler, with as many tokens as give the largest tiles.
    """

    name: str
    reference: Callable
    fast: Callable
    small: tuple[tuple, ...]
    large: tuple[tuple, ...]


def draw(shapes: tuple, dtype: torch.dtype) -> list:
    """The arguments of a row."""
    generator = torch.Generator().manual_seed(0)

    def tensor(shape: tuple[int, ...]) -> Tensor:
        fan_in = 1 if len(shape) < 2 else shape[-1]
        return (torch.randn(shape, generator=generator) / fan_in**0.5).to(dtype)

    return [tensor(shape) if isinstance(shape, tuple) else shape for shape in shapes]


def _modulated(tokens, i, o, rank, bias=True, channel=True, scalar=True) -> tuple:
    leading = tokens if isinstance(tokens, tuple) else (tokens,)
    gates = ((o, rank) if channel else None, (1, rank) if scalar else None, (1,), (1,))
    return ((*leading, i), (o, i), (o,) if bias else None, (rank, i), *gates)


def _hdpl(tokens, i, o, blocks, rank, bias=True, noise=True, logvar=True) -> tuple:
    leading = tokens if isinstance(tokens, tuple) else (tokens,)
    encoders = ((rank, i), (rank,), *(((rank, i), (rank,)) if logvar else (None, None)))
    last = ((o, rank), (o,) if bias else None, (*leading, rank) if noise else None)
    return ((*leading, i), (blocks, o // blocks, i // blocks), *encoders, *last)


def _ccl(tokens, i, o, rank, width, norm=True, inner=True, outer=True, bias=True, gate_bias=True) -> tuple:
    leading = tokens if isinstance(tokens, tuple) else (tokens,)
    normed = ((rank,), (rank,)) if norm else (None, None)
    basis_gate = ((rank, width), (rank,)) if inner else (None, None)
    output_gate = ((o, width), (o,)) if outer else (None, None)
    first = ((*leading, i), (*leading, width) if inner or outer else None, (rank, i), (o, rank), (o,) if bias else None)
    return (*first, *normed, *basis_gate, *output_gate, gate_bias)


def _cgt(tokens, shares, width, templates, rank) -> tuple:
    side = (templates, rank, width)
    return ((*tokens, width), (*shares, templates), side, side, (templates, rank))


def _rotor(tokens, n, left, right, blocks=1, terms=1, outputs=1, inputs=1, basis="blade") -> tuple:
    pairs = (terms, outputs, inputs, blocks)
    return ((tokens, inputs, 2**n), (*pairs, left, left), (*pairs, right, right), basis)


CASES = [
    Case(
        name="transponder",
        reference=reference_transponder.modulated_linear,
        fast=transponder.modulated_linear,
        small=(
            _modulated(1, 8, 3, 2),
            _modulated((2, 35), 100, 130, 8),
            _modulated(33, 40, 20, 20, bias=False, scalar=False),
            _modulated(5, 16, 16, 4, channel=False),
        ),
        large=(_modulated(4096, 128, 256, 8),),
    ),
    Case(
        name="hdpl",
        reference=reference_hdpl.hdpl,
        fast=hdpl.hdpl,
        small=(
            _hdpl(1, 8, 12, 4, 3),
            _hdpl((2, 35), 74, 274, 2, 70),
            _hdpl(5, 33, 39, 3, 9, bias=False),
            _hdpl((3, 6), 20, 10, 2, 5, noise=False),
            _hdpl((3, 6), 20, 10, 2, 5, noise=False, logvar=False),
        ),
        large=(_hdpl(4096, 128, 256, 2, 64),),
    ),
    Case(
        name="ccl",
        reference=reference_ccl.ccl,
        fast=ccl.ccl,
        small=(
            _ccl(1, 8, 3, 5, 4),
            _ccl((2, 35), 70, 130, 40, 33, norm=False, gate_bias=False),
            _ccl(5, 16, 9, 6, 3, bias=False, inner=False, gate_bias=False),
            _ccl((3, 6), 10, 12, 20, 7, outer=False),
            _ccl(7, 10, 12, 4, 7, inner=False, outer=False, norm=False),
        ),
        large=(_ccl(4096, 128, 256, 128, 64, norm=False),),
    ),
    Case(
        name="cgt",
        reference=reference_cgt.modulate,
        fast=cgt.modulate,
        small=(
            _cgt((1,), (1,), 5, 3, 2),
            _cgt((2, 35), (2, 1), 70, 16, 4),
            _cgt((3, 6), (3, 6), 24, 5, 7),
        ),
        large=(_cgt((4096,), (4096,), 128, 16, 8),),
    ),
    Case(
        name="rotor",
        reference=reference_rotor.sandwich_windows,
        fast=rotor.sandwich_windows,
        # n modulo 8 settles blocks and components of the spin representation: a row for each
        small=(
            _rotor(1, 3, 4, 4),
            _rotor(131, 1, 1, 1, blocks=2),
            _rotor(65, 2, 2, 2, terms=2, basis="spinor"),
            _rotor(17, 4, 8, 8, outputs=3),
            _rotor(35, 5, 4, 8, inputs=2),
            _rotor(70, 6, 8, 8, inputs=2, outputs=2, basis="spinor"),
            _rotor(35, 7, 8, 8, terms=2, outputs=2, inputs=3),
            _rotor(9, 8, 16, 16),
            _rotor(11, 9, 16, 16, blocks=2, terms=2, inputs=2),
            _rotor(3, 9, 16, 32, basis="spinor"),
            _rotor(5, 10, 32, 32),
            _rotor(3, 11, 64, 64, terms=2),
            _rotor(2, 12, 128, 128),
        ),
        large=(
            _rotor(4096, 11, 64, 64, terms=2, outputs=2, inputs=2),
            _rotor(4096, 9, 16, 16, blocks=2),
            _rotor(4096, 12, 64, 64, basis="spinor"),
        ),
    ),
]

#: a layer, the module of its Triton kernel, the module that chooses, and the function of both
LAYERS = {
    "transponder": (relinear.Transponder(), transponder, kernels.transponder, "modulated_linear"),
    "ccl": (relinear.CCL(rank=6, context_dim=5), ccl, kernels.ccl, "ccl"),
    "hdpl": (relinear.HDPL(rank=6, blocks=4), hdpl, kernels.hdpl, "hdpl"),
    "rotor": (relinear.Rotor(depth=0, width=2, basis="blade"), rotor, kernels.rotor, "sandwich_windows"),
}
