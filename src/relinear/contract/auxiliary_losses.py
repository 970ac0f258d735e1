"""Read the auxiliary losses and metrics that a model's operators recorded in its last training forward.

``hf.training_loss`` adds the losses to the loss that the model returns.
"""

from collections.abc import Callable

from torch import Tensor, nn

from relinear.contract.input_checks import check_model
from relinear.contract.operator import Operator, named_operators


def auxiliary_losses_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the auxiliary losses of the last training forward, as ``{"layer.name/loss": scalar}``, already weighted.

    Their sum was added to ``outputs.loss`` (before the scaling for gradient accumulation). Empty in eval. If a forward
    calls an operator several times, as a shared module, the last call counts.

    Args:
        model: a model with operators in it, after a forward in training mode.

    Raises:
        ValueError: if ``model`` is not a model.

    Examples:
        >>> model, ids = relinear.from_preset("tiny"), torch.randint(258, (1, 8))
        >>> _ = relinear.replace_(model, {"q_proj": relinear.HDPL(rank=8)}, layers=0)
        >>> _ = model.train()(ids, labels=ids)
        >>> list(relinear.contract.auxiliary_losses_of(model))
        ['model.layers.0.self_attn.q_proj/latent']
    """
    check_model(model, "auxiliary_losses_of")
    return _by_name(model, Operator.auxiliary_losses)


def operator_metrics(model: nn.Module) -> dict[str, Tensor]:
    """Return the operators' metrics of the last training forward, as ``{"layer.name/metric": detached scalar}``."""
    return _by_name(model, Operator.metrics)


def _by_name(model: nn.Module, read: Callable[[Operator], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return what ``read`` returns of every operator; where operators of two models have one name, by full names."""
    values: dict[str, Tensor] = {}
    for name, operator in named_operators(model):
        for key, value in read(operator).items():
            short = f"{operator.name_in_model or name}/{key}"
            values[f"{name}/{key}" if short in values else short] = value
    return values
