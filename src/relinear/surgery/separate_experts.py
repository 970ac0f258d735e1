"""Split a layer's experts, which transformers stores as one tensor, into linear layers, and fuse them again."""

# Legend: K experts of a token, N tokens, D hidden size

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from relinear.contract.attachment import AttachmentConfig
from relinear.contract.config import register
from relinear.contract.linear_layers import linear_of
from relinear.hf.attachments import forget_attachment_
from relinear.hf.config_record import finish_surgery_
from relinear.surgery.plan import attach_
from relinear.surgery.replace_module import replace_module_


class ExpertLayers(nn.Module):
    """Run experts with separate linear layers: ``0.gate_up_proj`` (or ``0.up_proj``), ``0.down_proj``, and so on.

    Layout and activation are those that ``fused``, transformers' module, declares for implementations of experts.
    """

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self._fused = (fused,)  # in a tuple, so that it is not a submodule: its weights are moved to the meta device
        for number in range(fused.num_experts):
            layers = {name: _expert_layer(fused, name, number) for name in _layer_names(fused)}
            self.add_module(str(number), nn.ModuleDict(layers))
        self.train(fused.training)
        fused.to("meta")

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum (N, D) over each token's experts; their indices and weights are (N, K)."""
        (fused,) = self._fused
        activation = fused._apply_gate if fused.has_gate else fused.act_fn
        output = torch.zeros_like(hidden_states)
        for number in top_k_index.unique().tolist():
            first, last = self.get_submodule(str(number)).children()
            token, choice = torch.where(top_k_index == number)
            y = last(activation(first(hidden_states[token]))) * top_k_weights[token, choice, None]
            output.index_add_(0, token, y.to(output.dtype))
        return output

    def fuse(self) -> nn.Module:
        """Return transformers' module with the weights of the layers, which must all be ``nn.Linear``."""
        (fused,) = self._fused
        for name in _layer_names(fused):
            layers: list[Any] = [expert.get_submodule(name) for expert in self.children()]
            for key in ("weight", "bias") if fused.has_bias else ("weight",):
                stacked = torch.stack([getattr(layer, key).detach() for layer in layers])
                stacked = stacked.mT.contiguous() if key == "weight" and fused.is_transposed else stacked
                requires_grad = layers[0].weight.requires_grad
                setattr(fused, name + ("_bias" if key == "bias" else ""), nn.Parameter(stacked, requires_grad))
        return fused.train(self.training)


def _layer_names(fused: Any) -> tuple[str, str]:
    return "gate_up_proj" if fused.has_gate else "up_proj", "down_proj"


def _expert_layer(fused: Any, name: str, number: int) -> nn.Linear:
    stacked = getattr(fused, name)
    weight = stacked[number].t() if fused.is_transposed else stacked[number]
    bias = getattr(fused, f"{name}_bias")[number].clone() if fused.has_bias else None
    return linear_of(weight.clone(memory_format=torch.contiguous_format), bias).requires_grad_(stacked.requires_grad)


def _is_fused(module: Any) -> bool:
    """Return whether ``module`` is a transformers module with only fused experts, in a layout that it declares."""
    if not hasattr(module, "_apply_gate") or getattr(module, "has_post_expert_norm", True):
        return False
    names = {name + end for name in _layer_names(module) for end in ("", "_bias")[: 1 + module.has_bias]}
    return names == {name for name, _ in module.named_parameters()}


@register
class SeparateExperts(AttachmentConfig):
    """Give every expert separate linear layers, which does not change the model's outputs.

    transformers stores the experts of a decoder layer as one tensor, which no pattern can match. The split layers are
    named ``mlp.experts.3.gate_up_proj`` and ``mlp.experts.3.down_proj``. ``relinear.compress`` splits automatically.
    """

    kind = "separate_experts"

    def check(self, model: nn.Module) -> None:
        """Raise ValueError unless the model stores experts as one tensor."""
        if not any(map(_is_fused, model.modules())):
            raise ValueError(f"separate_experts: no module of {type(model).__name__} holds experts as one tensor")

    def attach(self, model: nn.Module) -> None:
        """Replace every module of fused experts by ``ExpertLayers``."""
        for name, module in [*model.named_modules()]:
            if _is_fused(module):
                replace_module_(model, [name], module, ExpertLayers(module))


def fuse_experts_(model: nn.Module) -> None:
    """Undo ``SeparateExperts``, unless a layer of the experts has been replaced."""
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, ExpertLayers)]
    layers = [layer for _, module in modules for expert in module.children() for layer in expert.children()]
    if modules and all(type(layer) is nn.Linear for layer in layers):
        for name, module in modules:
            replace_module_(model, [name], module, module.fuse())
        forget_attachment_(model, SeparateExperts())
        finish_surgery_(model)


@contextmanager
def separate_experts(model: nn.Module) -> Iterator[None]:
    """Split experts into layers within the block and fuse them afterwards, unless a layer was replaced."""
    fused = any(map(_is_fused, model.modules()))
    if fused:
        attach_(model, SeparateExperts())
    try:
        yield
    finally:
        if fused:
            fuse_experts_(model)
