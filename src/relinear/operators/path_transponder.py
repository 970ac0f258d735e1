"""Path-level modulators: contextual gates on the output of a whole sub-block (self-attention, MLP), Eq. 7."""

# Legend: B batch, T tokens, D width of the residual stream

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import nn

from relinear.core.anatomy import paths
from relinear.core.attachment import AttachmentConfig
from relinear.core.config import layer_indices, register
from relinear.core.operator import check_features
from relinear.operators.transponder import ModulatorSettings, build_modulator

__all__ = ["PathTransponder"]

_NAME = "relinear_modulator"


def modulate_output(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of a sub-block: scale what it returns (a tensor, or a tuple that starts with one)."""
    x = args[0] if args else kwargs["hidden_states"]
    # a narrower output would be stretched over the stream's width
    check_features(output[0] if isinstance(output, tuple) else output, x.shape[-1], module)
    if isinstance(output, tuple):
        return (module.relinear_modulator(x, output[0]), *output[1:])  # type: ignore[operator]
    return module.relinear_modulator(x, output)  # type: ignore[operator]


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class PathTransponder(ModulatorSettings, AttachmentConfig):
    """Y_l = Y_{l-1} + F(Y_{l-1}) * G(Y_{l-1}): one modulator for every self-attention and MLP of the decoder.

    The gate reads what the sub-block reads (the normalised stream, as the projection-level modulators do). Each
    modulator is the submodule ``relinear_modulator`` of its sub-block, which PEFT's ``modules_to_save=["modulator"]``
    finds too. Table 1's Modulator-path-scalar is ``channel=False``, Modulator-path-channel ``scalar=False``.

    Args:
        attention, mlp: which sub-blocks are modulated.
        layers: decoder layers by index, negative ones from the end; None for all.
        rank, channel, scalar, contextual, learnable_alpha, init: see ``ModulatorSettings``.
    """

    kind: ClassVar[str] = "path_transponder"

    attention: bool = True
    mlp: bool = True
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.attention and not self.mlp:
            raise ValueError("a path-level modulator needs attention=True, mlp=True or both")
        if self.layers is not None:
            object.__setattr__(self, "layers", layer_indices(self.layers))

    def _targets(self, model: nn.Module) -> list[nn.Module]:
        wanted = {"attention": self.attention, "mlp": self.mlp}
        return [path.module for path in paths(model, self.layers) if wanted[path.role]]

    def check(self, model: nn.Module) -> None:
        for module in self._targets(model):
            if hasattr(module, _NAME):
                raise ValueError(f"{type(module).__name__} already has a modulator; start from a model without one")

    def attach(self, model: nn.Module) -> None:
        width = model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
        for module in self._targets(model):
            reference = next(p for p in module.parameters() if p.is_floating_point())
            modulator = build_modulator(self, width, width, device=reference.device, dtype=reference.dtype)
            module.add_module(_NAME, modulator.requires_grad_(reference.requires_grad).train(module.training))
            # prepended: a residual method that reads this sub-block's output must see it modulated
            module.register_forward_hook(modulate_output, prepend=True, with_kwargs=True)
