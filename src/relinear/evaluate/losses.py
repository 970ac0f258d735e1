"""Compute token losses and perplexity, for evaluation, validation, distillation and compression alike."""

# Legend: B batch, T tokens, V vocabulary

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from relinear.hf.labels import IGNORED_LABEL


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss in nats (B, T - 1) of every token but the first, in float32; zero where a label is ignored.

    Args:
        logits: (B, T, V) at every token.
        labels: (B, T) the tokens themselves, not shifted; ``IGNORED_LABEL`` for tokens that do not count.
    """
    # Row by row, as float32 logits of all rows take gigabytes more for a vocabulary of 50,000.
    rows = zip(logits[:, :-1], labels[:, 1:], strict=True)
    losses = [F.cross_entropy(row.float(), label, reduction="none", ignore_index=IGNORED_LABEL) for row, label in rows]
    return torch.stack(losses)


def perplexity_of(loss: float) -> float:
    """Return exp(loss), for a mean loss in nats; at most exp(700), as larger numbers do not fit a float."""
    return math.exp(min(loss, 700.0))
