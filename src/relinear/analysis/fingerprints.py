"""``fingerprints``: the contexts of several inputs side by side (CCL, Figure 7)."""

# Legend: N inputs, T tokens, C context_dim

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relinear.analysis.analyses import Result, Subject
from relinear.analysis.plots import new_figure, plain_text
from relinear.analysis.recording import record_contexts
from relinear.core.context import context_owner
from relinear.pages.blocks import Block, Cell, Chart, Row, Table, Text, axes, heat, numbered

__all__ = ["HOW_TO_READ", "applies", "blocks", "context_fingerprints", "plot_fingerprints", "run"]

#: how to read its figures, for the page
HOW_TO_READ = (
    "Each panel is the context of one input, token by token: inputs whose patterns agree are told apart by "
    "nothing that the operators could use; similarity near 1 everywhere is a context that carries nothing."
)

INPUTS, TOKENS = 3, 32


def context_fingerprints(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """The context of every token of several inputs, and how alike the inputs' contexts are.

    Args:
        model: a model with a context manager.
        ids: (N, T) token ids, one input a row.

    Returns:
        {"contexts": N lists of T lists of C numbers, "ids", "similarity": (N, N) cosine between the inputs' mean
        contexts, "step": mean distance between the contexts of neighbouring tokens, relative to the mean distance
        between any two tokens' contexts (near 1: the context jumps with every token; near 0: it drifts)}.
    """
    contexts = record_contexts(model, ids)
    means = F.normalize(contexts.mean(1), dim=-1)
    step = (contexts[:, 1:] - contexts[:, :-1]).norm(dim=-1).mean()
    flat = contexts.flatten(0, 1)
    others = flat[torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))]
    apart = (flat - others).norm(dim=-1).mean()
    return {
        "ids": ids.tolist(),
        "contexts": contexts.tolist(),
        "similarity": (means @ means.T).tolist(),
        "step": float(step / apart) if apart > 0 else 0.0,
    }


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
        axis.set_xticks(range(len(row)), [plain_text(word) for word in row], rotation=90, fontsize=6.5)
        axis.set_title(f"input {index + 1}", loc="left")
        axis.grid(False)
    axes[0].set_ylabel("dimension of the context")
    figure.colorbar(image, ax=axes, label="value of the context", shrink=0.8)
    return figure


def blocks(numbers: Mapping[str, Any], image_of: Callable[[str], str | None]) -> list[Block]:
    """What a page shows of ``numbers``: how alike the inputs are, and the context of each as a map."""
    similarity = numbers["similarity"]
    names = [f"input {index + 1}" for index in range(len(similarity))]
    rows = [Row([name, *(Cell(f"{v:.2f}", v) for v in row)]) for name, row in zip(names, similarity, strict=True)]
    found: list[Block] = [
        Table(["cosine of mean contexts", *names], rows),
        Text(
            f"From token to token the context moves {numbers['step']:.2f} as far as between any two tokens.", soft=True
        ),
    ]
    flat = sorted(abs(v) for tokens in numbers["contexts"] for row in tokens for v in row)
    limit = flat[int(0.99 * (len(flat) - 1))] or 1.0
    for number, (name, tokens, words) in enumerate(zip(names, numbers["contexts"], numbers["text"], strict=True)):
        table = [[round(v, 3) for v in row] for row in zip(*tokens, strict=True)]
        dimensions = [f"dimension {index}" for index in range(len(table))]
        trace = heat(table, numbered(words), dimensions, (-limit, limit), "context", diverging=True)
        layout = axes("", "", xaxis={"tickangle": -90, "tickfont": {"size": 9}}, yaxis={"nticks": 8})
        text = f"{name}: a column a token, a row a dimension of the context; blue below 0, red above."
        found.append(
            Chart(text, {"data": [trace], "layout": layout}, image_of("fingerprints") if number == 0 else None)
        )
    return found
