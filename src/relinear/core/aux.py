"""Auxiliary losses: collected from the operators after a forward pass and added to the model's loss, once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from relinear.core.operator import Operator

__all__ = ["aux_losses", "install_aux_hooks", "named_operators", "operator_metrics", "share_of_batch"]

IGNORED_LABEL = -100  # transformers' label of positions that do not count


def named_operators(model: nn.Module) -> Iterator[tuple[str, Operator]]:
    """Outermost operators of ``model`` by name, each once; what an operator holds inside belongs to that operator."""
    seen: set[int] = set()

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, Operator]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if isinstance(module, Operator):
            yield prefix, module
            return
        for name, child in module.named_children():
            yield from walk(child, f"{prefix}.{name}" if prefix else name)

    yield from walk(model, "")


def aux_losses(model: nn.Module) -> dict[str, Tensor]:
    """Auxiliary losses of the last training forward, as ``{"layer.name/loss": scalar}``, already weighted.

    Their sum is what was added to ``outputs.loss`` (before the scaling for gradient accumulation). Empty in eval.
    """
    return {
        f"{name}/{key}": value
        for name, operator in named_operators(model)
        for key, value in operator.aux_losses().items()
    }


def operator_metrics(model: nn.Module) -> dict[str, Tensor]:
    """Detached scalars of the last training forward worth logging, as ``{"layer.name/metric": scalar}``."""
    return {
        f"{name}/{key}": value for name, operator in named_operators(model) for key, value in operator.metrics().items()
    }


def install_aux_hooks(model: nn.Module) -> None:
    """Make ``model`` add its operators' auxiliary losses to the loss it returns (idempotent)."""
    if _add_aux_losses not in model._forward_hooks.values():
        model.register_forward_pre_hook(_clear_aux_losses)
        model.register_forward_hook(_add_aux_losses, with_kwargs=True)


def _clear_aux_losses(model: nn.Module, args: tuple) -> None:
    # A layer that a forward skips must not hand on the loss, and the graph, of an earlier one.
    for _, operator in named_operators(model):
        operator._aux_losses = {}


def share_of_batch(kwargs: dict[str, Any]) -> Tensor | float:
    """This micro-batch's share of the target tokens of the whole optimiser step (1 where the caller averages itself).

    Trainer passes ``num_items_in_batch``, the number of targets over all micro-batches and ranks, and expects a loss
    that sums over the step; a token mean weighted with this share does. Without it, the caller divides the loss.
    """
    total, labels = kwargs.get("num_items_in_batch"), kwargs.get("labels")
    if total is None or labels is None:
        return 1.0
    shifted = kwargs.get("shift_labels")
    targets = labels[..., 1:] if shifted is None else shifted
    return (targets != IGNORED_LABEL).sum() / total


def _add_aux_losses(model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
    if not model.training or not isinstance(loss, Tensor) or loss.ndim:
        return None
    terms = aux_losses(model)
    if not terms:
        return None
    total = torch.stack([term.to(loss.device, loss.dtype) for term in terms.values()]).sum()
    if loss.requires_grad and not total.requires_grad and _learns(model):
        raise ValueError(
            "the auxiliary losses carry no gradient: reentrant gradient checkpointing cuts them off; use "
            'model.gradient_checkpointing_enable({"use_reentrant": False})'
        )
    loss = loss + total * share_of_batch(kwargs)
    if isinstance(output, tuple):
        return (loss, *output[1:])
    output["loss"] = loss
    return output


def _learns(model: nn.Module) -> bool:
    return any(p.requires_grad for _, op in named_operators(model) if op.aux_losses() for p in op.parameters())
