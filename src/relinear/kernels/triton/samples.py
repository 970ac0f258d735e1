"""Small inputs and the reference of every Triton kernel, for the check at its first use on a GPU and for tests."""

# Legend: a tuple is the shape of a tensor of normal numbers (of variance 1 / fan-in for a matrix; its last size is the
# fan-in), anything else is passed on; tokens are a number or the leading sizes before the features

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from relinear.functional import cgt as reference_cgt
from relinear.functional import hdpl as reference_hdpl
from relinear.functional import rotor as reference_rotor
from relinear.functional import transponder as reference_transponder
from relinear.kernels.triton import cgt, hdpl, rotor, transponder


@dataclasses.dataclass(frozen=True)
class Sample:
    """A kernel, its reference and the arguments that it is checked with.

    Attributes:
        module: the module that has the kernel.
        function: its name there.
        reference: a function of torch operations with the kernel's signature.
        argument_lists: with every size of tile (``tiles.rows``), and with and without optional arguments.
        training: whether the kernel has a backward pass.
    """

    module: Any
    function: str
    reference: Callable
    argument_lists: tuple[tuple, ...]
    training: bool = True

    def fast(self, *arguments: Any) -> Any:
        """Call the kernel, looked up in its module, where tests may replace it."""
        return getattr(self.module, self.function)(*arguments)


def transponder_arguments(tokens, i, o, rank, bias=True, channel=True, scalar=True) -> tuple:
    """Return the shapes and options for ``modulated_linear``."""
    leading = tokens if isinstance(tokens, tuple) else (tokens,)
    gates = ((o, rank) if channel else None, (1, rank) if scalar else None, (1,), (1,))
    return ((*leading, i), (o, i), (o,) if bias else None, (rank, i), *gates)


def hdpl_arguments(tokens, i, o, blocks, rank, bias=True, noise=True, logvar=True) -> tuple:
    """Return the shapes and options for ``hdpl``."""
    leading = tokens if isinstance(tokens, tuple) else (tokens,)
    encoders = ((rank, i), (rank,), *(((rank, i), (rank,)) if logvar else (None, None)))
    last = ((o, rank), (o,) if bias else None, (*leading, rank) if noise else None)
    return ((*leading, i), (blocks, o // blocks, i // blocks), *encoders, *last)


def cgt_arguments(tokens, shares, width, templates, rank) -> tuple:
    """Return the shapes and options for ``modulate``."""
    side = (templates, rank, width)
    return ((*tokens, width), (*shares, templates), side, side, (templates, rank))


def rotor_arguments(tokens, n, left, right, blocks=1, terms=1, outputs=1, inputs=1, basis="blade") -> tuple:
    """Return the shapes and options for ``sandwich_windows``."""
    pairs = (terms, outputs, inputs, blocks)
    return ((tokens, inputs, 2**n), (*pairs, left, left), (*pairs, right, right), basis)


def rotor_step_arguments(
    tokens, n, left, right, width, blocks=1, seed=3, basis="blade", normalize=True, activation="prelu"
) -> tuple:
    """Return the shapes and options for ``rotor_step``."""
    pairs = (1, width, 1, blocks)
    factors = (*pairs, left, left), (*pairs, right, right)
    return ((tokens, 2**n), *factors, (width,), (width,), seed, 1, basis, normalize, activation)


#: kind of kernel -> what it is checked with
SAMPLES = {
    "transponder": Sample(
        transponder,
        "modulated_linear",
        reference_transponder.modulated_linear,
        (
            transponder_arguments(5, 40, 130, 8),
            transponder_arguments(70, 40, 20, 20, bias=False, scalar=False),
            transponder_arguments(2050, 40, 20, 4, channel=False),
        ),
    ),
    "hdpl": Sample(
        hdpl,
        "hdpl",
        reference_hdpl.hdpl,
        (
            hdpl_arguments(5, 74, 274, 2, 70),
            hdpl_arguments((2, 35), 33, 39, 3, 9, bias=False, noise=False),
            hdpl_arguments(2050, 40, 20, 2, 9),
        ),
    ),
    "cgt": Sample(
        cgt,
        "modulate",
        reference_cgt.modulate,
        (cgt_arguments((5,), (1,), 24, 5, 7), cgt_arguments((2, 35), (2, 1), 70, 16, 4)),
        training=False,
    ),
    "rotor": Sample(
        rotor,
        "sandwich_windows",
        reference_rotor.sandwich_windows,
        (
            rotor_arguments(5, 3, 4, 4),
            rotor_arguments(70, 6, 8, 8, inputs=2, outputs=2, basis="spinor"),
            rotor_arguments(35, 9, 16, 16, blocks=2, terms=2),
            rotor_arguments(5, 11, 64, 64),
        ),
        training=False,
    ),
    "rotor_step": Sample(
        rotor,
        "rotor_step",
        reference_rotor.rotor_step,
        (
            # of so many numbers, only a few cross the kink of a PReLU by rounding
            rotor_step_arguments(300, 4, 8, 8, 3),
            rotor_step_arguments(70, 6, 8, 8, 2, seed=None, basis="spinor", activation="gelu"),
            rotor_step_arguments(35, 9, 16, 16, 3, blocks=2, normalize=False, activation="silu"),
        ),
    ),
    # smooth activations: by rounding, some numbers would cross the kink of a PReLU, which changes their gradients
    "rotor_step_2048": Sample(
        rotor,
        "rotor_step",
        reference_rotor.rotor_step,
        (
            rotor_step_arguments(5, 11, 64, 64, 3, basis="spinor", activation="elu"),
            rotor_step_arguments(40, 11, 64, 64, 3, activation="gelu"),
        ),
    ),
    "rotor_step_4096": Sample(
        rotor,
        "rotor_step",
        reference_rotor.rotor_step,
        (
            rotor_step_arguments(5, 12, 128, 128, 3, basis="spinor", activation="elu"),
            rotor_step_arguments(5, 13, 64, 128, 2, basis="spinor", activation="silu"),
        ),
    ),
}


def draw(
    shapes: tuple, dtype: torch.dtype, device: torch.device | str = "cpu", generator: torch.Generator | None = None
) -> list:
    """Draw the tensors of an argument list; the same at every call unless ``generator`` is passed."""
    generator = generator or torch.Generator().manual_seed(0)

    def tensor(shape: tuple[int, ...]) -> Tensor:
        fan_in = 1 if len(shape) < 2 else shape[-1]
        return (torch.randn(shape, generator=generator, device=generator.device) / fan_in**0.5).to(device, dtype)

    return [tensor(shape) if isinstance(shape, tuple) else shape for shape in shapes]


def _outcome(function: Callable, arguments: list, dtype: torch.dtype, training: bool) -> list[Tensor | None]:
    """Return the results and, in training, the gradients of a random combination of them."""
    arguments = [a.to(dtype).clone().requires_grad_(training) if isinstance(a, Tensor) else a for a in arguments]
    results = function(*arguments)
    results = [r for r in (results if isinstance(results, tuple) else (results,)) if r is not None]
    if not training:
        return results
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(r.shape, generator=generator, device="cpu").half().to(r.device, dtype) for r in results]
    leaves = [a for a in arguments if isinstance(a, Tensor)]
    return [*(r.detach() for r in results), *torch.autograd.grad(results, leaves, upstream, allow_unused=True)]


def _worst_slice(difference: Tensor, expected: Tensor) -> float:
    """Return the largest error of a row or column, relative to its norm or to the root mean square norm if larger."""
    if expected.ndim < 2:
        return 0.0
    worst = 0.0
    for dim in (0, 1):
        errors, norms = (one.flatten(0, -2).norm(dim=dim) for one in (difference, expected))
        average = norms.square().mean().sqrt()
        worst = max(worst, float((errors / norms.maximum(average).clamp_min(1e-3)).nan_to_num(float("inf")).max()))
    return worst


def largest_error(sample: Sample, shapes: tuple, dtype: torch.dtype, device: torch.device | str) -> float:
    """Return the largest relative error (Frobenius norm) of a kernel's results and gradients.

    The reference runs in double precision. The error is infinite if a result is NaN, or if only one of kernel and
    reference has it. A row or column counts with a tenth of its error: rounding errors differ between rows, but a row
    of the last tile that was never written is off by 1, which would be lost in the norm of the whole result.
    """
    arguments = draw(shapes, dtype, device)
    actual = _outcome(sample.fast, arguments, dtype, sample.training)
    expected = _outcome(sample.reference, arguments, torch.float64, sample.training)
    errors = [0.0]
    for ours, theirs in zip(actual, expected, strict=True):
        if ours is None or theirs is None:
            errors.append(0.0 if ours is theirs else float("inf"))
        else:
            difference = ours.double() - theirs
            error = float(difference.norm() / theirs.norm().clamp_min(1e-3))
            error = max(error, _worst_slice(difference, theirs) / 10)
            errors.append(error if error < float("inf") else float("inf"))
    return max(errors)
