"""Where a sub-block's output meets the residual stream of a stock decoder layer.

A stock layer computes ``x + module(norm(x))``; its code is not copied here. What a residual method wants instead, say
``meet(x, y)`` with y = module(norm(x)), is had by letting the sub-block return ``meet(x, y) - x``: the layer's own
addition then gives ``meet(x, y)``. Methods that only scale or add to y never subtract, so they are exact. Those that
normalise the sum (Post-LN, DeepNorm) do: in half precision their result carries two roundings, of the size of x and of
the sum, which is what every addition to the stream costs.
"""

import dataclasses

from torch import nn

from relinear.contract.attachment import AttachmentConfig, ResidualAdd, add_part, attachments
from relinear.contract.operator import swap_hooks
from relinear.hf.model_layout import SubBlock, sub_blocks

#: name of the submodule that holds what a residual method learns
SITE = "relinear_residual"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualConfig(AttachmentConfig):
    """Base of the residual methods: at most one a model, on pre-norm decoders whose anatomy is known."""

    def check(self, model: nn.Module) -> None:
        present = [config for config in attachments(model) if isinstance(config, ResidualConfig)]
        if present:
            raise ValueError(f"the model already has the residual method {present[0]}; start from one without")
        sub_blocks(model)

    def site(self, block: SubBlock, index: int, count: int) -> nn.Module:
        """The module for sub-block ``index`` of ``count``: ``forward(x, y)`` returns what is added to the stream x."""
        raise TypeError(f"{type(self).__name__} does not say where its sub-blocks meet the stream")

    def attach(self, model: nn.Module) -> None:
        blocks = sub_blocks(model)
        for index, block in enumerate(blocks):
            add_part(block.module, SITE, self.site(block, index, len(blocks)), block.module)
            connect(block, ResidualAdd(block.module, SITE))


def connect(block: SubBlock, residual_add: ResidualAdd) -> None:
    """Register the hooks of ``residual_add`` on the norm, as it now is, and on the sub-block."""
    block.norm.register_forward_pre_hook(residual_add.enter, with_kwargs=True)
    block.module.register_forward_hook(residual_add.leave)


def without_norm(block: SubBlock) -> nn.Module:
    """Take the norm out of its layer and return it; hooks of what looks at the stream stay where it is read."""
    norm, place = block.norm, nn.Identity()
    swap_hooks(norm, place)
    setattr(block.owner, str(block.norm_name), place)
    return norm
