"""``frontier.py`` with gradients at labels that the model draws, as Fisher's matrix has them, in place of the text's.

    python results/compress/drawn_labels.py models/smollm2-rotated --state runs/drawn-labels \\
        --out results/compress/drawn_labels.jsonl ...

The arguments are those of ``frontier.py``. Give a ``--state`` of its own: the moments are others.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

import frontier

layerwise = importlib.import_module("relinear.compress.layerwise")
DRAWS = torch.Generator().manual_seed(0)


def losses(layers: layerwise.LayerByLayer, hidden: Tensor, ids: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """As the method that it replaces; where gradients are recorded the labels are drawn."""
    last = ids.shape[1] - 1
    for start in range(0, last, layerwise.HEAD_TOKENS):
        at = slice(start, min(start + layerwise.HEAD_TOKENS, last))
        piece = hidden[:, at].detach().requires_grad_(torch.is_grad_enabled())
        logits = layers.logits(piece, ids[:, at]).flatten(0, 1).float()
        labels = ids[:, at.start + 1 : at.stop + 1].flatten()
        if torch.is_grad_enabled():
            labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=DRAWS).flatten()
        yield at, piece, F.cross_entropy(logits, labels, reduction="sum")


if __name__ == "__main__":
    layerwise.LayerByLayer.losses = losses
    frontier.main()
