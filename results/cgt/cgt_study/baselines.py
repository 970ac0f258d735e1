"""The models that the CGT paper compares with: plain GPT-2s, and one that reads vectors, which no stock class does."""

# Legend: B batch, T positions, D width, F features

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from relinear.contract.config import check_choice
from relinear.models.cgt.model import CGTOutput, squared_error

__all__ = ["PlainRegression", "plain_gpt2"]


class PlainRegression(nn.Module):
    """A plain GPT-2 between vectors and predictions: the baseline of in-context regression (CGT, Figure 4).

    Args:
        config: of the GPT-2; ``vocab_size`` is not used.
        input_features, output_features: sizes of the vectors and of the predictions.
        vector_input: as in ``CGTConfig``: ``learned`` or ``padded``.
    """

    def __init__(self, config: GPT2Config, input_features: int, output_features: int, vector_input: str = "learned"):
        super().__init__()
        check_choice("vector_input", vector_input, ("learned", "padded"))
        if vector_input == "padded" and input_features > config.n_embd:
            raise ValueError(f"{input_features} features cannot be padded to a width of {config.n_embd}")
        self.transformer: Any = GPT2Model(config)
        self.transformer.set_input_embeddings(None)  # vectors take the place of tokens
        self.vector_in = nn.Linear(input_features, config.n_embd) if vector_input == "learned" else None
        self.head = nn.Linear(config.n_embd, output_features)
        for linear in (self.vector_in, self.head):
            if linear is not None:
                nn.init.normal_(linear.weight, std=config.initializer_range)
                nn.init.zeros_(linear.bias)

    def forward(self, vectors: Tensor, targets: Tensor | None = None, target_mask: Tensor | None = None) -> CGTOutput:
        """Predictions (in ``logits``) and their mean squared error; arguments as in ``CGTForRegression``."""
        if self.vector_in is not None:
            x = self.vector_in(vectors)
        else:
            x = nn.functional.pad(vectors, (0, self.transformer.config.n_embd - vectors.shape[-1]))
        where = torch.arange(vectors.shape[1], device=vectors.device).unsqueeze(0)
        hidden = self.transformer(inputs_embeds=x, position_ids=where, use_cache=False).last_hidden_state
        predictions = self.head(hidden)
        loss = None if targets is None else squared_error(predictions, targets, target_mask)
        return CGTOutput(loss=loss, logits=predictions)


def plain_gpt2(width: int, heads: int, *, parameters: int | None = None, **config: Any) -> GPT2LMHeadModel:
    """A plain GPT-2 language model without dropout, as wide as asked or as large as another model.

    Args:
        width: n_embd.
        heads: n_head.
        parameters: None takes ``width``; else the heads become wider, one channel at a time, until it has these.
        config: all else of its ``GPT2Config``.
    """
    without_dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    while parameters is not None:
        with torch.device("meta"):
            sized = GPT2LMHeadModel(GPT2Config(n_embd=width, n_head=heads, **config))
        if sum(p.numel() for p in sized.parameters()) >= parameters:
            break
        width += heads
    return GPT2LMHeadModel(GPT2Config(n_embd=width, n_head=heads, **without_dropout, **config))
