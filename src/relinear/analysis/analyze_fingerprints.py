"""``relinear analyze``: the contexts of several inputs side by side."""

from __future__ import annotations

from typing import Any

from torch import nn

from relinear.analysis.analyses import Result, Subject
from relinear.analysis.analyze_tokens import _plain
from relinear.analysis.fingerprints import context_fingerprints
from relinear.analysis.plots import new_figure
from relinear.core.context import context_owner

__all__ = ["applies", "plot_fingerprints", "run"]

INPUTS, TOKENS = 3, 32


def applies(model: nn.Module) -> bool:
    """Whether the model has a context manager."""
    return context_owner(model) is not None


def run(subject: Subject) -> Result:
    """Fingerprints of the first inputs."""
    found = context_fingerprints(subject.model, subject.ids[:INPUTS, :TOKENS])
    words = [[subject.token_text(token) for token in row] for row in found["ids"]]
    rows = found["similarity"]
    pairs = [rows[i][j] for i in range(len(rows)) for j in range(i)]
    alike = f"cosine between the inputs' mean contexts {sum(pairs) / len(pairs):.2f}; " if pairs else ""
    text = f"{alike}the context moves {found['step']:.2f} as far from token to token as between any two tokens"
    return Result(found | {"text": words}, {"fingerprints": plot_fingerprints(found["contexts"], words)}, text)


def plot_fingerprints(contexts: list[list[list[float]]], words: list[list[str]]) -> Any:
    """One panel an input: context dimensions down, tokens across, one colour scale for all."""
    import numpy as np

    table = np.array(contexts)
    limit = float(np.quantile(np.abs(table), 0.99)) or 1.0
    figure, axes = new_figure(0.16 * sum(len(row) for row in words) + 2.5, 4.6, len(words), sharey=True)
    for index, (axis, values, row) in enumerate(zip(axes, table, words, strict=True)):
        image = axis.imshow(values.T, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
        axis.set_xticks(range(len(row)), [_plain(word) for word in row], rotation=90, fontsize=6.5)
        axis.set_title(f"input {index + 1}", loc="left")
        axis.grid(False)
    axes[0].set_ylabel("dimension of the context")
    figure.colorbar(image, ax=axes, label="value of the context", shrink=0.8)
    return figure
