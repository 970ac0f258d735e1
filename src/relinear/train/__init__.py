"""Training: transformers' Trainer with our callbacks, groups and schedules; ``train`` for runs, ``fit`` for models."""

from typing import TYPE_CHECKING

from relinear.system.lazy import imported_on_first_use
from relinear.system.progress import Progress as Progress
from relinear.train.fitting import TrainResult as TrainResult
from relinear.train.fitting import fit as fit

if TYPE_CHECKING:
    from relinear.train.callbacks import LatentMoments as LatentMoments
    from relinear.train.callbacks import read_metrics as read_metrics
    from relinear.train.callbacks import read_moments as read_moments
    from relinear.train.run import build_model as build_model
    from relinear.train.run import read_result as read_result
    from relinear.train.run import train as train
    from relinear.train.settings import FitSettings as FitSettings
    from relinear.train.settings import TrainSettings as TrainSettings
    from relinear.train.trainer import NonFiniteLossError as NonFiniteLossError
    from relinear.train.trainer import RelinearTrainer as RelinearTrainer

# Imported on first use: transformers' Trainer takes seconds to import, and settings can be checked without it.
_LAZY = {
    "callbacks": ("LatentMoments", "read_metrics", "read_moments"),
    "run": ("build_model", "read_result", "train"),
    "settings": ("FitSettings", "TrainSettings"),
    "trainer": ("NonFiniteLossError", "RelinearTrainer"),
}

__all__ = ["Progress", "TrainResult", "fit", *(name for names in _LAZY.values() for name in names)]

__getattr__ = imported_on_first_use(__name__, _LAZY)
