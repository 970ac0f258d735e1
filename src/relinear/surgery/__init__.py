"""Plan, replace, checkpoint, fold: changing a model and bringing it back."""

from relinear.surgery.freeze import train_only_
from relinear.surgery.placements import placement, placement_names

__all__ = ["placement", "placement_names", "train_only_"]
