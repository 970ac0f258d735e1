"""Attachments on the output head that GPT-2's and Llama's configs lack: a bias, and a constant factor."""

from typing import Annotated, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from relinear.contract.attachment import AttachmentConfig
from relinear.contract.config import register
from relinear.hf.model_layout import output_head

#: attribute of the head that holds the factor
SCALE = "relinear_readout_scale"


class _OnHead(AttachmentConfig):
    """Base of attachments on the output head."""

    def for_model(self, model: nn.Module) -> Self | None:
        """Return None if ``model`` has no output head."""
        return None if output_head(model) is None else self


@register
class HeadBias(_OnHead):
    """Give the output head of a language model a bias, with one value per vocabulary entry, initialised at zero.

    The head stays the stock ``nn.Linear``, whose forward adds the new parameter. As long as it is zero, the model's
    outputs do not change.
    """

    kind = "head_bias"

    def check(self, model: nn.Module) -> None:
        """Raise ValueError if the output head of ``model`` is no plain linear layer, or has a bias already."""
        head = output_head(model)
        if type(head) is not nn.Linear or head.bias is not None:
            raise ValueError(f"head_bias needs an output head that is an nn.Linear without a bias, got {head}")

    def attach(self, model: nn.Module) -> None:
        """Register ``bias`` (vocabulary,) on the head, on the weight's device and in its dtype."""
        head = output_head(model)
        head.bias = nn.Parameter(torch.zeros(head.out_features, device=head.weight.device, dtype=head.weight.dtype))


def scale_input(head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Scale the head's input, so that its bias is not scaled; a forward pre-hook."""
    return (args[0] * getattr(head, SCALE), *args[1:])


@register
class ReadoutScale(_OnHead):
    """Scale the head's input by a fixed factor: logits = head(factor * x).

    In the maximal update parametrisation (muP) the learning rate of an output head is proportional to 1 / width, and
    that of an embedding is constant. A weight that is both keeps the embedding's learning rate and initialisation, and
    the logits get the factor base width / width (Yang et al., "Tensor programs V", 2022, Table 8).

    Args:
        factor: factor on the head's input; positive.
    """

    kind = "readout_scale"

    factor: Annotated[float, Field(gt=0)] = 1.0

    def check(self, model: nn.Module) -> None:
        """Raise ValueError if ``model`` has no output head, or one that is scaled already."""
        head = output_head(model)
        if head is None or hasattr(head, SCALE):
            raise ValueError(f"readout_scale needs an output head that is not scaled already, got {head}")

    def attach(self, model: nn.Module) -> None:
        """Register the factor and the hook on the head."""
        head = output_head(model)
        setattr(head, SCALE, self.factor)
        head.register_forward_pre_hook(scale_input)
