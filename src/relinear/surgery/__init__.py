"""Surgery on models: plan and replace layers, save and load checkpoints, fold operators back.

``relinear`` exports the functions for these (``plan``, ``replace_``, ``fold_`` and others); the rest is here.
"""

from relinear.surgery.freeze import train_only_
from relinear.surgery.placements import placement, placement_names

__all__ = ["placement", "placement_names", "train_only_"]
