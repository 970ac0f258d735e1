"""Figures of the gates of modulators: by depth, module and token, and what varies (Transponder, Figures 2 and 3)."""

# Legend: T tokens, O channels, L layers

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from relinear.analysis.plots import PALETTE, new_figure

if TYPE_CHECKING:
    from relinear.analysis.modulators import GateRecord

__all__ = [
    "LINES",
    "PANELS",
    "TOKENS",
    "plot_alphas",
    "plot_channels",
    "plot_scalars",
    "plot_surfaces",
    "plot_variance",
    "shared_spread",
    "shown_layers",
]

TOKENS = 48  # tokens shown in surfaces and maps
LINES = 12  # tokens with a line of their own in the figure of scalar gates
#: kind of gate -> the statistics shown of it, each with its title (all of a scalar gate's variance is the tokens')
PANELS = {
    "scalar": (("total", "standard deviation over tokens"), ("mean", "mean over tokens")),
    "channel": (("total", "standard deviation"), ("varying", "share of variance with the token")),
}


def _by_module(record: GateRecord, names: Sequence[str]) -> dict[str, list[str]]:
    """Modulated layers of ``names`` by module, each in order of depth."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: record.statistics[name]["layer"]):
        groups.setdefault(record.statistics[name]["module"], []).append(name)
    return {module: groups[module] for module in record.modules() if module in groups}


def plot_scalars(record: GateRecord, labels: Sequence[str] = ()) -> Any:
    """The scalar gate against depth, a panel a module, a line a token (Figure 2); None without scalar gates."""
    groups = _by_module(record, list(record.scalar))
    if not groups:
        return None
    import matplotlib

    columns = min(4, len(groups))
    figure, panels = new_figure(3.1 * columns, 2.7 * math.ceil(len(groups) / columns), columns, rows=len(groups))
    count = len(next(iter(record.scalar.values())))
    shown = np.unique(np.linspace(0, count - 1, min(LINES, count)).round().astype(int))
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.92, len(shown)))
    lowest = min(float(gate.min()) for gate in record.scalar.values())
    highest = max(float(gate.max()) for gate in record.scalar.values())
    margin = 0.05 * (highest - lowest) or 0.05
    for axes, (module, names) in zip(panels, groups.items()):
        depth = [record.statistics[name]["layer"] for name in names]
        values = np.array([record.scalar[name].numpy() for name in names])  # (L, T)
        for colour, token in zip(colours, shown, strict=True):
            label = f"{token}: {labels[token]}" if token < len(labels) else str(token)
            axes.plot(depth, values[:, token], color=colour, lw=1.1, marker="o", ms=2, label=label)
        axes.plot(depth, values.mean(1), color="#222222", lw=2, label="mean of all tokens")
        axes.axhline(1, color="#999999", lw=0.8, ls=":")
        axes.set_title(module, loc="left")
        axes.set_ylim(lowest - margin, highest + margin)
        axes.set_xticks(depth if len(depth) < 9 else depth[:: len(depth) // 6])
    for axes in panels[len(groups) :]:
        axes.set_axis_off()
    panels[0].set_ylabel("scalar gate")
    figure.supxlabel("decoder layer", fontsize=10)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center", frameon=False, fontsize=8, title="token")
    return figure


def plot_surfaces(record: GateRecord) -> Any:
    """The channel gate as a surface over channels and tokens, a panel a layer (Figure 3); None where there is none."""
    if not record.channel:
        return None
    names = shown_layers(record)
    columns = min(4, len(names))
    figure, panels = new_figure(
        3.4 * columns,
        3.2 * math.ceil(len(names) / columns),
        columns,
        rows=len(names),
        subplot_kw={"projection": "3d"},
    )
    spread = shared_spread(record)
    for axes, name in zip(panels, names):
        gate = record.channel[name].numpy()
        x, y = np.meshgrid(np.arange(gate.shape[1]), np.arange(gate.shape[0]))
        axes.plot_surface(
            x, y, gate, cmap="RdBu_r", vmin=1 - spread, vmax=1 + spread, lw=0, rcount=48, ccount=96, rasterized=True
        )
        axes.set_zlim(1 - spread, 1 + spread)
        axes.set_title(f"layer {record.statistics[name]['layer']}", fontsize=10)
        axes.set_xlabel("channel", fontsize=8)
        axes.set_ylabel("token", fontsize=8)
        axes.tick_params(labelsize=7)
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    module = record.statistics[names[0]]["module"]
    figure.suptitle(f"Channel gates of {module}", fontsize=11)
    return figure


def plot_channels(record: GateRecord, labels: Sequence[str] = ()) -> Any:
    """The channel gate as a map, tokens down and channels across, a panel a layer; None where there is none."""
    if not record.channel:
        return None
    names = shown_layers(record)
    figure, panels = new_figure(1.2 + 2.6 * len(names), 0.8 + 0.15 * TOKENS, len(names), sharey=True)
    spread = shared_spread(record)
    for axes, name in zip(panels, names, strict=True):
        gate = record.channel[name].numpy()
        image = axes.imshow(
            gate, aspect="auto", cmap="RdBu_r", vmin=1 - spread, vmax=1 + spread, interpolation="nearest"
        )
        axes.set_title(f"layer {record.statistics[name]['layer']}", loc="left")
        axes.set_xlabel("channel")
        axes.grid(False)
    if labels:
        panels[0].set_yticks(range(len(labels)), labels, fontsize=6, family="monospace")
    panels[0].set_ylabel("token")
    module = record.statistics[names[0]]["module"]
    figure.suptitle(f"Channel gates of {module}: below 1 blue, above 1 red", fontsize=11, x=0.01, ha="left")
    figure.colorbar(image, ax=panels, shrink=0.6, pad=0.01)
    return figure


def shown_layers(record: GateRecord, most: int = 8) -> list[str]:
    """Names of at most ``most`` layers with channel gates, evenly over the depth, the first and the last among them."""
    names = list(record.channel)
    chosen = np.unique(np.linspace(0, len(names) - 1, min(most, len(names))).round().astype(int))
    return [names[i] for i in chosen]


def shared_spread(record: GateRecord) -> float:
    """Distance from 1 that the colours span: all values but the outermost half per cent on either side."""
    distances = np.concatenate([np.abs(gate.numpy() - 1).ravel() for gate in record.channel.values()])
    return max(float(np.quantile(distances, 0.99)), 0.02)


def plot_variance(record: GateRecord) -> Any:
    """How far the gates spread, by module and layer: over tokens, or tokens and channels."""
    kinds = [k for k in PANELS if any(k in row["gates"] for row in record.statistics.values())]
    modules = record.modules()
    figure, panels = new_figure(10.4, 1.2 + 2.4 * len(kinds), 2, rows=2 * len(kinds))
    lines = {}
    for axes, (kind, value, title) in zip(panels, [(k, *panel) for k in kinds for panel in PANELS[k]], strict=True):
        table = record.table(kind, value).numpy()
        table = np.sqrt(table) if value == "total" else table
        for place, module in enumerate(modules):
            if not np.isnan(table[:, place]).all():
                colour = PALETTE[place % len(PALETTE)]
                (lines[module],) = axes.plot(table[:, place], color=colour, lw=1.6, marker="o", ms=3)
        axes.set_title(f"{kind} gates: {title}", loc="left")
        axes.set_ylim(0, 1.05 if value == "varying" else None)
        axes.set_xticks(range(table.shape[0]) if table.shape[0] < 9 else range(0, table.shape[0], 3))
        axes.set_xlabel("decoder layer")
    figure.legend(lines.values(), lines, loc="outside right center", frameon=False, fontsize=9)
    return figure


def plot_alphas(record: GateRecord) -> Any:
    """The learnt curvatures, layers down and modules across; None where all are fixed at 1."""
    rows, modules = record.statistics.values(), record.modules()
    depth = 1 + max(row["layer"] for row in rows)
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["alphas"]))
    values = {kind: np.full((depth, len(modules)), np.nan) for kind in kinds}
    for row in rows:
        for kind, alpha in row["alphas"].items():
            values[kind][row["layer"], modules.index(row["module"])] = alpha
    if not values or all(np.all((table == 1) | np.isnan(table)) for table in values.values()):
        return None
    spread = max(0.02, max(float(np.nanmax(np.abs(table - 1))) for table in values.values()))
    depth = len(next(iter(values.values())))
    figure, panels = new_figure(
        1.5 + 0.75 * len(record.modules()) * len(kinds), 1.4 + 0.32 * depth, len(kinds), sharey=True
    )
    for axes, (kind, table) in zip(panels, values.items(), strict=True):
        image = axes.imshow(table, cmap="RdBu_r", vmin=1 - spread, vmax=1 + spread, aspect="auto")
        for (i, j), alpha in np.ndenumerate(table):
            if not np.isnan(alpha) and depth < 25:
                ink = "white" if abs(alpha - 1) > 0.7 * spread else "black"
                axes.text(j, i, f"{alpha:.2f}", ha="center", va="center", fontsize=7.5, color=ink)
        axes.set_xticks(range(len(modules)), modules, rotation=40, ha="right", fontsize=8)
        axes.set_yticks(range(depth) if depth < 13 else range(0, depth, 3))
        axes.set_title(f"alpha of the {kind} gates", loc="left")
        axes.grid(False)
    panels[0].set_ylabel("decoder layer")
    figure.colorbar(image, ax=panels, shrink=0.8, pad=0.02)
    return figure
