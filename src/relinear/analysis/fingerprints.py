"""The contexts of several inputs, compared (CCL, Figure 7)."""

# Legend: N inputs, T tokens, C context_dim

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relinear.activations.shared_context import context_owner
from relinear.analysis.analyses import Subject, high_percentile
from relinear.analysis.recording import record_contexts
from relinear.pages.blocks import Block, Cell, Chart, Row, Table, Text
from relinear.pages.figures import Heat, Panel, numbered

#: how to read its figures, for the page
HOW_TO_READ = (
    "Each panel is the context of one input, token by token. Inputs with equal patterns look the same to the "
    "operators. If all similarities are near 1, the context carries no information."
)

INPUTS, TOKENS = 3, 32


def context_fingerprints(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """Return the context of every token of several inputs, and how similar the inputs' contexts are.

    Args:
        model: a model with a ``ContextManager``.
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
    shuffled = flat[torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))]
    apart = (flat - shuffled).norm(dim=-1).mean()
    return {
        "ids": ids.tolist(),
        "contexts": contexts.tolist(),
        "similarity": (means @ means.T).tolist(),
        "step": float(step / apart) if apart > 0 else 0.0,
    }


def applies(model: nn.Module) -> bool:
    """Return whether the model has a ``ContextManager``."""
    return context_owner(model) is not None


def run(subject: Subject) -> dict[str, Any]:
    """Return fingerprints of the first inputs."""
    fingerprints = context_fingerprints(subject.model, subject.ids[:INPUTS, :TOKENS])
    words = [[subject.token_text(token) for token in row] for row in fingerprints["ids"]]
    return fingerprints | {"text": words}


def blocks(numbers: Mapping[str, Any]) -> list[Block]:
    """Return the page's blocks for ``numbers``: how similar the inputs are, and each context as a heat map."""
    similarity = numbers["similarity"]
    names = [f"input {index + 1}" for index in range(len(similarity))]
    rows = [Row([name, *(Cell.of(v, ".2f") for v in row)]) for name, row in zip(names, similarity, strict=True)]
    page_blocks: list[Block] = [
        Table(["cosine of mean contexts", *names], rows),
        Text(
            f"From token to token the context moves {numbers['step']:.2f} as far as between any two tokens.", soft=True
        ),
    ]
    limit = high_percentile(map(abs, row) for tokens in numbers["contexts"] for row in tokens) or 1.0
    for name, tokens, words in zip(names, numbers["contexts"], numbers["text"], strict=True):
        table = [[round(v, 3) for v in row] for row in zip(*tokens, strict=True)]
        x, y = numbered(words), [f"dimension {index}" for index in range(len(table))]
        heat = Heat(values=table, x=x, y=y, bounds=(-limit, limit), what="context", diverging=True)
        text = f"{name}: a column per token, a row a dimension of the context; blue below 0, red above."
        page_blocks.append(Chart(text, Panel([heat], title=name), stem="fingerprints"))
    return page_blocks
