"""Change the loss that a transformers model returns: add the operators' auxiliary losses, or train an objective.

Operators record one auxiliary loss per token. The hooks here see the arguments of the model's forward, so they compute
the loss mask and average over the tokens whose prediction the model's own loss counts. Operators need no mask.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from relinear.contract.objective import Objective
from relinear.contract.operator import named_operators
from relinear.hf.labels import loss_mask, share_of_batch
from relinear.settings.messages import warn_user

_NO_LOSS = (
    "the operators' auxiliary losses were not added to any loss, because {} returned none. Pass labels to it. If it is "
    "only a part of the model that you train, replace layers of the whole. If you compute the loss elsewhere "
    "(label_smoothing_factor, compute_loss_func, a loop of your own), add "
    "sum(relinear.contract.auxiliary_losses_of(model).values()) to it, times the micro-batch's share of "
    "num_items_in_batch"
)


def install_auxiliary_hooks(model: nn.Module) -> None:
    """Make ``model`` add its operators' auxiliary losses to the loss it returns (idempotent)."""
    if _add_auxiliary_losses not in model._forward_hooks.values():
        model.register_forward_pre_hook(_clear_auxiliary_losses)
        model.register_forward_hook(_add_auxiliary_losses, with_kwargs=True)


def _clear_auxiliary_losses(model: nn.Module, args: tuple) -> None:
    # A layer that a forward skips must not keep the loss (and graph) of an earlier forward. Inference records none, and
    # walking over all modules would slow down every token.
    if not model.training and not torch.is_grad_enabled():
        return
    for _, operator in named_operators(model):
        operator.clear_auxiliary_losses()


def _add_auxiliary_losses(model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    # torch.compile makes a separate graph of what hooks of the outermost module compute
    operators = [operator for _, operator in named_operators(model) if not operator.is_in_loss]
    if not model.training or not (recorders := [operator for operator in operators if operator.has_auxiliary()]):
        return None
    names = list(inspect.signature(model.forward).parameters) if len(args) > 1 else ["input_ids"]
    inputs = dict(zip(names, args)) | kwargs
    mask = loss_mask(inputs, model)
    for operator in recorders:
        operator.reduce_auxiliary(mask)
    loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
    terms = [term for operator in recorders for term in operator.auxiliary_losses().values()]
    if not isinstance(loss, Tensor) or loss.ndim:  # without labels a tuple begins with the logits
        if terms and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            warn_user(_NO_LOSS.format(type(model).__name__))
        return None
    if not terms:
        return None
    total = torch.stack([term.to(loss.device, loss.dtype) for term in terms]).sum()
    trainable = (p.requires_grad for op in recorders if op.auxiliary_losses() for p in op.parameters())
    if loss.requires_grad and not total.requires_grad and any(trainable):
        raise ValueError(
            "reentrant gradient checkpointing cuts off the gradient of auxiliary losses; use "
            'model.gradient_checkpointing_enable({"use_reentrant": False})'
        )
    loss = loss + total * share_of_batch(inputs, model)
    for operator in recorders:
        operator.is_in_loss = True
    if isinstance(output, tuple):
        return (loss, *output[1:])
    output["loss"] = loss
    return output


class ModelWithObjective(nn.Module):
    """Return an objective's loss from a model's forward, as Trainer expects it.

    ``fit`` wraps the model whenever an objective is given.

    In training mode the loss is the objective's, in evaluation the model's own. ``terms`` holds the weighted terms of
    the last training loss, detached.
    """

    def __init__(self, model: nn.Module, objective: Objective):
        super().__init__()
        self.model = model
        self.objective = objective
        self.terms: dict[str, Tensor] = {}

    def forward(self, num_items_in_batch: Tensor | None = None, **batch: Tensor) -> dict[str, Any]:
        """Return ``{"loss", "logits"}`` of a batch; ``num_items_in_batch`` weights the loss for accumulation."""
        if not self.training:
            output = self.model(**batch, use_cache=False)
            return {"loss": output.loss, "logits": output.logits}
        loss, terms, output = self.objective(self.model, batch)
        self.terms = {name: term.detach() for name, term in terms.items()}
        share = share_of_batch({"num_items_in_batch": num_items_in_batch, "labels": batch.get("labels")})
        return {"loss": loss * share, "logits": output.logits}
