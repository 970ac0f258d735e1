"""What ``relinear check-coordinates`` shows: a table, a figure, a section of a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relinear.analysis.plots import PALETTE, new_figure, save_figure
from relinear.compare.coordinates import FLAT, KINDS, PARAMETRIZATIONS
from relinear.pages.blocks import (
    Block,
    Cell,
    Chart,
    Row,
    Section,
    Table,
    Text,
    axes,
    line,
    picture_of,
    read_values,
    what_ran,
)

__all__ = ["FILE", "coordinates_section", "coordinates_text", "logarithmic", "write_plot"]

FILE = "coordinates.json"
_STEM = "coordinates"
_PAGE_COLOURS = dict(zip(PARAMETRIZATIONS, PALETTE[1::-1], strict=True))
_HOW_TO_READ = (
    "The root mean square of what each kind of module returns, over tokens and channels, at every width: flat lines "
    "mean that a learning rate serves all widths. The factor is the largest over the smallest after the last step. In "
    "the maximal update parametrisation the logits of a fresh model fall with the root of the width, by design."
)


def coordinates_text(found: Mapping[str, Any]) -> str:
    """A line for every kind of activation, and what follows for each parametrisation."""
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
    from matplotlib import colormaps

    figure, panels = new_figure(11, 5.2, len(KINDS), rows=2 * len(KINDS), sharex=True, sharey="col")
    shades = colormaps["viridis_r"]
    for place, panel in enumerate(panels):
        name, kind = PARAMETRIZATIONS[place // len(KINDS)], KINDS[place % len(KINDS)]
        values = found["parametrizations"][name][kind]
        for step in range(found["steps"] + 1):
            heights = [math.nan if scale[step] is None else scale[step] for scale in values["scale"]]
            colour = shades(0.15 + 0.85 * step / found["steps"])
            panel.plot(found["widths"], heights, "o-", color=colour, linewidth=1.4, markersize=3.5, label=f"{step}")
        logarithmic(panel, found["widths"])
        panel.set_title(f"{name}: {kind}\n(factor {_factor(values['spread'])})", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, title="step", loc="outside right center", frameon=False, fontsize=8)
    figure.supxlabel("width", fontsize=10)
    figure.supylabel("root mean square", fontsize=10)
    save_figure(figure, Path(out) / _STEM)


def logarithmic(panel: Any, widths: Sequence[int]) -> None:
    """Logarithmic axes: the widths below, round numbers at the side, also where they span less than a decade."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(widths, [f"{width}" for width in widths])
    low, high = panel.get_ylim()
    if high < 50 * low:
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.minorticks_off()


def coordinates_section(directory: Path) -> Section:
    """What a page says of the check in ``directory``. Raises as ``read_values``; LookupError for a damaged file."""
    found = read_values(directory / FILE)
    rows = []
    for kind in KINDS:
        spreads = [found["parametrizations"][name][kind]["spread"] for name in PARAMETRIZATIONS]
        rows.append(Row([kind, *(Cell(_factor(spread), spread) for spread in spreads)]))
    blocks: list[Block] = [Text(_HOW_TO_READ)]
    blocks += [Text(f"{name}: {_verdict(found, name)}.") for name in PARAMETRIZATIONS]
    blocks += [
        Table(["activation", *(f"{name}: factor" for name in PARAMETRIZATIONS)], rows),
        *(_figure(found, kind) for kind in KINDS),
        Chart("All steps: a row a parametrisation, a line a step.", image=picture_of(directory / _STEM)),
        *what_ran(found, {"operators": str(found["operators"] or "none"), "base width": str(found["base_width"])}),
    ]
    return Section(f"Coordinates of {found['model']}", "check-coordinates", blocks, _PAGE_COLOURS)


def _figure(found: Mapping[str, Any], kind: str) -> Chart:
    data: list[dict[str, Any]] = []
    for number, name in enumerate(PARAMETRIZATIONS):
        heights = [scale[-1] for scale in found["parametrizations"][name][kind]["scale"]]
        data += line(name, _PAGE_COLOURS[name], number, found["widths"], heights)
    layout = axes("width", "root mean square", xaxis={"type": "log"}, yaxis={"type": "log"})
    return Chart(f"{kind.capitalize()} after step {found['steps']}.", {"data": data, "layout": layout}, beside=True)
