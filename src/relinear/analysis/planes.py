"""``planes``: by which angles the rotors of every layer turn their planes (rotor paper, Section 3.2)."""

# Legend: W terms, o output windows, i input windows, P bivector coordinates, n vectors of the algebra

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from relinear.analysis.analyses import Result, Subject
from relinear.analysis.plots import PALETTE, new_figure, short_name
from relinear.clifford import bivector_to_matrix
from relinear.pages.blocks import Block, Cell, Chart, Row, Table, axes, points

__all__ = ["HOW_TO_READ", "applies", "blocks", "plane_angles", "planes", "plot_planes", "run"]

#: how to read its figures, for the page
HOW_TO_READ = (
    "A rotor turns vectors in at most n / 2 planes, each by an angle of its own, which is all there is to it up "
    "to the choice of "
    "the planes. Angles near 0 are rotors that are still the identity; a single large one is a turn in one plane."
)

SIDES = ("left", "right")


@torch.no_grad()
def plane_angles(beta: Tensor) -> Tensor:
    """The angles in degrees (..., n // 2), largest first, by which exp(beta) turns vectors, beta (..., P).

    The invariant planes are those of the antisymmetric matrix of beta; its singular values come in pairs, and a vector
    in a plane of value b is turned by 2 b.
    """
    values = torch.linalg.svdvals(bivector_to_matrix(beta.double()))
    return torch.rad2deg(2 * values[..., : 2 * (values.shape[-1] // 2) : 2])


def planes(model: nn.Module) -> dict[str, dict[str, list[list[float]]]]:
    """Angles of every rotor of ``model``.

    Returns:
        {name of the rotors: {"left" | "right": for every term and pair of windows its angles, largest first}}.
    """
    found = {}
    for name, module in _with_rotors(model).items():
        found[name] = {side: plane_angles(beta).flatten(0, -2).tolist() for side, beta in module.bivectors().items()}
    return found


def _with_rotors(model: nn.Module) -> dict[str, Any]:
    named = model.named_modules()
    return {
        name: module for name, module in named if callable(getattr(module, "bivectors", None)) and module.bivectors()
    }


def applies(model: nn.Module) -> bool:
    """Whether the model has rotors."""
    return bool(_with_rotors(model))


def run(subject: Subject) -> Result:
    """Angles of the model's rotors; its text is not read."""
    found = planes(subject.model)
    if not found:
        raise ValueError("no layer of this model has rotors; this analysis is for relinear.Rotor")
    largest = [rotor[0] for row in found.values() for rotors in row.values() for rotor in rotors]
    text = (
        f"{len(largest)} rotors in {len(found)} modules: the largest angle of a rotor is "
        f"{sum(largest) / len(largest):.1f} degrees "
        f"on average, {max(largest):.1f} at most"
    )
    return Result(found, {"planes": plot_planes(found)}, text)


def plot_planes(found: Mapping[str, Mapping[str, list[list[float]]]]) -> Any:
    """All angles of every module, rotors from the left and from the right, a row a module."""
    figure, (axis,) = new_figure(8.0, 1.6 + 0.28 * len(found))
    for place, row in enumerate(found.values()):
        for number, side in enumerate(row):
            angles = [angle for rotor in row[side] for angle in rotor]
            height = [place + 0.16 * (2 * number - 1)] * len(angles)
            axis.scatter(angles, height, s=9, color=PALETTE[number], alpha=0.6, label=side if place == 0 else None)
    axis.set_yticks(range(len(found)), [short_name(name) for name in found], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("angle of a plane (degrees)")
    axis.legend(loc="lower right", fontsize=8.5)
    return figure


def blocks(numbers: Mapping[str, Any], image_of: Callable[[str], str | None]) -> list[Block]:
    """What a page shows of ``numbers``: a row a module and side, and every angle."""
    rows = []
    data: dict[str, list[tuple[float, str, str]]] = {side: [] for side in SIDES}
    for name, sides in numbers.items():
        for side, rotors in sides.items():
            angles = [angle for rotor in rotors for angle in rotor]
            largest, mean = max(angles, default=0.0), math.fsum(angles) / max(len(angles), 1)
            cells = [Cell(str(len(rotors)), len(rotors)), Cell(f"{largest:.1f}°", largest), Cell(f"{mean:.1f}°", mean)]
            rows.append(Row([Cell(short_name(name), title=name), side, *cells]))
            data[side] += [(angle, name, f"{name}, {side}: {angle:.2f}°") for angle in angles]
    traces = []
    for number, (side, found) in enumerate(data.items()):
        angles, texts = [angle for angle, *_ in found], [text for *_, text in found]
        names = [short_name(name) for _, name, _ in found]
        traces.append(points(side, PALETTE[number], number, angles, names, texts, opacity=0.6))
    layout = axes("angle of a plane (degrees)", "", xaxis={"rangemode": "tozero"})
    layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
    text = "Every angle of every rotor, a row a module: what lies at 0 turns nothing."
    chart = Chart(text, {"data": traces, "layout": layout}, image_of("planes"), 160 + 22 * len(numbers))
    return [chart, Table(["rotors", "side", "count", "largest angle", "mean angle"], rows, (0, 1))]
