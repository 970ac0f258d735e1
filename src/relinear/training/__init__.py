"""Training: transformers' Trainer with our callbacks, groups and schedules; ``train`` for runs, ``fit`` for models."""

from typing import TYPE_CHECKING, Any

from relinear.system.progress import Progress
from relinear.training.callbacks import LatentMoments, read_metrics, read_moments
from relinear.training.fitting import NonFiniteLossError, TrainResult, fit
from relinear.training.run import build_model, read_result, train
from relinear.training.settings import FitSettings, TrainSettings

if TYPE_CHECKING:
    from relinear.training.trainer import RelinearTrainer

__all__ = [
    "FitSettings",
    "LatentMoments",
    "NonFiniteLossError",
    "Progress",
    "RelinearTrainer",
    "TrainResult",
    "TrainSettings",
    "build_model",
    "fit",
    "read_metrics",
    "read_moments",
    "read_result",
    "train",
]


def __getattr__(name: str) -> Any:
    """``RelinearTrainer`` on first use: transformers' Trainer takes seconds to import."""
    if name != "RelinearTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from relinear.training.trainer import RelinearTrainer

    return RelinearTrainer
