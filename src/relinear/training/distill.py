"""Define the ``distill`` objective, which trains a student on a teacher's logits."""

# Legend: B batch, T tokens, V vocabulary

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from relinear.contract.auxiliary_losses import auxiliary_losses_of
from relinear.contract.config import register
from relinear.contract.module_state import eval_mode
from relinear.contract.objective import Objective, ObjectiveConfig
from relinear.evaluate.losses import kl_terms
from relinear.hf.labels import IGNORED_LABEL
from relinear.hf.model_config import text_config
from relinear.models.presets import locate_model, model_folder
from relinear.surgery.checkpoint import from_pretrained


@register
class Distill(ObjectiveConfig):
    """Minimise w CE + (1 - w) tau^2 KL(teacher || model), the KL at temperature tau, over the tokens that count.

    Auxiliary losses of the model's operators are added as in any other run. The teacher is in evaluation mode, gets no
    gradient and is not saved with the run; it must have the same vocabulary.

    Args:
        teacher: the directory of a model or of a run that saved one, or a Hub name.
        temperature: tau; logits are divided by it. The factor tau^2 keeps the gradient's scale.
        cross_entropy: w, the weight of the ordinary loss; 0 omits it.
    """

    kind = "distill"

    teacher: str
    temperature: Annotated[float, Field(gt=0)] = 1.0
    cross_entropy: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def check(self) -> None:
        """Raise ValueError or OSError if the teacher does not exist."""
        locate_model(self.teacher, presets=False)

    def prepare(self, model: nn.Module) -> Objective:
        """Load the teacher and return the loss against it; the first batch moves it to the model's device.

        Raises:
            ValueError: if teacher and model have different vocabularies.
        """
        teacher = from_pretrained(model_folder(self.teacher)).eval().requires_grad_(False)
        return TeacherObjective(teacher, model, self.temperature, self.cross_entropy)


class TeacherObjective:
    """Compute the loss of ``Distill`` for a teacher in memory, which may share parameters with the model.

    It is not a module, so the teacher is neither trained nor saved with the model.

    Args:
        teacher: put into evaluation mode for each batch; no gradient flows through it.
        model: the model to train.
        temperature, cross_entropy: as for ``Distill``.

    Raises:
        ValueError: if teacher and model have different vocabularies.
    """

    def __init__(self, teacher: Any, model: Any, temperature: float = 1, cross_entropy: float = 0) -> None:
        entries = [int(text_config(causal_model).vocab_size) for causal_model in (teacher, model)]
        if entries[0] != entries[1]:
            raise ValueError(f"the teacher has {entries[0]} tokens, the model {entries[1]}; use one tokenizer")
        self.teacher, self.temperature, self.cross_entropy = teacher, temperature, cross_entropy

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], Any]:
        labels = batch.get("labels")
        if labels is None:
            raise ValueError("the distill objective needs samples with labels, which say which tokens count")
        output = model(**batch, use_cache=False)
        self.teacher.to(output.logits.device)
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        with torch.no_grad(), eval_mode(self.teacher):
            teacher_logits = self.teacher(**inputs, use_cache=False).logits
        weight = self.cross_entropy
        losses = [term.to(output.loss) for term in auxiliary_losses_of(model).values()]
        auxiliary = torch.stack(losses).sum() if losses else output.loss.new_zeros(())
        kl = divergence(output.logits, teacher_logits, labels, self.temperature)
        terms = {"ce": weight * (output.loss - auxiliary), "kl": (1 - weight) * kl}
        return terms["ce"] + terms["kl"] + auxiliary, terms, output


def divergence(logits: Tensor, target_logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return tau^2 KL(softmax(target / tau) || softmax(logits / tau)), averaged over the labels that count.

    Args:
        logits, target_logits: (B, T, V).
        labels: (B, T), -100 where a token does not count; the prediction at t is of the label at t + 1.
        temperature: tau.
    """
    counted = labels[:, 1:] != IGNORED_LABEL
    kl = kl_terms(logits[:, :-1][counted], target_logits[:, :-1][counted], temperature).sum()
    return temperature**2 * kl / counted.sum().clamp(min=1)
