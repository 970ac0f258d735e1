"""Models: presets, which are named sizes of stock Hugging Face models, and the Contextually Guided Transformer."""

from relinear.models.heads import HeadBias, ReadoutScale
from relinear.models.presets import (
    draw_as_torch_,
    from_preset,
    is_preset,
    locate_model,
    model_folder,
    preset_config,
    preset_names,
)

__all__ = [
    "HeadBias",
    "ReadoutScale",
    "draw_as_torch_",
    "from_preset",
    "is_preset",
    "locate_model",
    "model_folder",
    "preset_config",
    "preset_names",
]
