"""The page of a compression: report.json's values -> one self-contained report.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relinear.compress.corrections import layer_type
from relinear.core.operator import OperatorConfig
from relinear.pages import page as pages
from relinear.pages.blocks import Chart, Part, Section, what_ran
from relinear.pages.drawn import data_uri
from relinear.pages.figures import PALETTE, REFERENCE, Axis, Guide, Panel, Series

__all__ = ["report_section", "write_page"]

TEMPLATE = "compress/report.html"
#: pixels of a cell of the plan's picture, and of its labels
CELL, LABELS = 26, 110


def write_page(path: str | Path, report: Mapping[str, Any]) -> Path:
    """Write the page on ``report`` (the values of report.json); it holds everything inline: it can be mailed."""
    return pages.write_page(path, [report_section(report)])


def report_section(report: Mapping[str, Any]) -> Section:
    """Return what a page says of ``report``, the values of report.json.

    Raises:
        ValueError: where it lacks what a report has.
    """
    try:
        values = {
            "report": report,
            "picture": _picture(report["layers"]),
            "types": _by_type(report["layers"]),
            "chart": _chart(report["points"]) if report["points"] else None,
            "frontier": _frontier(report.get("budgets") or []),
        }
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no report of a compression ({error!r}); carry out the compression again") from None
    return Section("Compression", "compress", [Part(TEMPLATE, values), *what_ran(report)])


def _chart(points: Sequence[Mapping[str, Any]]) -> Chart:
    """Predicted against measured nats on logarithmic axes; what did not rise has no place on them."""
    shown = [point for point in points if point["predicted"] > 0 and point["measured"] > 0]
    x, y = [point["predicted"] for point in shown], [point["measured"] for point in shown]
    texts = [
        f"{point['name']}: predicted {point['predicted']:.4g}, measured {point['measured']:.4g}" for point in shown
    ]
    ends = min([*x, *y], default=0.1), max([*x, *y], default=1.0)
    axes = [Axis(title=f"{what} nats a token", log=True, bounds=ends) for what in ("predicted", "measured")]
    dots = Series(name="layers", colour=PALETTE[0], x=x, y=y, texts=texts, mode="points", legend=False)
    panel = Panel([dots], axes[0], axes[1], [Guide()])
    return Chart(
        "Single layers tried by themselves: on the dashed line the prediction was right, above it too low. "
        "Layers that did not rise are in the table alone.",
        None,
        data_uri([panel]),
    )


def _frontier(rows: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Loss against bytes, and against speed where a table told it."""
    if not rows:
        return []
    measured = [row for row in rows if "measured" in row]
    corpora = {"the corpus": [row["measured"] for row in measured]}
    corpora |= {
        name: [row["elsewhere"][name] for row in measured] for name in (measured[0]["elsewhere"] if measured else ())
    }
    charts = []
    for key, title, what in (("bits", "bits a weight", "bytes"), ("speed", "times as fast, by the table", "speed")):
        if rows[0][key] is None:
            continue
        y = [row["predicted"] for row in rows]
        shown = [Series(name="predicted", colour=REFERENCE, x=[row[key] for row in rows], y=y, mode="plain")]
        for at, (name, found) in enumerate(corpora.items()):
            low, high = ([f["nats"] + sign * (f["interval"] or 0) for f in found] for sign in (-1, 1))
            x, y = [row[key] for row in measured], [f["nats"] for f in found]
            named = f"measured on {name}"
            shown.append(Series(name=named, colour=PALETTE[at], x=x, y=y, low=low, high=high, mode="points", number=at))
        panel = Panel(shown, Axis(title=title), Axis(title="nats a token above the original", from_zero=True))
        text = f"Loss against {what}, from one calibration: predicted for many budgets, measured for some (95 %)."
        charts.append(Chart(text, None, data_uri([panel])))  # a picture: the page is to be mailed
    return charts


def _depth(name: str) -> tuple[int, str]:
    """The first number in a layer's name, which counts decoder layers, and what stands behind it."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return (0, name) if at is None else (int(parts[at]), ".".join(parts[at + 1 :]))


def _picture(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Cells of the plan's picture: a row for every place in a decoder layer, a column for every decoder layer."""
    places = list(dict.fromkeys(_depth(name)[1] for name in layers))
    cells = []
    for name, layer in layers.items():
        depth, place = _depth(name)
        kept = layer["parameters"] / layer["parameters_before"]
        operator = None if layer["operator"] is None else OperatorConfig.from_dict(layer["operator"])
        nats = "" if layer["nats"] is None else f", predicted {layer['nats']:+.4f} nats"
        cells.append(
            {
                "x": LABELS + depth * CELL,
                "y": places.index(place) * CELL,
                "fill": "#e9e9ee" if operator is None else _shade(kept),
                "dark": operator is not None and kept < 0.5,
                "text": "" if operator is None else f"{100 * kept:.0f}",
                "title": f"{name}: {'stays dense' if operator is None else operator}, {kept:.0%} kept{nats}",
            }
        )
    depths = [_depth(name)[0] for name in layers]
    columns = max(depths, default=0) + 1
    return {
        "cells": cells,
        "rows": [{"y": i * CELL, "text": layer_type(place) or place, "title": place} for i, place in enumerate(places)],
        "columns": [{"x": LABELS + i * CELL, "text": str(i)} for i in range(columns) if i % 5 == 0],
        "cell": CELL,
        "width": LABELS + columns * CELL,
        "height": (len(places) + 1) * CELL,
    }


def _shade(kept: float) -> str:
    """From light where nearly all is kept to dark where little is."""
    share = min(max(kept, 0.0), 1.0)
    dark, light = (18, 60, 120), (196, 219, 246)
    return "#" + "".join(f"{round(d + share * (l - d)):02x}" for d, l in zip(dark, light, strict=True))


def _by_type(layers: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for every type of layer, and one for all."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for name, layer in layers.items():
        groups.setdefault(layer_type(name), []).append(layer)
    groups["all"] = list(layers.values())
    rows = []
    for name, group in groups.items():
        nats = [layer["nats"] for layer in group]
        rows.append(
            {
                "name": name,
                "count": len(group),
                "dense": sum(layer["operator"] is None for layer in group),
                "before": sum(layer["parameters_before"] for layer in group),
                "after": sum(layer["parameters"] for layer in group),
                "nats": None if None in nats else sum(nats),
            }
        )
    return rows
