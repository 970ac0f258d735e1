"""What every figure shares: matplotlib without a display, one style, colours that tell entries apart, atomic files.

matplotlib is imported on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relinear.pages.blocks import PALETTE
from relinear.system.files import atomic_path

__all__ = ["PALETTE", "REFERENCE", "colours", "new_figure", "plain_text", "save_figure", "short_name"]

#: near black, for what the others are held against
REFERENCE = "#222222"
_STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "svg.hashsalt": "relinear",  # the same figure gives the same file
    "figure.constrained_layout.use": True,
}


def new_figure(width: float, height: float, panels: int = 1, **kwargs: Any) -> tuple[Any, list[Any]]:
    """A figure of ``width`` by ``height`` inches in the common style, and its panels from left to right.

    Args:
        width, height: in inches.
        panels: panels beside each other.
        **kwargs: of ``pyplot.subplots``; ``rows=n`` asks for as many rows as ``n`` panels need, and the panels then
            come row by row.
    """
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot

    rows = -(-kwargs.pop("rows", panels) // panels)
    with matplotlib.rc_context(_STYLE):
        figure, axes = pyplot.subplots(rows, panels, figsize=(width, height), squeeze=False, **kwargs)
    pyplot.close(figure)  # drops it from pyplot's list; the figure itself stays usable
    return figure, list(axes.flat)


def colours(entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Colour by entry name: the dense reference is near black, the others take the palette in order."""
    others = [entry["name"] for entry in entries if not entry.get("dense")]
    chosen = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(others)}
    return {entry["name"]: chosen.get(entry["name"], REFERENCE) for entry in entries}


def save_figure(figure: Any, stem: str | Path) -> list[Path]:
    """Write ``figure`` as STEM.png (150 dots an inch) and STEM.svg, each atomically; returns both paths."""
    import matplotlib

    png, svg = Path(f"{stem}.png"), Path(f"{stem}.svg")
    with matplotlib.rc_context(_STYLE):
        with atomic_path(png) as temporary:
            figure.savefig(temporary, format="png", bbox_inches="tight", dpi=150)
        with atomic_path(svg) as temporary:
            figure.savefig(temporary, format="svg", bbox_inches="tight", metadata={"Date": None})
    return [png, svg]


def plain_text(text: str) -> str:
    """Text that matplotlib's font has and its markup does not read."""
    return text.replace("\u2423", "_").replace("$", r"\$").encode("ascii", "replace").decode()


def short_name(name: str) -> str:
    """A layer's name without the parts that all layers share."""
    parts = [p for p in name.split(".") if p not in ("model", "transformer", "layers", "h", "base_model")]
    return ".".join(parts)
