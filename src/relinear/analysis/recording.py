"""Record the gates and contexts of operators while a model runs."""

# Legend: N sequences, T tokens, R rank, O out_features, C context_dim

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from relinear.activations.shared_context import context_owner
from relinear.contract.module_state import eval_mode, observe_forwards
from relinear.hf.model_layout import find_decoder


def gated_operators(model: nn.Module) -> dict[str, Any]:
    """Return operators of ``model`` that have gates which read the context, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if callable(getattr(module, "gates", None)) and getattr(module.config, "conditioned", False)
    }


@torch.no_grad()
def record_gates(model: nn.Module, ids: Tensor) -> Iterator[dict[str, dict[str, Tensor]]]:
    """Yield for every sequence {operator's name: {"basis": (T, R), "output": (T, O)}}, in float32, in eval mode.

    Args:
        model: a model with gated operators and its ``ContextManager``.
        ids: (N, T) token ids.
    """
    operators = gated_operators(model)
    recorded: dict[str, dict[str, Tensor]] = {}

    def save(name: str, module: Any, args: Any, output: Any) -> None:
        recorded[name] = {part: gate.flatten(0, -2).float() for part, gate in module.gates().items()}

    with observe_forwards(operators.items(), save), eval_mode(model):
        for row in ids:
            recorded.clear()
            model(input_ids=row[None])
            yield dict(recorded)


@torch.no_grad()
def record_contexts(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the context vectors (N, T, C) of token ids (N, T), from the ``ContextManager`` of ``model``."""
    owner: Any = context_owner(model)
    with eval_mode(model):
        return owner.contexts(find_decoder(model), {"input_ids": ids, "use_cache": False}).float()
