"""A learnt bias on the output head, which stock GPT-2 and Llama models cannot be configured to have."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import torch
from torch import nn

from relinear.core.attachment import AttachmentConfig
from relinear.core.config import register

__all__ = ["HeadBias"]


def _head(model: Any) -> Any:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadBias(AttachmentConfig):
    """Give the output head of a language model a bias of one value a vocabulary entry, starting at zero.

    The head stays the stock ``nn.Linear`` (its forward adds a bias that is there); only the parameter is new. At zero
    the model's outputs do not change.
    """

    kind: ClassVar[str] = "head_bias"

    def check(self, model: nn.Module) -> None:
        """Raise ValueError if ``model`` has no plain linear output head, or one that has a bias already."""
        head = _head(model)
        if type(head) is not nn.Linear:
            raise ValueError(
                f"head_bias needs a model whose output head is an nn.Linear; {type(model).__name__} has "
                f"{'none' if head is None else type(head).__name__}"
            )
        if head.bias is not None:
            raise ValueError(f"the output head of {type(model).__name__} has a bias already")

    def for_part(self, model: nn.Module) -> Self | None:
        """Return nothing, where ``model`` has no output head."""
        return None if _head(model) is None else self

    def attach(self, model: nn.Module) -> None:
        """Register ``bias`` (vocabulary,) on the head, on the weight's device and in its dtype."""
        head = _head(model)
        head.bias = nn.Parameter(torch.zeros(head.out_features, device=head.weight.device, dtype=head.weight.dtype))
