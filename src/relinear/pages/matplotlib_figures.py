"""Draw figures into PNG and SVG files with Matplotlib, in one style. Matplotlib is imported on first use."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relinear.pages.figures import GUIDE, Axis, Guide, Heat, Panel, Series
from relinear.system.files import atomic_path

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
    "svg.hashsalt": "relinear",  # so that the same figure gives the same file
    "figure.constrained_layout.use": True,
}
_MARKERS = ("o", "s", "D", "^", "P", "X", "*", "p")
_WIDTHS = {1: 8.4, 2: 9.6, 3: 12.5}
#: the most columns or rows of a heat map that are all labelled
_MAX_LABELS = 48


def save_panels(panels: Sequence[Panel], stem: str | Path, title: str = "") -> list[Path]:
    """Draw ``panels`` as one figure and write it as STEM.png (150 dpi) and STEM.svg, each atomically; return both."""
    import matplotlib

    figure = draw_figure(panels, title)
    png, svg = Path(f"{stem}.png"), Path(f"{stem}.svg")
    with matplotlib.rc_context(_STYLE):
        with atomic_path(png) as temporary:
            figure.savefig(temporary, format="png", bbox_inches="tight", dpi=150)
        with atomic_path(svg) as temporary:
            figure.savefig(temporary, format="svg", bbox_inches="tight", metadata={"Date": None})
    return [png, svg]


def plain_text(text: str) -> str:
    """Return text in characters that Matplotlib's font has, with its markup escaped."""
    text = text.replace("\u2423", "_").replace("$", r"\$")
    return "".join(letter if letter.isascii() or letter in "→↑↓±µ×°–" else "?" for letter in text)


def draw_figure(panels: Sequence[Panel], title: str = "") -> Any:
    """Draw ``panels``, at most four in a row, and return the Figure."""
    import matplotlib
    from matplotlib.figure import Figure

    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    height = rows * max(_height(panel, rows) for panel in panels)
    # panels with the same title and bounds of the y axis share it
    shared = len({(panel.y.title, panel.y.bounds) for panel in panels}) == 1 and len(panels) > 1
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTHS.get(columns, 3.4 * columns), height))
        grid = list(figure.subplots(rows, columns, squeeze=False, sharey=shared).flat)
    for index, (axes, panel) in enumerate(zip(grid, panels)):
        _draw_panel(figure, axes, panel)
        axes.set_xlabel(panel.x.title)
        if not shared or index % columns == 0:
            axes.set_ylabel(panel.y.title)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    if title:
        figure.suptitle(plain_text(title), fontsize=11, x=0.01, ha="left")
    _draw_legend(figure, grid, panels)
    return figure


def _height(panel: Panel, rows: int) -> float:
    for shown in panel.shown:
        if isinstance(shown, Heat):
            return min(9.0, max(2.6, 1.4 + 0.17 * len(shown.values)))
    if panel.y.rows:
        return 1.3 + 0.34 * len(_rows(panel))
    return 4.6 if rows == 1 else 2.9


def _rows(panel: Panel) -> list[str]:
    return list(dict.fromkeys(y for series in panel.shown if isinstance(series, Series) for y in series.y))


def _draw_legend(figure: Any, grid: Sequence[Any], panels: Sequence[Panel]) -> None:
    """Draw one legend for all panels, on the right."""
    handles: dict[str, Any] = {}
    for axes, panel in zip(grid, panels):
        if panel.legend:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
    if len(handles) > 1:
        names = [plain_text(name) for name in handles]
        figure.legend(handles.values(), names, loc="outside right center", frameon=False, fontsize=8.5)


def _draw_panel(figure: Any, axes: Any, panel: Panel) -> None:
    rows = _rows(panel) if panel.y.rows else []
    for shown in panel.shown:
        if isinstance(shown, Series):
            _draw_series(axes, shown, rows)
        else:
            figure.colorbar(_draw_heat_map(axes, shown), ax=axes, label=shown.what, shrink=0.8, pad=0.02)
    if rows:
        axes.set_yticks(range(len(rows)), [plain_text(name) for name in rows], fontsize=8 if len(rows) > 12 else 9.5)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
    _set_scale(axes, "x", panel.x)
    _set_scale(axes, "y", panel.y)
    for guide in panel.guides:
        _draw_guide(axes, guide, panel.x.bounds or (0, 1))
    if panel.title:
        axes.set_title(plain_text(panel.title), loc="left", fontsize=10)


def _draw_series(axes: Any, series: Series, rows: Sequence[str]) -> None:
    x = list(series.x)
    y = [rows.index(value) if rows else value for value in series.y]
    style: dict[str, Any] = {"color": series.color, "alpha": series.opacity, "lw": 1.6}
    if series.mode in ("line", "points") or len(x) == 1:
        style |= {"marker": _MARKERS[series.number % len(_MARKERS)], "ms": 0.6 * series.size}
    if series.mode == "points":
        style["ls"] = ""
    if series.mode == "steps":
        style |= {"drawstyle": "steps-post", "zorder": 1, "lw": 1.2}
    if series.hollow:
        style["mfc"] = "none"
    axes.plot(x, y, label=(series.label or series.name) if series.legend else None, **style)
    if series.low is not None and series.high is not None:
        if series.mode == "points":
            spans = [abs(h - v) for h, v in zip(series.high, y, strict=True)]
            axes.errorbar(x, y, yerr=spans, fmt="none", color=series.color, capsize=3, lw=1.2)
        else:
            axes.fill_between(x, series.low, series.high, color=series.color, alpha=0.15, lw=0)


def _draw_heat_map(axes: Any, heat: Heat) -> Any:
    import numpy as np

    table = np.array(heat.values, dtype=float)
    low, high = heat.bounds
    image = axes.imshow(
        table, cmap="RdBu_r" if heat.diverging else "Blues", vmin=low, vmax=high, aspect="auto", interpolation="nearest"
    )
    axes.grid(False)
    for names, set_ticks, turn in ((heat.x, axes.set_xticks, 90), (heat.y, axes.set_yticks, 0)):
        step = 1 if len(names) <= _MAX_LABELS and sum(map(len, names)) < 400 else -(-len(names) // 8)
        set_ticks(range(0, len(names), step), [plain_text(name) for name in names[::step]], rotation=turn, fontsize=7)
    return image


def _set_scale(axes: Any, side: str, axis: Axis) -> None:
    set_scale, set_limits, set_ticks = (getattr(axes, f"set_{side}{what}") for what in ("scale", "lim", "ticks"))
    if axis.log:
        set_scale("log")
        _round_ticks(axes, side)
    if axis.ticks is not None:
        set_ticks(list(axis.ticks), list(axis.ticks.values()))
    if axis.log and axis.ticks is not None:
        getattr(axes, f"{side}axis").minorticks_off()
    if axis.bounds is not None:
        set_limits(*axis.bounds)
    elif axis.from_zero:
        set_limits(0, None)


def _round_ticks(axes: Any, side: str) -> None:
    """Set ticks at round numbers, also on a logarithmic axis that spans less than a decade."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    low, high = getattr(axes, f"get_{side}lim")()
    line = getattr(axes, f"{side}axis")
    if low > 0 and high < 50 * low:
        line.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        line.set_major_formatter(StrMethodFormatter("{x:g}"))
    line.set_minor_formatter(NullFormatter())


def _draw_guide(axes: Any, guide: Guide, ends: tuple[float, float]) -> None:
    style: dict[str, Any] = {"color": GUIDE, "lw": 1.2, "ls": (0, (4, 3)), "zorder": 1}
    if guide.y is not None:
        axes.axhline(guide.y, label=guide.text or None, **style)
    elif guide.x is not None:
        axes.axvline(guide.x, label=guide.text or None, **style)
    else:
        axes.axline((ends[0], ends[0]), (ends[1], ends[1]), **style)
