"""Objectives: named settings for what a run minimises in place of the model's own loss."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from relinear.contract.auxiliary_losses import share_of_batch
from relinear.contract.config import Config

#: (model, batch) -> (the loss, a mean over the batch's targets; its weighted terms by name; the model's output)
Objective = Callable[[nn.Module, Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor], Any]]


def kl_terms(logits: Tensor, target_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute the terms (..., V) whose sum over V is KL(softmax(wanted / tau) || softmax(logits / tau)), in float32."""
    student, teacher = ((values.float() / temperature).log_softmax(-1) for values in (logits, target_logits))
    return F.kl_div(student, teacher, log_target=True, reduction="none")


class ObjectiveConfig(Config):
    """Hold the settings of an objective that recipes and the command line name.

    ``relinear.register`` makes a subclass known; ``prepare`` gives the function that training minimises.

    Examples:
        >>> relinear.contract.ObjectiveConfig.read("distill:teacher=runs/big,temperature=2.0")
        Distill(teacher='runs/big', temperature=2.0, cross_entropy=0.0)
    """

    family: ClassVar[str] = "objective"

    def check(self) -> None:
        """Raise ValueError or OSError if something that the settings name is not available, before data are read."""

    def prepare(self, model: nn.Module) -> Objective:
        """Return the function that training calls.

        Raises:
            ValueError: if ``model`` cannot be trained on this; says why and what to do.
        """
        raise TypeError(f"{type(self).__name__} does not say what is minimised")


class GuidedTraining(nn.Module):
    """A model together with its objective, as a module that returns a loss; ``relinear.training.fitting`` makes one.

    In training mode the loss is the objective's, in evaluation the model's own. ``terms`` holds the weighted terms of
    the last training loss, detached.
    """

    def __init__(self, model: nn.Module, objective: Objective):
        super().__init__()
        self.model = model
        self.objective = objective
        self.terms: dict[str, Tensor] = {}

    def forward(self, num_items_in_batch: Tensor | None = None, **batch: Tensor) -> dict[str, Any]:
        """Return ``{"loss", "logits"}`` of a batch; weighted for accumulation if ``num_items_in_batch`` is given."""
        if not self.training:
            output = self.model(**batch, use_cache=False)
            return {"loss": output.loss, "logits": output.logits}
        loss, terms, output = self.objective(self.model, batch)
        self.terms = {name: term.detach() for name, term in terms.items()}
        share = share_of_batch({"num_items_in_batch": num_items_in_batch, "labels": batch.get("labels")})
        return {"loss": loss * share, "logits": output.logits}
