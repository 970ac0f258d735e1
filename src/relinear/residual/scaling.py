"""Residual methods that scale a sub-block's input or output: LayerNorm Scaling and ReZero."""

# Legend: D width of the residual stream

import math
from typing import Any

import torch
from torch import Tensor, nn

from relinear.activations.residual_hooks import ResidualHooks
from relinear.contract.attachment import add_part, factory_kwargs_like
from relinear.contract.config import register
from relinear.hf.sub_blocks import sub_blocks
from relinear.residual.config import PART_NAME, ResidualConfig, connect, without_norm


class _Scale(nn.Module):
    """Return alpha y, with alpha (1,), zero at first."""

    def __init__(self, device=None, dtype=None):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.alpha)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.alpha * y


@register
class ReZero(ResidualConfig):
    """Weigh sub-blocks by a learnt alpha, 0 at first: x_{i+1} = x_i + alpha_i F(x_i) (Bachlechner et al., 2021, Eq. 2).

    The paper is "ReZero is all you need". At first the model is only embedding, final norm and head. As in the paper's
    Transformer, both sub-blocks of a layer share one alpha, and there is no normalisation inside the layers.

    Args:
        shared: one alpha per layer (the paper); False: one per sub-block.
        keep_norms: keep the norm before each sub-block, x + alpha F(norm(x)), instead of removing it (the paper).

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> relinear.attach_(model, relinear.residual.ReZero())
        >>> float(model.get_parameter("model.layers.0.relinear_residual.alpha"))
        0.0
    """

    kind = "rezero"

    shared: bool = True
    keep_norms: bool = False

    def attach(self, model: nn.Module) -> None:
        for block in sub_blocks(model):
            owner = block.owner if self.shared else block.module
            if not hasattr(owner, PART_NAME):
                add_part(owner, PART_NAME, _Scale(**factory_kwargs_like(block.module)), block.module)
            if not self.keep_norms:
                without_norm(block)
            connect(block, ResidualHooks(owner, PART_NAME))


def scale_output(norm: nn.Module, args: tuple, output: Any) -> Any:
    """Scale the output of a norm by ``relinear_scale``, as a forward hook."""
    return output * norm.relinear_scale


@register
class LayerNormScaling(ResidualConfig):
    """Divide the norms' outputs in layer l = 1, 2, ... by sqrt(l) (Sun et al., "The curse of depth", 2025, Eq. 6).

    The input of both sub-blocks is norm(x) / sqrt(l). Nothing is learnt. The paper trains from scratch with it; a
    pretrained model's outputs change, as the inputs of all layers but the first become smaller.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> relinear.attach_(model, relinear.residual.LayerNormScaling())
        >>> model(torch.randint(258, (1, 8))).logits.shape
        torch.Size([1, 8, 258])
    """

    kind = "layernorm_scaling"

    def attach(self, model: nn.Module) -> None:
        for block in sub_blocks(model):
            block.norm.relinear_scale = 1 / math.sqrt(block.layer + 1)  # type: ignore[assignment]
            block.norm.register_forward_hook(scale_output)
