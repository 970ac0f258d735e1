"""The table of Triton kernels: what each must equal, and the shapes it is held to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import relinear
from relinear.functional import cgt as reference_cgt
from relinear.functional import hdpl as reference_hdpl
from relinear.functional import rotor as reference_rotor
from relinear.functional import transponder as reference_transponder
from relinear.kernels.triton import cgt, hdpl, rotor, transponder
from relinear.kernels.triton.samples import (
    cgt_arguments,
    draw,
    hdpl_arguments,
    rotor_arguments,
    rotor_step_arguments,
    transponder_arguments,
)

__all__ = ["CASES", "LAYERS", "Case", "draw"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel.

    Args:
        name: kind of its operator.
        reference, fast: functions of the same signature.
        small: argument lists for the interpreter: a tuple is a shape of normal numbers (the last, the fan-in, scales
            a matrix), anything else is passed on.
        large: argument lists for the compiler, with as many tokens as give the largest tiles.
        half: relative error that is allowed in float16, of results and gradients.
        training: whether the kernel has a backward pass.
    """

    name: str
    reference: Callable
    fast: Callable
    small: tuple[tuple, ...]
    large: tuple[tuple, ...]
    half: float = 2e-3
    training: bool = True


CASES = [
    Case(
        name="transponder",
        reference=reference_transponder.modulated_linear,
        fast=transponder.modulated_linear,
        small=(
            transponder_arguments(1, 8, 3, 2),
            transponder_arguments((2, 35), 100, 130, 8),
            transponder_arguments(33, 40, 20, 20, bias=False, scalar=False),
            transponder_arguments(5, 16, 16, 4, channel=False),
        ),
        large=(transponder_arguments(4096, 128, 256, 8),),
    ),
    Case(
        name="hdpl",
        reference=reference_hdpl.hdpl,
        fast=hdpl.hdpl,
        small=(
            hdpl_arguments(1, 8, 12, 4, 3),
            hdpl_arguments((2, 35), 74, 274, 2, 70),
            hdpl_arguments(5, 33, 39, 3, 9, bias=False),
            hdpl_arguments((3, 6), 20, 10, 2, 5, noise=False),
            hdpl_arguments((3, 6), 20, 10, 2, 5, noise=False, logvar=False),
        ),
        large=(hdpl_arguments(4096, 128, 256, 2, 64),),
    ),
    Case(
        name="cgt",
        reference=reference_cgt.modulate,
        fast=cgt.modulate,
        small=(
            cgt_arguments((1,), (1,), 5, 3, 2),
            cgt_arguments((2, 35), (2, 1), 70, 16, 4),
            cgt_arguments((3, 6), (3, 6), 24, 5, 7),
        ),
        large=(cgt_arguments((4096,), (4096,), 128, 16, 8),),
        training=False,
    ),
    Case(
        name="rotor",
        reference=reference_rotor.sandwich_windows,
        fast=rotor.sandwich_windows,
        # n modulo 8 settles blocks and components of the spin representation: a row for each
        small=(
            rotor_arguments(1, 3, 4, 4),
            rotor_arguments(131, 1, 1, 1, blocks=2),
            rotor_arguments(65, 2, 2, 2, terms=2, basis="spinor"),
            rotor_arguments(17, 4, 8, 8, outputs=3),
            rotor_arguments(35, 5, 4, 8, inputs=2),
            rotor_arguments(70, 6, 8, 8, inputs=2, outputs=2, basis="spinor"),
            rotor_arguments(35, 7, 8, 8, terms=2, outputs=2, inputs=3),
            rotor_arguments(9, 8, 16, 16),
            rotor_arguments(11, 9, 16, 16, blocks=2, terms=2, inputs=2),
            rotor_arguments(3, 9, 16, 32, basis="spinor"),
            rotor_arguments(5, 10, 32, 32),
            rotor_arguments(3, 11, 64, 64, terms=2),
            rotor_arguments(2, 12, 128, 128),
        ),
        large=(
            rotor_arguments(4096, 11, 64, 64, terms=2, outputs=2, inputs=2),
            rotor_arguments(4096, 9, 16, 16, blocks=2),
            rotor_arguments(4096, 12, 64, 64, basis="spinor"),
        ),
        training=False,
    ),
    Case(
        name="rotor_step",
        reference=reference_rotor.rotor_step,
        fast=rotor.rotor_step,
        half=1e-2,  # a number near a kink that is rounded across it has another slope
        small=(
            rotor_step_arguments(1, 3, 4, 4, 2),
            rotor_step_arguments(17, 4, 8, 8, 3, basis="spinor"),
            rotor_step_arguments(35, 5, 8, 8, 2, activation="gelu"),
            rotor_step_arguments(70, 6, 8, 8, 3, seed=None, normalize=False),
            rotor_step_arguments(35, 7, 8, 8, 2, activation="silu"),
            rotor_step_arguments(9, 8, 16, 16, 1, seed=None, basis="spinor", activation="elu"),
            rotor_step_arguments(11, 9, 16, 16, 2, blocks=2),
            rotor_step_arguments(3, 11, 64, 64, 2),
        ),
        large=(
            rotor_step_arguments(4096, 11, 64, 64, 3),
            rotor_step_arguments(4096, 9, 16, 16, 3, basis="spinor", activation="gelu"),
            rotor_step_arguments(4096, 12, 64, 64, 2, basis="spinor"),
        ),
    ),
]

#: a layer, the module of its Triton kernel and its function, and whether it is taken in training
LAYERS = {
    "transponder": (relinear.Transponder(), transponder, "modulated_linear", True),
    "hdpl": (relinear.HDPL(rank=6, blocks=4), hdpl, "hdpl", True),
    "rotor": (relinear.Rotor(depth=0, width=2, basis="blade"), rotor, "sandwich_windows", False),
}
