"""Context fingerprints: what the context of several inputs looks like side by side (CCL, Figure 7)."""

# Legend: N inputs, T tokens, C context_dim

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relinear.analysis.record_gates import record_contexts

__all__ = ["context_fingerprints"]


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
