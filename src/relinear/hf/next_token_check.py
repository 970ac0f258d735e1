"""Check that a model predicts next tokens, as perplexity, distillation and compression require."""

# Legend: T tokens, V vocabulary

from typing import Any

import torch
from torch import Tensor, nn

from relinear.contract.input_checks import check_finite, check_model
from relinear.hf.modes import eval_mode
from relinear.hf.vocabulary import max_positions

_NEEDED = "needs a causal language model, one that AutoModelForCausalLM loads"
_TOKENS = 8


def precision_of(model: nn.Module) -> float:
    """Return the rounding step of the coarsest parameters of ``model``, relative to 1: 2^-23 in float32."""
    return max(torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point())


def rounding_bound(model: nn.Module, values: Tensor) -> float:
    """Return by how much ``values`` of two runs of ``model`` may differ by rounding alone.

    The square root of the parameters' precision, relative to the largest value: errors grow with depth, and the values
    may have a wider dtype than the layers that they come from.
    """
    return float(precision_of(model) ** 0.5 * values.abs().max())


@torch.no_grad()
def check_predicts_next_token(model: Any, user: str, *, needs_logits: bool = True) -> None:
    """Raise ValueError, on behalf of the function ``user``, unless ``model`` predicts each token from those before it.

    Compares two short passes that differ in later tokens: earlier logits may differ by rounding alone.

    Args:
        model: called with ``input_ids`` (1, T).
        user: for the message.
        needs_logits: False accepts a model that returns no ``logits``.
    """
    check_model(model, user)
    class_name = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(f"{class_name} is an encoder-decoder; {user} {_NEEDED}")
    if (input_name := getattr(model, "main_input_name", "input_ids")) != "input_ids":
        raise ValueError(f"{class_name} reads {input_name}, not tokens; {user} {_NEEDED}")
    length = min(_TOKENS, max_positions(model) or _TOKENS)
    ids = torch.zeros(1, length, dtype=torch.long, device=next(model.parameters()).device)
    ids[:, 1 : length // 2 : 2] = 1
    other = ids.clone()
    other[:, length // 2 :] = 1
    inside = getattr(model, "_orig_mod", model)  # a compiled model would compile these lengths, too
    with eval_mode(model):
        logits = _logits(inside, ids)
        if logits is None and not needs_logits:
            return
        if logits is None or logits.shape[:-1] != ids.shape:
            raise ValueError(f"{class_name} returns no logits of each token; {user} {_NEEDED}")
        check_no_nan(model, logits, user)
        moved = (_logits(inside, other) - logits).float()[:, : length // 2].abs().max()
    if moved > rounding_bound(model, logits):
        raise ValueError(
            f"{class_name} sees later tokens: its logits move by {float(moved):.2g} where only later ones change; "
            f"{user} {_NEEDED}"
        )


def check_no_nan(model: Any, values: Tensor, user: str) -> None:
    """Raise ValueError if ``values`` of ``model`` have a NaN, naming a weight that is not finite if there is one."""
    if bool(values.isnan().any()):
        check_finite(model)
        raise ValueError(
            f"{user}: {type(model).__name__} gives NaN though its weights are finite: compute in float32 or bfloat16"
        )


def _logits(model: Any, ids: Tensor) -> Any:
    options = {"use_cache": False} if hasattr(model, "generate") else {}
    return getattr(model(input_ids=ids, **options), "logits", None)
