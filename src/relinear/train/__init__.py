"""Training: transformers' Trainer with our callbacks, groups and schedules; ``train`` for runs, ``fit`` for models."""

from typing import TYPE_CHECKING

from relinear.system.lazy import imported_on_first_use
from relinear.train.fit import TrainResult, fit

if TYPE_CHECKING:
    from relinear.train.callbacks import Progress, read_metrics
    from relinear.train.run import build_model, read_result, train
    from relinear.train.settings import FitSettings, TrainSettings
    from relinear.train.trainer import NonFiniteLossError, RelinearTrainer

# Imported on first use: transformers' Trainer takes seconds to import, and settings can be checked without it.
_LAZY = {
    "callbacks": ("Progress", "read_metrics"),
    "run": ("build_model", "read_result", "train"),
    "settings": ("FitSettings", "TrainSettings"),
    "trainer": ("NonFiniteLossError", "RelinearTrainer"),
}

__all__ = [
    "FitSettings",
    "NonFiniteLossError",
    "Progress",
    "RelinearTrainer",
    "TrainResult",
    "TrainSettings",
    "build_model",
    "fit",
    "read_metrics",
    "read_result",
    "train",
]

__getattr__ = imported_on_first_use(__name__, _LAZY)
