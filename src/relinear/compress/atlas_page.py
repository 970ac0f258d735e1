"""The page of an atlas: atlas.json's values -> figures and one self-contained report.html."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relinear.pages.blocks import Block, Cell, Chart, Row, Section, Table, Text, what_ran
from relinear.pages.drawn import save_panels
from relinear.pages.figures import PALETTE, Axis, Guide, Panel, Series
from relinear.pages.page import write_page

__all__ = ["atlas_section", "cheapest", "write_atlas"]

#: of a layer's parameters, at which operators are held against each other
HALF = 0.5


def write_atlas(record: Mapping[str, Any], out: str | Path) -> list[Path]:
    """Write the figures and the page of ``record``, the values of atlas.json, into ``out``; return their paths."""
    folder = Path(out)
    figures = [
        path
        for name, panels in (("costs", _costs(record)), ("cheapest", [_map(record)]))
        for path in save_panels(panels, folder / name)
    ]
    return [*figures, write_page(folder / "report.html", [atlas_section(record)])]


def atlas_section(record: Mapping[str, Any]) -> Section:
    """Return what a page says of ``record``, the values of atlas.json."""
    layers, best = record["layers"], cheapest(record)
    if not best:
        raise ValueError("no layer of this atlas has an operator with fewer parameters; name others with --operator")
    first, count = Counter(kind for kind, _ in best.values()).most_common(1)[0]
    blocks: list[Block] = [
        Text(f"At half the parameters {first} costs the least in {count} of {len(best)} layers of {record['model']}."),
        Text(
            "A cost is the predicted rise of the loss, in nats a token, if the best fit of an operator takes the place "
            "of one layer: 0.5 tr(G D A D^T), with D what the fit misses, A and G the second moments of the layer's "
            "inputs and of the gradients at its outputs.",
            soft=True,
        ),
        Chart("The cheapest operator at half a layer's parameters, by depth and type.", _map(record), stem="cheapest"),
        Text("Cost against parameters, mean over depth", heading=True),
        *(
            Chart(
                f"{panel.title}; dashed: the dense layer's size, and the cost of no layer.",
                panel,
                stem="costs",
                beside=True,
            )
            for panel in _costs(record)
        ),
        Text("All operators at half the parameters", heading=True),
        _table(record, best),
        Text(
            f"Moments of {record['tokens']:,} tokens. Between two sizes a cost is interpolated; an operator that has "
            "no size up to half is left out. Fits that are no closed form are descents of at most "
            f"{record['settings']['steps']} steps, and may be improved on.",
            soft=True,
        ),
    ]
    shown = {"layers": str(len(layers)), "model": record["model"]}
    return Section("Atlas", "atlas", [*blocks, *what_ran(record, shown)], entries=_colours(record))


def cheapest(record: Mapping[str, Any]) -> dict[str, tuple[str, float]]:
    """Return layer -> (kind, nats) of the operator that costs the least at half the parameters."""
    found = {}
    for name, layer in record["layers"].items():
        costs = {kind: at for kind, points in layer["operators"].items() if (at := _at_half(points, layer)) is not None}
        if costs:
            found[name] = min(costs.items(), key=lambda item: item[1])
    return found


def _at_half(points: Sequence[Mapping[str, Any]], layer: Mapping[str, Any]) -> float | None:
    """The cost at half the parameters, on a line of log cost between two sizes; of the largest where all are below."""
    wanted = HALF * layer["parameters"]
    below = [point for point in points if point["parameters"] <= wanted]
    above = [point for point in points if point["parameters"] > wanted]
    if not below:
        return None
    if not above:
        return below[-1]["nats"]
    low, high = below[-1], above[0]
    place = (wanted - low["parameters"]) / (high["parameters"] - low["parameters"])
    first, second = (math.log(max(point["nats"], 1e-300)) for point in (low, high))
    return math.exp(first + place * (second - first))


def _colours(record: Mapping[str, Any]) -> dict[str, str]:
    kinds = [one["kind"] for one in record["operators"]]
    return {kind: PALETTE[place % len(PALETTE)] for place, kind in enumerate(kinds)}


def _number(place: int) -> int:
    """Of the marker: entries that share a colour, which there are eight of, differ in it."""
    return place + place // len(PALETTE)


def _types(record: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(layer["type"] for layer in record["layers"].values()))


def _map(record: Mapping[str, Any]) -> Panel:
    """Depth by type, in the colour of the cheapest operator."""
    best, layers = cheapest(record), record["layers"]
    rows = {kind: place for place, kind in enumerate(_types(record))}
    shown = []
    for number, (kind, colour) in enumerate(_colours(record).items()):
        own = sorted(
            (rows[layers[name]["type"]], layers[name]["depth"], name) for name in best if best[name][0] == kind
        )
        if own:
            series = Series(
                name=kind,
                colour=colour,
                number=_number(number),
                x=[depth for _, depth, _ in own],
                y=[layers[name]["type"] for _, _, name in own],
                texts=[f"{name}: {kind}, {best[name][1]:.3g} nats" for _, _, name in own],
                mode="points",
                size=14,
            )
            shown.append(series)
    depths = sorted({layer["depth"] for layer in layers.values()})
    title = shown[0].name if len(shown) == 1 else ""  # a single entry has no legend
    return Panel(
        shown, Axis(title="decoder layer", ticks={depth: str(depth) for depth in depths}), Axis(rows=True), title=title
    )


def _costs(record: Mapping[str, Any]) -> list[Panel]:
    """A panel a type of layer: mean cost over depth by the share of its parameters, a line an operator."""
    panels = []
    for wanted in _types(record):
        layers = [layer for layer in record["layers"].values() if layer["type"] == wanted]
        dense, shown = layers[0]["parameters"], []
        for number, (kind, colour) in enumerate(_colours(record).items()):
            sums = Counter[int]()
            for layer in layers:
                for point in layer["operators"][kind]:
                    sums[point["parameters"]] += point["nats"] / len(layers)
            if sums:
                x, y = zip(*sorted(sums.items()), strict=True)
                shares = [count / dense for count in x]
                shown.append(Series(name=kind, colour=colour, number=_number(number), x=shares, y=y))
        nothing = sum(layer["nothing"] for layer in layers) / len(layers)
        seen = [value for series in shown for value in series.y if value > 0] + [nothing]
        bounds = min(seen) / 1.5, max(seen) * 1.5
        axes = Axis(title="share of parameters", bounds=(0, 1.02)), Axis(title="nats a token", log=True, bounds=bounds)
        panels.append(Panel(shown, *axes, [Guide(x=1, text="dense"), Guide(y=nothing)], wanted))
    return panels


def _table(record: Mapping[str, Any], best: Mapping[str, tuple[str, float]]) -> Table:
    """An operator a row, the cheapest in most layers first."""
    wins = Counter(kind for kind, _ in best.values())
    rows = []
    for kind, colour in _colours(record).items():
        costs = [_at_half(layer["operators"][kind], layer) for layer in record["layers"].values()]
        known = [cost for cost in costs if cost is not None]
        types = Counter(record["layers"][name]["type"] for name, (first, _) in best.items() if first == kind)
        total = Cell(f"{sum(known):.4g}", sum(known)) if known else Cell("–")
        where = ", ".join(f"{name} {count}" for name, count in types.items())
        cells: list[Cell | str] = [
            kind,
            Cell(str(wins[kind]), wins[kind]),
            total,
            Cell(str(len(known)), len(known)),
            where,
        ]
        rows.append(Row(cells, kind, colour))
    rows.sort(key=lambda row: (-(row.shown[1].value or 0), row.shown[2].value or math.inf))
    return Table(["operator", "layers it is cheapest in", "nats in all", "layers it fits", "where"], rows, words=(0, 4))
