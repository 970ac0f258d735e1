"""``relinear analyze``: histogram, entropy and share of active gates of every layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from relinear.analysis.analyses import Result, Subject
from relinear.analysis.gates import ACTIVE, BINS, gate_statistics
from relinear.analysis.plots import new_figure
from relinear.analysis.record_gates import gated_operators

__all__ = ["applies", "plot_gates", "run"]


def applies(model: nn.Module) -> bool:
    """Whether the model has gates that read a context."""
    return bool(gated_operators(model))


def run(subject: Subject) -> Result:
    """Statistics over all tokens of the subject."""
    statistics = gate_statistics(subject.model, subject.ids)
    lines = []
    for part in ("basis", "output"):
        rows = [parts[part] for parts in statistics.values() if part in parts]
        if rows:
            keys = ("mean", "entropy", "active", "shut", "open", "variation")
            mean = {key: sum(row[key] for row in rows) / len(rows) for key in keys}
            lines.append(
                f"{part} gates, mean over {len(rows)} layers: value {mean['mean']:.2f}, "
                f"entropy {mean['entropy']:.2f} nats, {mean['active']:.0%} active, {mean['shut']:.0%} shut, "
                f"{mean['open']:.0%} open, standard deviation over tokens {mean['variation']:.2f}"
            )
    return Result(statistics, {"gates": plot_gates(statistics)}, "\n".join(lines))


def plot_gates(statistics: dict[str, dict[str, dict[str, Any]]]) -> Any:
    """The histogram of every layer as a row, darker where more gates are; entropy and active share at the right."""
    import numpy as np

    parts = [p for p in ("basis", "output") if any(p in layer for layer in statistics.values())]
    height = 1.4 + 0.3 * len(statistics)
    figure, axes = new_figure(6.6 * len(parts), max(2.8, height), len(parts))
    for axis, part in zip(axes, parts, strict=True):
        layers = {name: layer[part] for name, layer in statistics.items() if part in layer}
        table = np.array([layer["histogram"] for layer in layers.values()])
        image = axis.imshow(
            table,
            aspect="auto",
            cmap="Blues",
            vmin=0,
            vmax=max(3 / BINS, float(np.quantile(table, 0.99))),
            extent=(0, 1, len(layers), 0),
            interpolation="nearest",
        )
        for edge in ACTIVE:
            axis.axvline(edge, color="#D55E00", lw=0.9, ls=":")
        axis.set_yticks([i + 0.5 for i in range(len(layers))], [_short(name) for name in layers], fontsize=8)
        for i, layer in enumerate(layers.values()):
            axis.text(
                1.02, i + 0.5, f"{layer['entropy']:.2f}   {layer['active']:.0%}", va="center", fontsize=8, clip_on=False
            )
        axis.text(1.02, -0.25, "entropy   active", fontsize=8, color="#555555", clip_on=False)
        axis.grid(False)
        axis.set_xlabel(f"{part} gate")
        axis.set_title(f"{part} gates over all tokens", loc="left", pad=14)
        figure.colorbar(image, ax=axis, label="share of gates", pad=0.16, shrink=0.8)
    return figure


def _short(name: str) -> str:
    """A layer's name without the parts that all layers share."""
    parts = [p for p in name.split(".") if p not in ("model", "transformer", "layers", "h", "base_model")]
    return ".".join(parts)
