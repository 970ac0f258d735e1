"""Surgery on models: plan and replace layers, save and load checkpoints, fold operators back."""

from relinear.surgery.freeze import train_only_
from relinear.surgery.placements import placement, placement_names

__all__ = ["placement", "placement_names", "train_only_"]
