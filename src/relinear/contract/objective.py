"""Objectives: losses that training minimises instead of the model's own, with settings that recipes can name."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from relinear.contract.config import Config

#: (model, batch) -> (loss averaged over the batch's targets, the loss's weighted terms by name, the model's output)
Objective = Callable[[nn.Module, Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor], Any]]


class ObjectiveConfig(Config):
    """Hold the settings of an objective: ``register`` a subclass, and recipes and the command line can name it.

    ``prepare`` returns the function that training minimises.

    Examples:
        >>> relinear.contract.ObjectiveConfig.read("distill:teacher=runs/big,temperature=2.0")
        Distill(teacher='runs/big', temperature=2.0, cross_entropy=0.0)
    """

    family: ClassVar[str] = "objective"

    def check(self) -> None:
        """Raise ValueError or OSError if something that the settings name does not exist; runs before data are read."""

    def check_length(self, length: int) -> None:
        """Raise ValueError if the settings do not suit texts of ``length`` tokens; runs before training."""

    def prepare(self, model: nn.Module) -> Objective:
        """Return the function that training calls.

        Raises:
            ValueError: if ``model`` cannot be trained with this objective; says why and what to do.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement prepare")
