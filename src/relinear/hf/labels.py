"""Read transformers' conventions about labels and masks: which tokens of a batch its loss counts."""

# Legend: B batch, T tokens

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relinear.hf.model_config import is_encoder_decoder
from relinear.settings.messages import quoted

#: label of positions that the loss ignores
IGNORED_LABEL = -100


def _shifts_labels(model: Any) -> bool:
    """Return whether a model predicts the next token: True unless its loss type says otherwise."""
    if is_encoder_decoder(model):
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
    if is_encoder_decoder(model):
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
    total = inputs.get("num_items_in_batch")
    targets = _target_mask(inputs, _shifts_labels(model))
    return 1.0 if total is None or targets is None else targets.sum() / total
