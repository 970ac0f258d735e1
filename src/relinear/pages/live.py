"""Figures as Plotly's ``data`` and ``layout``, without importing it; the page sets colours for light and dark."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from relinear.pages.figures import GUIDE, Axis, Guide, Heat, Panel, Series

_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "pentagon")
_MODES = {"line": "lines+markers", "plain": "lines", "points": "markers", "steps": "lines"}
#: from least to most, and from below to above a middle; both are told apart without colour vision
_RISING = ((0, "#F4F7FB"), (0.25, "#BCD3EA"), (0.5, "#6FA3D3"), (0.75, "#2A6CA8"), (1, "#08306B"))
_DIVERGING = ((0, "#2166AC"), (0.25, "#92C5DE"), (0.5, "#F7F7F7"), (0.75, "#F4A582"), (1, "#B2182B"))


def live(panel: Panel) -> dict[str, Any]:
    """Return a panel as a figure of Plotly: ``data`` and ``layout``, JSON values."""
    layout: dict[str, Any] = {"xaxis": _axis(panel.x), "yaxis": _axis(panel.y), "showlegend": panel.legend}
    guides = [_guide(guide, panel) for guide in panel.guides]
    layout |= {"shapes": guides} if guides else {}
    notes = [_note(guide) for guide in panel.guides if guide.text and guide.y is not None]
    layout |= {"annotations": notes} if notes else {}
    data: list[dict[str, Any]] = []
    for shown in panel.shown:
        if isinstance(shown, Series):
            data += _series(shown)
            continue
        trace, more = _heat(shown)
        data.append(trace)
        layout |= more | {"yaxis": layout["yaxis"] | {"autorange": "reversed", "nticks": 24}}
        layout["xaxis"] |= {"nticks": 8, "tickfont": {"size": 9}}
    return {"data": data, "layout": layout}


def _plain(text: str) -> str:
    """Text as Plotly, which reads a little markup, shows it as it stands."""
    return html.escape(text, quote=False)


def _axis(axis: Axis) -> dict[str, Any]:
    found: dict[str, Any] = {"title": {"text": _plain(axis.title)}}
    if axis.log:
        found |= {"type": "log"} | ({} if axis.ticks else {"exponentformat": "power", "nticks": 6})
    if axis.ticks is not None:
        found |= {"tickvals": list(axis.ticks), "ticktext": [_plain(text) for text in axis.ticks.values()]}
    if axis.bounds is not None and not axis.log:
        found["range"] = list(axis.bounds)
    if axis.from_zero:
        found["rangemode"] = "tozero"
    if axis.rows:
        found |= {"type": "category", "autorange": "reversed"}
    return found


def _series(series: Series) -> Iterator[dict[str, Any]]:
    name = _plain(series.name)
    symbol = _SYMBOLS[series.number % len(_SYMBOLS)] + ("-open" if series.hollow else "")
    known = {
        "type": "scatter",
        "name": name,
        "legendgroup": name,
        "marker": {"symbol": symbol, "size": series.size},
        "meta": {"entry": series.name, "colour": series.colour},
    }
    x = list(series.x)
    low, high = series.low or (), series.high or ()
    if high and series.mode != "points":
        band = {"x": [*x, *reversed(x)], "y": [*high, *reversed(low)], "fill": "toself", "mode": "none"}
        yield known | band | {"hoverinfo": "skip", "showlegend": False}
    trace = known | {"x": x, "y": [_plain(y) if isinstance(y, str) else y for y in series.y]}
    trace |= {"mode": _MODES[series.mode], "opacity": series.opacity, "showlegend": series.legend}
    if series.texts:
        whole = isinstance(series.texts, str)
        text = _plain(series.texts) if whole else [_plain(text) for text in series.texts]  # type: ignore[arg-type]
        trace |= {"text": text, "hovertemplate": "%{text}<extra></extra>"}
    else:
        trace["hovertemplate"] = "%{fullData.name}<br>%{x:,.5~g}: %{y:.4f}<extra></extra>"
    if series.mode == "steps":
        trace |= {"line": {"shape": "hv", "width": 1.2}, "hoverinfo": "skip"}
    if high and series.mode == "points":
        trace["error_y"] = {"array": [h - y for h, y in zip(high, series.y, strict=True)], "thickness": 1.2}
    yield trace


def _heat(heat: Heat) -> tuple[dict[str, Any], dict[str, Any]]:
    """The trace, and what the layout needs for it: a surface has buttons that raise it and lay it down again."""
    bar = {"title": {"text": _plain(heat.what), "side": "right"}, "thickness": 12, "outlinewidth": 0}
    trace = {
        "type": "heatmap",
        "z": [list(row) for row in heat.values],
        "x": [_plain(name) for name in heat.x],
        "y": [_plain(name) for name in heat.y],
        "zmin": heat.bounds[0],
        "zmax": heat.bounds[1],
        "colorscale": [list(stop) for stop in (_DIVERGING if heat.diverging else _RISING)],
        "hovertemplate": "%{y}<br>%{x}: %{z:.3f}<extra></extra>",
        "colorbar": bar,
        # the page turns a rising scale round on a dark ground, so that nothing stays as dark as what is around it
        "meta": {"map": True, "rising": not heat.diverging},
    }
    if heat.written:
        trace["texttemplate"] = "%{z:.2f}"
    if not heat.surface:
        return trace, {}
    kinds = {"map": "heatmap", "surface": "surface"}
    buttons = [{"label": label, "method": "restyle", "args": [{"type": kind}]} for label, kind in kinds.items()]
    menu = {"type": "buttons", "direction": "right", "buttons": buttons, "showactive": False, "y": 1.01}
    sides = {"xaxis": "", "yaxis": "", "zaxis": heat.what}
    scene = {side: {"title": {"text": _plain(text)}, "nticks": 6} for side, text in sides.items()}
    trace |= {"cmin": heat.bounds[0], "cmax": heat.bounds[1]}  # a surface's own names for the ends of its scale
    return trace, {"scene": scene, "updatemenus": [menu | {"x": 0, "xanchor": "left", "yanchor": "bottom"}]}


def _guide(guide: Guide, panel: Panel) -> dict[str, Any]:
    shape = {"type": "line", "line": {"color": GUIDE, "width": 1.2, "dash": "dash"}}
    if guide.y is not None:
        return shape | {"xref": "paper", "x0": 0, "x1": 1, "y0": guide.y, "y1": guide.y}
    if guide.x is not None:
        return shape | {"yref": "paper", "y0": 0, "y1": 1, "x0": guide.x, "x1": guide.x}
    low, high = panel.x.bounds or (0, 1)
    return shape | {"x0": low, "y0": low, "x1": high, "y1": high}


def _note(guide: Guide) -> dict[str, Any]:
    place = {"xref": "paper", "x": 1, "xanchor": "right", "y": guide.y, "yanchor": "bottom"}
    return place | {"text": _plain(guide.text), "showarrow": False, "font": {"color": GUIDE}}
