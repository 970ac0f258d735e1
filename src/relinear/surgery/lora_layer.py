"""Adapt an operator by PEFT's LoRA; in a separate file, so that importing relinear does not import PEFT."""

from typing import Any

import torch
from peft import LoraConfig
from peft.tuners import lora
from torch import nn

from relinear.contract.linear_layers import is_conv1d, reference_tensor
from relinear.contract.operator import Operator

#: settings of ``init_lora_weights`` that need no weight of the layer
_INITS = (True, False, "gaussian")


class OperatorLora(lora.Linear):
    """y = operator(x) + scaling * B A dropout(x); the operator is ``base_layer``."""

    @property
    def lora_variants(self) -> dict:
        """Return plain and activated LoRA; DoRA and the others need the layer's weight."""
        variants = getattr(super(), "lora_variants", {})
        return {(): None} | {key: variants[key] for key in [("alora_invocation_tokens",)] if key in variants}

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features  # type: ignore[return-value]

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device, torch.dtype]:
        reference = reference_tensor(base_layer)
        return reference.device, reference.dtype

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Add an adapter.

        Raises:
            ValueError: if a setting of ``config`` needs a weight. The layer is then unchanged.
        """
        name = type(self.get_base_layer()).__name__
        if config.init_lora_weights not in _INITS:
            raise ValueError(
                f"init_lora_weights={config.init_lora_weights!r} starts from the layer's weight, and {name} has none; "
                f"use one of {', '.join(map(repr, _INITS))}"
            )
        if config.use_dora:
            raise ValueError(f"use_dora=True rescales the layer's weight, and {name} has none; use plain LoRA")
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the adapter to the weight of a layer that was an operator until ``relinear.fold_``.

        Raises:
            ValueError: if it still is one, which has no weight.
        """
        layer = self.get_base_layer()
        if isinstance(layer, Operator):
            raise ValueError(
                f"an adapter cannot be merged into {type(layer).__name__}, which has no weight; do not merge it, or "
                "fold the operator first (relinear.fold_)"
            )
        self.fan_in_fan_out = is_conv1d(layer)
        super().merge(safe_merge, adapter_names)
