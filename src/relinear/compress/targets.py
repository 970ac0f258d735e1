"""The linear layers of a decoder that something may take the place of, by name and by decoder layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from relinear.compress.settings import CompressSettings
from relinear.core.anatomy import layer_index
from relinear.core.operator import OperatorConfig, linear_features
from relinear.surgery.patterns import ALL_LINEAR
from relinear.surgery.plan import plan

__all__ = ["by_decoder_layer", "check_tokens", "linear_layers", "model_name"]


def linear_layers(
    model: Any, targets: str | Iterable[str] = ALL_LINEAR, exclude: str | Iterable[str] | None = None
) -> dict[str, nn.Module]:
    """Return the linear layers that patterns name, operators among them; arguments as in ``replace_``."""
    patterns = [targets] if isinstance(targets, str) else list(targets)
    smallest = OperatorConfig.from_dict({"kind": "low_rank", "rank": 1})
    found = plan(model, dict.fromkeys(patterns, smallest), exclude=exclude).replacements
    return {replacement.name: replacement.target.module for replacement in found}


def by_decoder_layer(model: Any, modules: Mapping[str, nn.Module]) -> dict[int | None, dict[str, nn.Module]]:
    """Return layers by the index of their decoder layer; under None what lies outside of these."""
    found: dict[int | None, dict[str, nn.Module]] = {}
    for name, module in modules.items():
        found.setdefault(layer_index(model, name), {})[name] = module
    return found


def check_tokens(settings: CompressSettings, modules: Iterable[nn.Module]) -> None:
    """Raise ValueError unless calibration sees as many tokens as the widest of the layers has inputs."""
    widest = max(linear_features(module)[0] for module in modules)
    seen = settings.blocks * settings.sequence_length
    if seen < widest:
        raise ValueError(
            f"tokens={settings.tokens}, in whole blocks of sequence_length={settings.sequence_length} {seen:,}, "
            f"are fewer than the widest layer has inputs, {widest:,}; use more"
        )


def model_name(model: Any) -> str:
    """Return what a model is called: the last part of where it was loaded from, or its class."""
    return Path(getattr(model, "name_or_path", "") or type(model).__name__).name
