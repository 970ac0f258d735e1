"""Train on top of transformers' Trainer: ``train`` runs one training from its settings, ``fit`` trains a model."""

from relinear.system.progress import Progress
from relinear.training.callbacks import LatentMoments, read_metrics, read_moments
from relinear.training.fitting import NonFiniteLossError, TrainResult, fit
from relinear.training.run import build_model, read_result, train
from relinear.training.settings import FitSettings, TrainSettings

__all__ = [
    "FitSettings",
    "LatentMoments",
    "NonFiniteLossError",
    "Progress",
    "TrainResult",
    "TrainSettings",
    "build_model",
    "fit",
    "read_metrics",
    "read_moments",
    "read_result",
    "train",
]
