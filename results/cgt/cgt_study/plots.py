"""Figures about Contextually Guided Transformers; each takes measured arrays and returns a matplotlib Figure."""

# Legend: N pairs, T tokens, E width of y

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relinear.pages.figures import PALETTE
from relinear.pages.matplotlib_figures import new_figure

__all__ = [
    "accuracy_figure",
    "clusters_figure",
    "context_figure",
    "dot_product_figure",
    "position_figure",
    "probe_figure",
    "regression_figure",
    "spectrum_figure",
]


def regression_figure(errors: Mapping[str, np.ndarray], ridge: np.ndarray, *, noise: float) -> Any:
    """Error against the number of examples, ridge regression beside it (CGT, Figure 4).

    Args:
        errors: what ``regression_errors`` returns; further curves of length N by name.
        ridge: (N,), what ``ridge_errors`` returns.
        noise: eps, for the title.
    """
    figure, (axes,) = new_figure(8.4, 4.6)
    axes.plot(ridge, color="#222222", lw=1.6, ls="--", label="ridge regression (optimal)")
    for (name, values), colour in zip(errors.items(), PALETTE):
        start = len(ridge) - len(values)
        label = f"y frozen after {name.removeprefix('frozen_')}" if name.startswith("frozen_") else name
        axes.plot(range(start, len(ridge)), values, color=colour, lw=1.8, marker="o", ms=2.5, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("examples seen, in context or through the frozen y")
    axes.set_ylabel("mean squared error against U x + b")
    axes.set_title(f"Linear regression in context (noise {noise:g})", loc="left")
    axes.legend(frameon=False)
    return figure


def accuracy_figure(rows: Mapping[str, Sequence[Mapping[str, Any]]], measure: str = "symbols") -> Any:
    """Accuracy with y computed and with y frozen, the bars of each column of Table 1, a dot for each seed.

    y frozen is shown with its examples out of the context and, where that was measured, in it (CGT, Figure 9).

    Args:
        rows: for each column the reports (``arithmetic_report``) of its seeds.
        measure: ``symbols`` or ``answers``.
    """
    figure, (axes,) = new_figure(max(8.4, 2.0 * len(rows)), 4.2)
    named = set()
    for place, reports in enumerate(rows.values()):
        modes = [m for m in ("dynamic", "specialized", "specialized_ctx") if any(m in r for r in reports)]
        for offset, mode, colour in zip((-0.28, 0.0, 0.28), modes, PALETTE):
            values = [report[mode][measure] for report in reports if mode in report]
            label = None if mode in named else mode
            named.add(mode)
            axes.bar(place + offset, np.mean(values), 0.26, color=colour, alpha=0.8, label=label)
            axes.plot([place + offset] * len(values), values, ls="", marker="o", ms=4, color="#222222")
            axes.text(place + offset, max(values) + 0.02, f"{np.mean(values):.1%}", ha="center", fontsize=9)
    axes.set_xticks(range(len(rows)), list(rows))
    axes.set_ylim(0, 1.22)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.set_ylabel("accuracy on the answers' symbols" if measure == "symbols" else "answers right as a whole")
    axes.set_title("Arithmetic: examples in context against y frozen and examples removed", loc="left")
    axes.legend(frameon=False, ncols=2, loc="upper left")
    return figure


def probe_figure(predicted: np.ndarray, truth: np.ndarray, names: Sequence[str] = ("a", "b")) -> Any:
    """Coefficients read from y by a linear model against the hidden ones (CGT, Figure 3b); arrays of a ``Probe``."""
    count = truth.shape[1]
    figure, panels = new_figure(4.4 * count, 4.2, count)
    for axes, name, found, hidden in zip(panels, names, predicted.T, truth.T):
        axes.plot(hidden, found, ls="", marker="o", ms=3, alpha=0.4, color=PALETTE[0])
        axes.plot([hidden.min(), hidden.max()], [hidden.min(), hidden.max()], color="#888888", lw=1)
        axes.set_xlabel(f"{name} (scaled)")
        axes.set_ylabel("read from y")
        axes.set_title(f"{name}: R² = {1 - np.square(found - hidden).mean() / hidden.var():.3f}", loc="left")
    return figure


def dot_product_figure(products: Mapping[str, np.ndarray], boundaries: Sequence[float] = ()) -> Any:
    """Maps of n_s . n_t, one panel a model (CGT, Figures 3a, 10b, 13b), with the joints of the text drawn in.

    Args:
        products: (T, T) each, from ``dot_products``.
        boundaries: positions where one part ends and the next begins.
    """
    figure, panels = new_figure(4.6 * len(products), 4.4, len(products))
    image = None
    for axes, (name, values) in zip(panels, products.items()):
        image = axes.imshow(values, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest")
        axes.grid(visible=False)
        for place in boundaries:
            axes.axvline(place - 0.5, color="#222222", lw=0.8, ls=":")
            axes.axhline(place - 0.5, color="#222222", lw=0.8, ls=":")
        axes.set_title(name, loc="left")
        axes.set_xlabel("position")
    panels[0].set_ylabel("position")
    figure.colorbar(image, ax=panels, shrink=0.8, label="dot product of normalised contexts")
    return figure


def context_figure(y: np.ndarray, boundaries: Sequence[float] = (), components: int = 24) -> Any:
    """The components of y along one text, (T, E), the most varying first (CGT, Figure 6b)."""
    order = np.argsort(-y.std(0))[:components]
    figure, (axes,) = new_figure(8.4, 4.0)
    for number, component in enumerate(order):
        axes.plot(y[:, component], lw=0.9, alpha=0.8, color=PALETTE[number % len(PALETTE)])
    for place in boundaries:
        axes.axvline(place - 0.5, color="#222222", lw=1.2, ls=":")
    axes.set_xlabel("position")
    axes.set_ylabel("component of y")
    axes.set_title(f"The context along a joined text ({len(order)} most varying components)", loc="left")
    return figure


def position_figure(losses: Mapping[str, np.ndarray], width: int = 16) -> Any:
    """Loss of the informed models minus the uninformed one by position (CGT, Figures 6a, 13a, 14).

    Args:
        losses: what ``losses_by_position`` returns.
        width: of the running mean over positions.
    """
    figure, (axes,) = new_figure(8.4, 4.2)
    kernel = np.ones(width) / width
    axes.axhline(0, color="#222222", lw=1)
    labels = {
        "specialized": "y frozen",
        "average": "moving average of y",
        "shuffled": "y of another text",
        "baseline": "plain GPT-2",
    }
    shown = [name for name in losses if name != "dynamic"]
    for name, colour in zip(shown, PALETTE):
        difference = np.convolve(losses[name] - losses["dynamic"], kernel, mode="valid")
        axes.plot(
            np.arange(len(difference)) + width / 2, difference, color=colour, lw=1.8, label=labels.get(name, name)
        )
    axes.set_xlabel("position in the second part")
    axes.set_ylabel("loss minus that of the dynamic model (nats)")
    axes.set_title("Knowing the first part through y (below zero: it helps)", loc="left")
    axes.legend(frameon=False)
    return figure


def clusters_figure(points: np.ndarray, classes: Sequence[int], names: Sequence[str], title: str) -> Any:
    """A two-dimensional embedding of document contexts (``embed_2d``), one colour a class (CGT, Figure 6c)."""
    from matplotlib import colormaps

    labels = np.asarray(classes)
    figure, (axes,) = new_figure(7.6, 5.0)
    for number, name in enumerate(names):
        chosen = points[labels == number]
        colour = PALETTE[number] if len(names) <= len(PALETTE) else colormaps["tab20"](number % 20)
        axes.plot(chosen[:, 0], chosen[:, 1], ls="", marker="o", ms=4, alpha=0.75, color=colour, label=name)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(title, loc="left")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def spectrum_figure(spectra: Mapping[str, np.ndarray]) -> Any:
    """Share of power by harmonic of y along the sequence (CGT, Figure 17a), one line a model."""
    figure, (axes,) = new_figure(8.4, 4.2)
    for (name, values), colour in zip(spectra.items(), PALETTE):
        axes.plot(range(1, len(values)), values[1:], lw=1.6, color=colour, label=name)
    axes.set_yscale("log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("harmonic k")
    axes.set_ylabel("share of power")
    axes.set_title("Spectrum of the context along the sequence", loc="left")
    axes.legend(frameon=False)
    return figure
