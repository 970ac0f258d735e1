"""The angles by which every layer's rotors rotate their planes (rotor paper, Section 3.2)."""

# Legend: W terms, o output windows, i input windows, P bivector coordinates, n vectors of the algebra

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from relinear.analysis.analyses import Subject, layer_row, short_name
from relinear.clifford import bivector_to_matrix
from relinear.pages.blocks import Block, Cell, Chart, Table
from relinear.pages.figures import Axis, Panel, Series

#: how to read its figures, for the page
HOW_TO_READ = (
    "A rotor rotates vectors in at most n / 2 planes, each by its own angle; planes and angles describe it completely. "
    "With all angles near 0 the rotor is still the identity; with a single large one it rotates in one plane."
)

SIDES = ("left", "right")


@torch.no_grad()
def plane_angles(beta: Tensor) -> Tensor:
    """Return the angles in degrees (..., n // 2), largest first, by which exp(beta) turns vectors, beta (..., P).

    The invariant planes are those of the antisymmetric matrix of beta; its singular values come in pairs, and a vector
    in a plane of value b is turned by 2 b.
    """
    values = torch.linalg.svdvals(bivector_to_matrix(beta.double()))
    return torch.rad2deg(2 * values[..., : 2 * (values.shape[-1] // 2) : 2])


def _with_rotors(model: nn.Module) -> dict[str, Any]:
    named = model.named_modules()
    return {name: m for name, m in named if callable(getattr(m, "bivectors", None)) and m.bivectors()}


def applies(model: nn.Module) -> bool:
    """Return whether the model has rotors."""
    return bool(_with_rotors(model))


def run(subject: Subject) -> dict[str, Any]:
    """Return the angles of the model's rotors; this reads no text.

    Returns:
        {name of the rotors: {"left" | "right": for every term and pair of windows its angles, largest first}}.
    """
    return {
        name: {side: plane_angles(beta).flatten(0, -2).tolist() for side, beta in module.bivectors().items()}
        for name, module in _with_rotors(subject.model).items()
    }


def blocks(numbers: Mapping[str, Any]) -> list[Block]:
    """Return the page's blocks for ``numbers``: a row per module and side, and every angle."""
    rows, series = [], []
    for name, sides in numbers.items():
        for side, rotors in sides.items():
            angles = [angle for rotor in rotors for angle in rotor]
            largest, mean = max(angles, default=0.0), math.fsum(angles) / max(len(angles), 1)
            degrees = [Cell(f"{angle:.1f}°", angle) for angle in (largest, mean)]
            rows.append(layer_row(name, side, Cell.of(len(rotors), "d"), *degrees))
    for number, side in enumerate(SIDES):
        pairs = [(angle, name) for name in numbers for rotor in numbers[name].get(side, []) for angle in rotor]
        x, y = [angle for angle, _ in pairs], [short_name(name) for _, name in pairs]
        texts = [f"{name}, {side}: {angle:.2f}°" for angle, name in pairs]
        series.append(Series(name=side, number=number, x=x, y=y, texts=texts, mode="points", opacity=0.6))
    panel = Panel(series, Axis(title="angle of a plane (degrees)", from_zero=True), Axis(rows=True))
    text = "Every angle of every rotor, a row per module: what lies at 0 turns nothing."
    chart = Chart(text, panel, height=160 + 22 * len(numbers), stem="planes")
    return [chart, Table(["rotors", "side", "count", "largest angle", "mean angle"], rows, (0, 1))]
