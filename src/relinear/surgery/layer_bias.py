"""Add biases to linear layers of a stock model that have none, so that operators that replace them have biases, too."""

from typing import Any, Self

import torch
from torch import nn

from relinear.contract.attachment import AttachmentConfig
from relinear.contract.config import register
from relinear.hf.model_layout import find_module


@register
class LayerBias(AttachmentConfig):
    """Give linear layers a bias of zeros, which does not change the model's outputs.

    The layers remain ``nn.Linear``. An operator that replaces one later has a bias, too.

    Attributes:
        layers: names of the layers in the model.
    """

    kind = "layer_bias"

    layers: tuple[str, ...] = ()

    def check(self, model: nn.Module) -> None:
        """Raise ValueError unless there are layers, and all are in the model, plain, and without a bias."""
        if not self.layers:
            raise ValueError("layer_bias: layers is empty; name the linear layers that get a bias")
        for name in self.layers:
            layer = find_module(model, name)
            if type(layer) is not nn.Linear:
                got = "no such module" if layer is None else type(layer).__name__
                raise ValueError(f"layer_bias: {name} must be an nn.Linear of {type(model).__name__}; it is {got}")
            if layer.bias is not None:
                raise ValueError(f"layer_bias: {name} has a bias already")

    def for_model(self, model: nn.Module) -> Self | None:
        """Return the biases of the layers that ``model`` has."""
        layers = tuple(name for name in self.layers if find_module(model, name) is not None)
        return self if layers == self.layers else self.replace(layers=layers) if layers else None

    def attach(self, model: nn.Module) -> None:
        """Register ``bias`` (O,) on every layer, with the device, dtype and ``requires_grad`` of its weight."""
        for name in self.layers:
            layer: Any = find_module(model, name)
            weight = layer.weight
            zeros = torch.zeros(layer.out_features, device=weight.device, dtype=weight.dtype)
            layer.bias = nn.Parameter(zeros, requires_grad=weight.requires_grad)
