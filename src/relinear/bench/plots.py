"""The picture of a benchmark: how long each layer takes relative to dense, by shape and pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relinear.analysis.plots import colours, save_figure
from relinear.bench.operators import DENSE, phase_of

__all__ = ["plot_bench"]


def plot_bench(rows: Sequence[dict[str, Any]], stem: str | Path) -> None:
    """Dots of ``ratio`` on a logarithmic axis with its quartiles: one panel a shape and dtype, eager, most tokens.

    Args:
        rows: of ``bench.json``.
        stem: path of the figure, without its suffix.
    """
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot

    tokens = max(row["tokens"] for row in rows)
    shown = [row for row in rows if row["tokens"] == tokens and row["contender"] != DENSE and row.get("ratio")]
    panels = sorted(
        {(row["in_features"], row["out_features"], row["dtype"]) for row in shown}, key=lambda p: (p[2], -p[0] * p[1])
    )
    if not panels:
        return
    names = list(dict.fromkeys(row["contender"] for row in shown))
    palette = colours([{"name": name} for name in names])
    passes = sorted({(row["mode"], phase_of(row)) for row in shown})
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(2.2 + 2.6 * len(panels), 1.2 + 0.42 * len(names)), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    markers = dict(zip(passes, ("o", "s", "^", "D"), strict=False))
    for axis, panel in zip(axes[0], panels, strict=True):
        axis.axvline(1, color="#222222", linewidth=1)
        for row in shown:
            if (row["in_features"], row["out_features"], row["dtype"]) != panel:
                continue
            place = passes.index((row["mode"], phase_of(row)))
            y = names.index(row["contender"]) + 0.16 * (place - (len(passes) - 1) / 2)
            colour = palette[row["contender"]]
            axis.plot([row["ratio_low"], row["ratio_high"]], [y, y], color=colour, linewidth=1)
            filled = colour if phase_of(row) == "forward" else "white"
            axis.plot(
                row["ratio"],
                y,
                markers[(row["mode"], phase_of(row))],
                color=colour,
                markerfacecolor=filled,
                markersize=5,
            )
        axis.set_xscale("log")
        axis.set_xticks([0.05, 0.2, 1, 5], ["0.05", "0.2", "1", "5"])
        axis.minorticks_off()
        axis.set_title(f"{panel[0]} → {panel[1]}, {panel[2]}", fontsize=10)
        axis.grid(axis="x", color="#e6e6e6", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_yticks(range(len(names)), names)
    axes[0][0].invert_yaxis()
    handles = [
        pyplot.Line2D([], [], linestyle="", marker=markers[p], color="#555555", label=f"{p[0]}, {p[1]}",
                      markerfacecolor="#555555" if p[1] == "forward" else "white")
        for p in passes
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside upper center", ncols=len(passes), frameon=False, fontsize=9)
    figure.supxlabel(f"time relative to dense nn.Linear, {tokens:,} tokens (left of 1 is faster)", fontsize=10)
    save_figure(figure, stem)
    pyplot.close(figure)
