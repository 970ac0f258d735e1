"""Collect the operators' auxiliary losses after a forward pass and add them to the model's loss.

Operators record one value per token. The hooks here see the arguments of the model's forward, so they compute the loss
mask and average over the tokens whose prediction the model's own loss counts. Operators need no mask.
"""

# Legend: B batch, T tokens

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relinear.contract.input_checks import check_model
from relinear.contract.messages import quoted
from relinear.contract.operator import named_operators

_NO_LOSS = (
    "the operators' auxiliary losses were not added to any loss, because the model got no labels. Pass labels; or, if "
    "you compute the loss elsewhere (label_smoothing_factor, compute_loss_func, a loop of your own), add "
    "sum(relinear.contract.aux_losses(model).values()) to it, times the micro-batch's share of num_items_in_batch"
)

IGNORED_LABEL = -100  # transformers' label of positions that the loss ignores


def aux_losses(model: nn.Module) -> dict[str, Tensor]:
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
        >>> list(relinear.contract.aux_losses(model))
        ['model.layers.0.self_attn.q_proj/latent']
    """
    check_model(model, "aux_losses")
    return {f"{name}/{key}": value for name, op in named_operators(model) for key, value in op.aux_losses().items()}


def operator_metrics(model: nn.Module) -> dict[str, Tensor]:
    """Return the operators' metrics of the last training forward, as ``{"layer.name/metric": detached scalar}``."""
    return {f"{name}/{key}": value for name, op in named_operators(model) for key, value in op.metrics().items()}


def install_aux_hooks(model: nn.Module) -> None:
    """Make ``model`` add its operators' auxiliary losses to the loss it returns (idempotent)."""
    if _add_aux_losses not in model._forward_hooks.values():
        model.register_forward_pre_hook(_clear_aux_losses)
        model.register_forward_hook(_add_aux_losses, with_kwargs=True)


def _clear_aux_losses(model: nn.Module, args: tuple) -> None:
    # A layer that a forward skips must not keep the loss (and graph) of an earlier forward. Inference records none, and
    # walking over all modules would slow down every token.
    if not model.training and not torch.is_grad_enabled():
        return
    for _, operator in named_operators(model):
        operator.clear_auxiliary_losses()


def _shifts_labels(model: Any) -> bool:
    """Return whether a model predicts the next token: True unless its loss type says otherwise."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    # The property ``loss_function`` logs if the type is unknown, which torch.compile cannot trace.
    loss_function = getattr(model, "_loss_function", None)
    name = getattr(model, "loss_type", None) if loss_function is None else getattr(loss_function, "__name__", None)
    return name in ("ForCausalLM", "ForCausalLMLoss") or not (name or "").startswith("For")


def _target_mask(inputs: Mapping[str, Any], shifted: bool) -> Tensor | None:
    """Return a mask (..., T - 1) or (..., T) of the labels that are not ignored; None without labels."""
    labels, shift_labels = inputs.get("labels"), inputs.get("shift_labels")
    if shift_labels is not None or labels is None:
        return None if shift_labels is None else shift_labels != IGNORED_LABEL
    return (labels[..., 1:] if shifted and labels.ndim > 1 else labels) != IGNORED_LABEL


def loss_mask(inputs: Mapping[str, Any], model: Any = None) -> Tensor | None:
    """Return the mask (B, T) of the tokens over which auxiliary losses are averaged; None for all.

    These are the tokens whose prediction has a label other than -100; without labels, those that ``attention_mask``
    (B, T) does not mask; without either, all.

    Args:
        inputs: the arguments of the model's forward, by name.
        model: decides whether a token predicts its own label or the next token's; None means the next.
    """
    tokens = inputs.get("input_ids")
    if tokens is None:
        tokens = inputs.get("inputs_embeds")
    shape = None if tokens is None else tokens.shape[:2]
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None  # labels belong to the decoder's tokens, most layers see the encoder's
    shifted = _shifts_labels(model)
    mask = _target_mask(inputs, shifted)
    if mask is not None and mask.ndim == 2:
        if shifted and inputs.get("shift_labels") is None:
            mask = F.pad(mask, (0, 1))  # the last token predicts nothing
        if shape is None or mask.shape == shape:
            return mask
    attended = inputs.get("attention_mask")
    if isinstance(attended, Tensor) and attended.ndim == 2 and (shape is None or attended.shape == shape):
        return attended != 0
    return None


def without_padding(row: Mapping[str, Any], *names: str) -> list[Tensor]:
    """Return the entries ``names`` of a row of tokens, each (T,), without the tokens that ``attention_mask`` masks.

    The remaining tokens start at position 0, whichever side the padding was on.

    Raises:
        ValueError: if an entry is missing or does not have one value per token.
    """
    if not isinstance(row, Mapping) or any(row.get(name) is None for name in names):
        raise ValueError(f"expected a mapping with {' and '.join(names)}, got {quoted(row)}")
    values = [torch.as_tensor(row[name]).flatten() for name in names]
    mask = row.get("attention_mask")
    unmasked = torch.ones_like(values[0], dtype=torch.bool) if mask is None else torch.as_tensor(mask).flatten() != 0
    for name, value in zip(names, values, strict=True):
        if len(value) != len(unmasked):
            raise ValueError(f"{name} has {len(value)} tokens and attention_mask {len(unmasked)}; make them equal")
    return [value[unmasked] for value in values]


def share_of_batch(inputs: Mapping[str, Any], model: Any = None) -> Tensor | float:
    """Return this micro-batch's share of the target tokens of an optimiser step; 1 if the caller averages.

    Trainer passes ``num_items_in_batch``, the number of targets over all micro-batches and ranks, and adds up the
    losses of the step. So each micro-batch's mean loss is multiplied by its share of the targets. Without
    ``num_items_in_batch`` the caller divides the loss.

    Args:
        inputs, model: as for ``loss_mask``.
    """
    total, targets = inputs.get("num_items_in_batch"), _target_mask(inputs, _shifts_labels(model))
    return 1.0 if total is None or targets is None else targets.sum() / total


def _add_aux_losses(model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    # torch.compile makes a separate graph of what hooks of the outermost module compute
    if not model.training or not (recorders := [op for _, op in named_operators(model) if op.has_auxiliary()]):
        return None
    names = list(inspect.signature(model.forward).parameters) if len(args) > 1 else ["input_ids"]
    inputs = dict(zip(names, args)) | kwargs
    mask = loss_mask(inputs, model)
    for operator in recorders:
        operator.reduce_auxiliary(mask)
    loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
    terms = aux_losses(model)
    if terms and loss is None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        warnings.warn(_NO_LOSS, UserWarning, stacklevel=2)
    if not terms or not isinstance(loss, Tensor) or loss.ndim:
        return None
    total = torch.stack([term.to(loss.device, loss.dtype) for term in terms.values()]).sum()
    trainable = (p.requires_grad for op in recorders if op.aux_losses() for p in op.parameters())
    if loss.requires_grad and not total.requires_grad and any(trainable):
        raise ValueError(
            "reentrant gradient checkpointing cuts off the gradient of auxiliary losses; use "
            'model.gradient_checkpointing_enable({"use_reentrant": False})'
        )
    loss = loss + total * share_of_batch(inputs, model)
    if isinstance(output, tuple):
        return (loss, *output[1:])
    output["loss"] = loss
    return output
