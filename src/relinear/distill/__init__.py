"""Distillation: operators fitted to the layers of a pretrained model, one decoder layer after another."""

from relinear.distill.report import DistillProgress, DistillReport, LayerFit
from relinear.distill.run import distill_
from relinear.distill.settings import DistillSettings

__all__ = ["DistillProgress", "DistillReport", "DistillSettings", "LayerFit", "distill_"]
