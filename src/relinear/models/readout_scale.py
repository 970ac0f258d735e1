"""A fixed factor on the logits: what an output head that shares the embedding's weight needs to be as wide as it is."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from relinear.core.attachment import AttachmentConfig
from relinear.core.config import NonNegative, register

__all__ = ["SCALE", "ReadoutScale"]

#: attribute of the head that holds the factor
SCALE = "relinear_readout_scale"


def scale_input(head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Forward pre-hook of the head: what it reads, times the factor, so that a bias of the head stays as it is."""
    return (args[0] * getattr(head, SCALE), *args[1:])


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadoutScale(AttachmentConfig):
    """logits = head(factor * x), with a factor that is not learnt.

    In the maximal update parametrisation an output head learns at a rate in proportion to 1 / width and an embedding
    at a constant one. A weight that is both keeps the embedding's rate and start, and the logits take the factor
    base width / width (Yang et al., "Tensor programs V", 2022, Table 8).

    Args:
        factor: on what the head reads; positive.
    """

    kind: ClassVar[str] = "readout_scale"

    factor: NonNegative = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.factor:
            raise ValueError(
                f"factor must be positive, got {self.factor!r}: the logits would be the same for all tokens"
            )

    def check(self, model: nn.Module) -> None:
        """Raise ValueError if ``model`` has no output head, or one that is scaled already."""
        head = _head(model)
        if head is None:
            raise ValueError(f"readout_scale needs a model with an output head; {type(model).__name__} has none")
        if hasattr(head, SCALE):
            raise ValueError(f"the output head of {type(model).__name__} is scaled already")

    def for_part(self, model: nn.Module) -> Self | None:
        """Return nothing, where ``model`` has no output head."""
        return None if _head(model) is None else self

    def attach(self, model: nn.Module) -> None:
        """Scale what the head reads."""
        head = _head(model)
        setattr(head, SCALE, self.factor)
        head.register_forward_pre_hook(scale_input)


def _head(model: Any) -> Any:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
