"""Plan, replace, checkpoint, fold: changing a model and bringing it back."""

from relinear.surgery.freeze import train_only_
from relinear.surgery.lora import lora_on_operators_
from relinear.surgery.placements import placement, placement_names

__all__ = ["lora_on_operators_", "placement", "placement_names", "train_only_"]
