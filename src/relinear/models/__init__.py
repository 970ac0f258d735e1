"""Models: named sizes of stock Hugging Face models, and the one model that is no surgery on them."""

from relinear.core.places import is_fetched, missing_directory
from relinear.models.heads import HeadBias, ReadoutScale
from relinear.models.presets import (
    draw_as_torch_,
    from_preset,
    model_folder,
    model_place,
    preset_config,
    preset_names,
    stock_type,
)

__all__ = [
    "HeadBias",
    "ReadoutScale",
    "draw_as_torch_",
    "from_preset",
    "is_fetched",
    "missing_directory",
    "model_folder",
    "model_place",
    "preset_config",
    "preset_names",
    "stock_type",
]
