"""Compute token losses and perplexity, for evaluation, validation, distillation and compression alike."""

# Legend: N blocks, B batch, T tokens, V vocabulary

import math
from collections.abc import Iterator
from typing import Any

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


@torch.no_grad()
def batch_losses(model: Any, blocks: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Run ``model``, in its present mode, on token ids (N, T), ``batch`` blocks at a time.

    Yields:
        For each batch its losses (B, T - 1), as ``token_losses``, and logits (B, T, V). Nothing without logits.
    """
    device = next(model.parameters()).device
    options = {"use_cache": False} if hasattr(model, "generate") else {}
    for ids in blocks.split(batch):
        ids = ids.to(device)
        logits = getattr(model(input_ids=ids, **options), "logits", None)
        if logits is None:
            return
        yield token_losses(logits, ids), logits


def kl_terms(logits: Tensor, target_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute the terms (..., V) of KL(softmax(target_logits / temperature) || softmax(logits / temperature))."""
    ours, target = ((values.float() / temperature).log_softmax(-1) for values in (logits, target_logits))
    return F.kl_div(ours, target, log_target=True, reduction="none")


def perplexity_of(loss: float) -> float:
    """Return exp(loss), for a mean loss in nats; at most exp(700), as larger numbers do not fit a float."""
    return math.exp(min(loss, 700.0))
