"""What ``relinear check-coordinates`` shows: a table, a figure, a section of a page."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relinear.compare.coordinates import FLAT, KINDS, PARAMETRIZATIONS
from relinear.pages.blocks import (
    Block,
    Cell,
    Chart,
    Row,
    Section,
    Table,
    Text,
    about,
    picture_of,
    read_values,
    what_ran,
)
from relinear.pages.drawn import save_panels
from relinear.pages.figures import PALETTE, Axis, Panel, Series, blend

FILE = "coordinates.json"
_STEM = "coordinates"
#: colours of the first and the last step
_EARLY, _LATE = (0xC9, 0xD9, 0x4B), (0x44, 0x0A, 0x54)
_PAGE_COLOURS = dict(zip(PARAMETRIZATIONS, PALETTE[1::-1], strict=True))
_HOW_TO_READ = (
    "The root mean square of what each kind of module returns, over tokens and channels, at every width: flat lines "
    "mean that a learning rate serves all widths. The factor is the largest over the smallest after the last step. In "
    "the maximal update parametrisation the logits of a fresh model fall with the root of the width, by design."
)


def coordinates_text(found: Mapping[str, Any]) -> str:
    """Return a line for every kind of activation, and what follows for each parametrisation."""
    first, last = found["widths"][0], found["widths"][-1]
    lines = [f"{'':<18}{'standard':>12}{'mup':>12}   largest / smallest of widths {first} to {last}, last step"]
    for kind in KINDS:
        spreads = [found["parametrizations"][name][kind]["spread"] for name in PARAMETRIZATIONS]
        lines.append(f"{kind:<18}" + "".join(f"{_factor(spread):>12}" for spread in spreads))
    lines += [f"{name}: {_verdict(found, name)}" for name in PARAMETRIZATIONS]
    return "\n".join(lines)


def _verdict(found: Mapping[str, Any], name: str) -> str:
    grown = found["widths"][-1] / found["widths"][0]
    over = f"over {grown:g} times the width"
    if found["flat"][name]:
        return f"flat within a factor of {FLAT:g} {over}"
    kinds = found["parametrizations"][name]
    worst = max(KINDS, key=lambda kind: kinds[kind]["spread"] or math.inf)
    return f"not flat {over}: {worst} by a factor of {_factor(kinds[worst]['spread'])}"


def _factor(spread: float | None) -> str:
    return "beyond numbers" if spread is None else f"{spread:.2f}"


def write_plot(found: Mapping[str, Any], out: str | Path) -> None:
    """``coordinates.png`` and ``.svg`` in ``out``: a row a parametrisation, a panel a kind, a line a step."""
    save_panels([_steps(found, name, kind) for name in PARAMETRIZATIONS for kind in KINDS], Path(out) / _STEM)


def _steps(found: Mapping[str, Any], name: str, kind: str) -> Panel:
    values, shown = found["parametrizations"][name][kind], []
    for step in range(found["steps"] + 1):
        shade = blend(_EARLY, _LATE, step / found["steps"])
        heights = [math.nan if scale[step] is None else scale[step] for scale in values["scale"]]
        shown.append(Series(name=f"step {step}", colour=shade, x=found["widths"], y=heights, size=5))
    return Panel(shown, *_axes(found["widths"]), title=f"{name}: {kind} (factor {_factor(values['spread'])})")


def _axes(widths: Sequence[int]) -> tuple[Axis, Axis]:
    ticks = {float(width): f"{width}" for width in widths}
    return Axis(title="width", log=True, ticks=ticks), Axis(title="root mean square", log=True)


def coordinates_section(directory: Path) -> Section:
    """What a page says of the check in ``directory``. Raises as ``read_values``; LookupError for a damaged file."""
    found = read_values(directory / FILE)
    rows = []
    for kind in KINDS:
        spreads = [found["parametrizations"][name][kind]["spread"] for name in PARAMETRIZATIONS]
        rows.append(Row([kind, *(Cell(_factor(spread), spread) for spread in spreads)]))
    said = "; ".join(f"{name}: {_verdict(found, name)}" for name in PARAMETRIZATIONS)
    blocks: list[Block] = [
        Text(f"{said}.", lead=True),
        *(_figure(found, kind) for kind in KINDS),
        Text(_HOW_TO_READ, soft=True),
        Table(["activation", *(f"{name}: factor" for name in PARAMETRIZATIONS)], rows),
        Chart("All steps: a row a parametrisation, a line a step.", image=picture_of(directory / _STEM)),
        *what_ran(found, {"operators": str(found["operators"] or "none"), "base width": str(found["base_width"])}),
    ]
    return Section(f"Coordinates of {found['model']}", "check-coordinates", blocks, _PAGE_COLOURS, about(found))


def _figure(found: Mapping[str, Any], kind: str) -> Chart:
    shown = []
    for number, name in enumerate(PARAMETRIZATIONS):
        heights = [scale[-1] for scale in found["parametrizations"][name][kind]["scale"]]
        shown.append(Series(name=name, colour=_PAGE_COLOURS[name], number=number, x=found["widths"], y=heights))
    return Chart(
        f"{kind.capitalize()} after step {found['steps']}.", Panel(shown, *_axes(found["widths"])), beside=True
    )
