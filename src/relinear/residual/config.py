"""Base class of residual methods, which define how a sub-block's output is added to a stock decoder's residual stream.

A stock layer computes ``x + y`` with y = module(norm(x)). To compute ``f(x, y)`` instead, a residual method makes the
sub-block return ``f(x, y) - x``. Methods that scale y or add to it are exact. Those that normalise the sum (Post-LN,
DeepNorm) subtract x, which rounds twice in half precision.
"""

import dataclasses

from torch import nn

from relinear.activations.residual_hooks import ResidualHooks
from relinear.contract.attachment import AttachmentConfig, add_part
from relinear.contract.module_state import swap_hooks_
from relinear.deprecated import with_attributes_of_0_2
from relinear.hf.attachments import attachments
from relinear.hf.sub_blocks import SubBlock, sub_blocks

#: name of the submodule with a residual method's parameters
PART_NAME = "relinear_residual"


@with_attributes_of_0_2
@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualConfig(AttachmentConfig):
    """Settings of a residual method: at most one per model, for pre-norm decoders (``sub_blocks``)."""

    def check(self, model: nn.Module) -> None:
        present = [config for config in attachments(model) if isinstance(config, ResidualConfig)]
        if present:
            raise ValueError(f"the model already has the residual method {present[0]}; start from one without")
        sub_blocks(model)

    def residual_part(self, block: SubBlock, index: int, count: int) -> nn.Module:
        """Return the module of sub-block ``index`` of ``count``: its ``forward(x, y)`` is added to the stream x."""
        raise NotImplementedError(f"{type(self).__name__} does not implement residual_part")

    def attach(self, model: nn.Module) -> None:
        blocks = sub_blocks(model)
        for index, block in enumerate(blocks):
            add_part(block.module, PART_NAME, self.residual_part(block, index, len(blocks)), block.module)
            connect(block, ResidualHooks(block.module, PART_NAME))


def connect(block: SubBlock, hooks: ResidualHooks) -> None:
    """Register ``hooks`` on the sub-block and on its current norm."""
    block.norm.register_forward_pre_hook(hooks.save_input, with_kwargs=True)
    block.module.register_forward_hook(hooks.replace_output)


def without_norm(block: SubBlock) -> nn.Module:
    """Replace the norm in its layer by an identity, which keeps the norm's hooks, and return the norm."""
    norm, identity = block.norm, nn.Identity()
    swap_hooks_(norm, identity)
    setattr(block.owner, str(block.norm_name), identity)
    return norm
