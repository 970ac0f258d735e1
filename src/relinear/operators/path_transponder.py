"""Path-level modulators: contextual gates on the output of a whole self-attention or MLP (Transponder, Eq. 7)."""

# Legend: B batch, T tokens, D width of the residual stream

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import nn

from relinear.activations.residual_hooks import ResidualHooks, apply_to_output
from relinear.contract.attachment import AttachmentConfig, add_part, factory_kwargs_like
from relinear.contract.config import register
from relinear.hf.model_config import text_config
from relinear.hf.model_layout import layer_indices
from relinear.hf.sub_blocks import SubBlock, sub_blocks
from relinear.operators.transponder import ModulatorConfig, build_modulator

_NAME = "relinear_modulator"


def modulate_output(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Scale a sub-block's output by gates computed from its input; a forward hook."""
    return apply_to_output(module, output, args[0] if args else kwargs["hidden_states"], getattr(module, _NAME))


@register
class PathTransponder(ModulatorConfig, AttachmentConfig):
    """Modulate every self-attention and MLP of the decoder: Y_l = Y_{l-1} + F(Y_{l-1}) * G(Y_{l-1}).

    Each modulator is the submodule ``relinear_modulator`` of its sub-block, which PEFT's
    ``modules_to_save=["modulator"]`` finds too. Table 1's Modulator-path-scalar is ``channel=False``,
    Modulator-path-channel ``scalar=False``.

    Args:
        attention, mlp: which sub-blocks are modulated.
        layers: decoder layers by index, negative ones from the end; None for all.
        reads: what the gates read: "stream", the residual stream Y_{l-1} (Eq. 7), whose norm grows with depth in a
            pre-norm model; or "normed", the sub-block's normalised input, as the projection-level modulators do. Models
            saved before this setting existed have "normed".
        rank, channel, scalar, contextual, learnable_alpha, init, phi, shared, biases: see ``ModulatorConfig``.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> relinear.attach_(model, relinear.PathTransponder(mlp=False))
        >>> relinear.surgery.train_only_(model, "relinear_modulator")
        8232
    """

    kind = "path_transponder"
    legacy_defaults: ClassVar[Mapping[str, Any]] = {"reads": "normed"}

    attention: bool = True
    mlp: bool = True
    layers: tuple[int, ...] | None = None
    reads: Literal["stream", "normed"] = "stream"

    def __post_init__(self) -> None:
        if self.layers is not None:
            object.__setattr__(self, "layers", layer_indices(self.layers))
        super().__post_init__()
        if not self.attention and not self.mlp:
            raise ValueError("a path-level modulator needs attention=True, mlp=True or both")

    def _targets(self, model: nn.Module) -> list[SubBlock]:
        enabled = {"attention": self.attention, "mlp": self.mlp}
        return [block for block in sub_blocks(model, self.layers, plain=False) if enabled[block.role]]

    def check(self, model: nn.Module) -> None:
        for block in self._targets(model):
            name = type(block.module).__name__
            if hasattr(block.module, _NAME):
                raise ValueError(f"{name} already has a modulator; start from a model without one")
            if self.reads == "stream" and block.norm_name is None:
                raise ValueError(f"layer {block.layer}: no norm reads the stream for {name}; use reads='normed'")

    def attach(self, model: nn.Module) -> None:
        width = text_config(model).hidden_size
        for block in self._targets(model):
            module = block.module
            add_part(module, _NAME, build_modulator(self, width, width, **factory_kwargs_like(module)), module)
            # prepended: a residual method that reads this sub-block's output must see it modulated
            if self.reads == "normed" or block.norm_name is None:
                module.register_forward_hook(modulate_output, prepend=True, with_kwargs=True)
            else:
                hooks = ResidualHooks(module, _NAME)
                getattr(block.owner, block.norm_name).register_forward_pre_hook(hooks.save_input, with_kwargs=True)
                module.register_forward_hook(hooks.replace_output, prepend=True)
