"""Where a sub-block's output meets the residual stream of a stock decoder layer.

A stock layer computes ``x + module(norm(x))``; its code is not copied here. What a residual method wants instead, say
``meet(x, y)`` with y = module(norm(x)), is had by letting the sub-block return ``meet(x, y) - x``: the layer's own
addition then gives ``meet(x, y)``. Methods that only scale or add to y never subtract, so they are exact. Those that
normalise the sum (Post-LN, DeepNorm) do: in half precision their result carries two roundings, of the size of x and of
the sum, which is what every addition to the stream costs.

The stream x is seen by a hook on the norm and used by a hook on the sub-block. Both run inside the decoder layer's
forward, so gradient checkpointing recomputes them together, and x is let go of as soon as it was used.
"""

# Legend: B batch, T tokens, D width of the residual stream

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

from relinear.core.anatomy import SubBlock, sub_blocks
from relinear.core.attachment import AttachmentConfig, attachments

__all__ = ["SITE", "Junction", "ResidualConfig", "check_meets", "reference_parameter"]

#: name of the submodule that holds what a residual method learns
SITE = "relinear_residual"


class Junction:
    """The hooks of one sub-block. ``owner.name`` is looked up at every call, so that PEFT may wrap that module.

    Args:
        owner: module that has the site.
        name: attribute name of the site, whose ``forward(x, y)`` returns what the stock layer is to add to x.
    """

    def __init__(self, owner: nn.Module, name: str = SITE) -> None:
        self.owner, self.name = owner, name
        self.stream: Tensor | None = None

    def enter(self, norm: nn.Module, args: tuple) -> None:
        """Forward pre-hook of the norm: remember the stream x."""
        self.stream = args[0]

    def leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Forward hook of the sub-block: what it returns (a tensor, or a tuple that starts with one) meets x."""
        stream, self.stream = self.stream, None
        assert stream is not None, "the norm of this sub-block has not run"
        site = getattr(self.owner, self.name)
        if isinstance(output, tuple):
            return (site(stream, check_meets(stream, output[0], module)), *output[1:])
        return site(stream, check_meets(stream, output, module))

    def __getstate__(self) -> dict[str, Any]:
        # A forward that failed half-way may have left a tensor with a graph, which cannot be copied.
        return self.__dict__ | {"stream": None}


def check_meets(stream: Tensor, output: Tensor, module: nn.Module) -> Tensor:
    """``output`` of the sub-block ``module`` if it has the stream's shape; ValueError where it would broadcast."""
    if output.shape != stream.shape:
        raise ValueError(
            f"{type(module).__name__} returned shape {tuple(output.shape)}, but the residual stream that it meets has "
            f"shape {tuple(stream.shape)}; whatever is put into the sub-block must keep that shape"
        )
    return output


def reference_parameter(module: nn.Module) -> nn.Parameter:
    """Return a floating-point parameter whose device and dtype new ones take over."""
    return next(p for p in module.parameters() if p.is_floating_point())


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
            site = self.site(block, index, len(blocks))
            reference = reference_parameter(block.module)
            block.module.add_module(SITE, site.train(block.module.training).requires_grad_(reference.requires_grad))
            self.connect(block, Junction(block.module))

    def connect(self, block: SubBlock, junction: Junction) -> None:
        """Register the junction's hooks on the sub-block and on its norm, as it now is."""
        getattr(block.owner, block.norm_name).register_forward_pre_hook(junction.enter)
        block.module.register_forward_hook(junction.leave)
