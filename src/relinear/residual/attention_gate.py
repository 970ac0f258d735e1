"""Gates on the attention's output (Qiu et al., "Gated attention for large language models: non-linearity, sparsity, and
attention-sink-free", 2025)."""

# Legend: B batch, T tokens, D width of the residual stream, H heads, C channels per head

from typing import Any, Literal

import torch
from torch import Tensor, nn

from relinear.activations.hooks import HasHookPoints
from relinear.activations.residual_hooks import ResidualHooks
from relinear.contract.attachment import AttachmentConfig, add_part, factory_kwargs_like
from relinear.contract.config import register
from relinear.contract.input_checks import check_features
from relinear.contract.linear_layers import linear_features
from relinear.contract.operator import is_replaceable
from relinear.hf.model_config import text_config
from relinear.hf.sub_blocks import SubBlock, sub_blocks

_GATE = "relinear_gate"
_OUTPUT_PROJECTIONS = ("o_proj", "c_proj")


class _Gate(HasHookPoints, nn.Module):
    """Multiply y (..., H C) by sigmoid(W_theta x), with one gate per head or per channel.

    Parameter: ``weight`` W_theta, (H, D) for heads or (H C, D) for channels. Hook point: ``head`` or ``channel``.
    """

    constant_initialized = ("weight",)

    def __init__(self, width: int, gates: int, channels: int, kw: dict[str, Any]):
        super().__init__()
        self.channels = channels
        self.weight = nn.Parameter(torch.empty(gates, width, **kw))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        check_features(x, self.weight.shape[1], self)
        check_features(y, self.channels, self)
        wide = torch.promote_types(y.dtype, torch.float32)
        gate = torch.sigmoid(torch.nn.functional.linear(x, self.weight).to(wide))
        gate = self.hooked(self._name, gate)
        grouped = y.unflatten(-1, (self.weight.shape[0], -1))
        return (grouped * gate.unsqueeze(-1)).to(y.dtype).flatten(-2)

    @property
    def _name(self) -> str:
        return "channel" if self.weight.shape[0] == self.channels else "head"

    def hook_sizes(self) -> dict[str, int]:
        return {self._name: self.weight.shape[0]}

    def flops_per_token(self) -> int:
        """Return the FLOPs per token of the product with W_theta, the sigmoid and the gating."""
        gates, width = self.weight.shape
        return 2 * gates * width + 5 * gates + self.channels


@register
class SDPAGate(AttachmentConfig):
    """Gate the attention's output: Y' = Y * sigmoid(X W_theta), where X is the input of the attention block (Eq. 5).

    This is the paper's best position, G1: after scaled dot-product attention, before the output projection. It can be
    combined with any residual method and operator. At first Y' is about Y / 2, so a pretrained model's outputs change.
    The gate on every projection, ALL-Gate in the Transponder paper, is the operator ``OutputGate`` on "all-linear".

    Args:
        per: "head" (one gate per head and token) or "channel" (one per channel of each head, as in the paper).

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> relinear.attach_(model, relinear.residual.SDPAGate(per="channel"))
        >>> model(torch.randint(258, (1, 8))).logits.shape
        torch.Size([1, 8, 258])
    """

    kind = "sdpa_gate"

    per: Literal["head", "channel"] = "head"

    def check(self, model: nn.Module) -> None:
        for block in _attentions(model):
            _output_projection(block)
            if hasattr(block.module, _GATE):
                raise ValueError("the attention already has a gate; start from a model without one")

    def attach(self, model: nn.Module) -> None:
        config = text_config(model)
        for block in _attentions(model):
            projection = _output_projection(block)
            channels, width = linear_features(getattr(block.module, projection))[0], config.hidden_size
            gates = config.num_attention_heads if self.per == "head" else channels
            gate = _Gate(width, gates, channels, factory_kwargs_like(block.module))
            add_part(block.module, _GATE, gate, block.module)
            hooks = _BeforeProjection(block.module, projection)
            block.module.register_forward_pre_hook(hooks.save_input, with_kwargs=True)


class _BeforeProjection(ResidualHooks):
    """Gate the input of the output projection, also after an operator or a LoRA layer has replaced it."""

    def __init__(self, owner: nn.Module, projection: str) -> None:
        super().__init__(owner, _GATE)
        self.projection = projection
        self.hooked = getattr(owner, projection)
        self.handle = self.hooked.register_forward_pre_hook(self.replace_input)

    def save_input(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        super().save_input(module, args, kwargs)
        projection = getattr(self.owner, self.projection)
        if projection is not self.hooked:  # PEFT has wrapped it, or removed its wrapper
            self.handle.remove()
            self.hooked, self.handle = projection, projection.register_forward_pre_hook(self.replace_input)


def _attentions(model: nn.Module) -> list[SubBlock]:
    return [block for block in sub_blocks(model) if block.role == "attention"]


def _output_projection(block: SubBlock) -> str:
    """Return the name of the output projection in the attention."""
    for name in _OUTPUT_PROJECTIONS:
        module = getattr(block.module, name, None)
        if isinstance(module, nn.Module) and is_replaceable(module):
            return name
    raise ValueError(
        f"layer {block.layer}: {type(block.module).__name__} has no linear {' or '.join(_OUTPUT_PROJECTIONS)}"
    )
