"""Check that a model predicts next tokens, as perplexity, distillation and compression require."""

# Legend: T tokens

from typing import Any

import torch
from torch import Tensor

from relinear.contract.input_checks import check_model
from relinear.contract.module_state import eval_mode
from relinear.contract.numerics import check_no_nan, rounding_bound
from relinear.hf.model_config import is_encoder_decoder
from relinear.hf.vocabulary import max_positions

_REQUIREMENT = "needs a causal language model, one that AutoModelForCausalLM loads"
_TOKENS = 8


@torch.no_grad()
def check_predicts_next_token(model: Any, caller: str, *, needs_logits: bool = True) -> None:
    """Raise ValueError, naming the function ``caller``, unless ``model`` predicts each token from those before it.

    Two short inputs that differ only in later tokens must give the same earlier logits, up to rounding.

    Args:
        model: called with ``input_ids`` (1, T).
        caller: name of the function in the message.
        needs_logits: False accepts a model that returns no ``logits``.
    """
    check_model(model, caller)
    class_name = type(model).__name__
    if is_encoder_decoder(model):
        raise ValueError(f"{class_name} is an encoder-decoder; {caller} {_REQUIREMENT}")
    if (input_name := getattr(model, "main_input_name", "input_ids")) != "input_ids":
        raise ValueError(f"{class_name} reads {input_name}, not tokens; {caller} {_REQUIREMENT}")
    length = min(_TOKENS, max_positions(model) or _TOKENS)
    ids = torch.zeros(1, length, dtype=torch.long, device=next(model.parameters()).device)
    ids[:, 1 : length // 2 : 2] = 1
    other = ids.clone()
    other[:, length // 2 :] = 1  # 0 1 0 1 0 0 0 0 and 0 1 0 1 1 1 1 1
    uncompiled = getattr(model, "_orig_mod", model)  # a compiled model would compile for this length
    with eval_mode(model):
        logits = _logits(uncompiled, ids)
        if logits is None and not needs_logits:
            return
        if logits is None or logits.shape[:-1] != ids.shape:
            raise ValueError(f"{class_name} returns no logits of each token; {caller} {_REQUIREMENT}")
        check_no_nan(model, logits, caller)
        change = (_logits(uncompiled, other) - logits).float()[:, : length // 2].abs().max()
    if change > rounding_bound(model, logits):
        raise ValueError(
            f"{class_name} sees later tokens: its logits move by {float(change):.2g} where only later ones change; "
            f"{caller} {_REQUIREMENT}"
        )


def _logits(model: Any, ids: Tensor) -> Any:
    options = {"use_cache": False} if hasattr(model, "generate") else {}
    return getattr(model(input_ids=ids, **options), "logits", None)
