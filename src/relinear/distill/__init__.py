"""Distil a pretrained model: fit operators to the outputs of its layers, one decoder layer after another."""

from relinear.distill.report import DistillReport, LayerFit
from relinear.distill.run import distill_
from relinear.distill.settings import DistillSettings

__all__ = ["DistillReport", "DistillSettings", "LayerFit", "distill_"]
