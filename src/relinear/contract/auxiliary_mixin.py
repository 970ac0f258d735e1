"""Auxiliary losses and metrics of an operator's training forward, for every token, and their means over tokens.

1. Before a forward the hooks of the model (``auxiliary_losses``) clear what the one before recorded.
2. In the forward operators call ``record_auxiliary``, which keeps values of every token.
3. After it the hooks reduce them over the tokens that count (``reduce_over_tokens``) and add them to the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from relinear.deprecated import RenamedHook


class AuxiliaryLossMixin(nn.Module):
    """Record auxiliary losses and metrics of every token (``auxiliary_losses`` says which tokens count)."""

    #: attributes of the last forward (tensors with a graph): dropped on deepcopy and pickling
    _transient: tuple[str, ...] = ("_aux_losses", "_metrics", "_counted")
    #: metrics whose means are not taken yet, and the tokens that count in them
    _counted: tuple[dict[str, Tensor], Tensor | None] | None = None

    def __init__(self) -> None:
        super().__init__()
        #: by name, for every token that was seen (a tensor with the leading sizes of the input) or as a scalar
        self._aux_losses: dict[str, Tensor] = {}
        self._metrics: dict[str, Tensor] = {}

    def aux_losses(self) -> dict[str, Tensor]:
        """Return the weighted auxiliary losses (token means) of the last training forward, by name; {} in eval.

        The means are over the tokens that count: in a model those whose prediction counts in its loss (see
        ``auxiliary_losses.loss_mask``), in a layer that runs alone all of them.
        """
        recorded = [(part, part._aux_losses) for part in self._recording() if part.training]
        return {name: value for part, values in recorded for name, value in part._reduced(values, None).items()}

    def metrics(self) -> dict[str, Tensor]:
        """Return detached scalars of the last training forward that are worth logging (not losses), by name."""
        result: dict[str, Tensor] = {}
        for part in self._recording():
            metrics, counted = part._counted or (None, None)
            result |= part._reduced(part._metrics, counted if metrics is part._metrics else None)
        return result

    def _recording(self) -> list[AuxiliaryLossMixin]:
        """Return the modules that record the losses and metrics of this one."""
        return [self]

    def has_auxiliary(self) -> bool:
        """Return whether the last forward recorded a loss or a metric."""
        return any(part._aux_losses or part._metrics for part in self._recording())

    def clear_auxiliary_losses(self) -> None:
        """Drop the losses of an earlier forward, with their graph."""
        for part in self._recording():
            part._aux_losses = {}

    def reduce_over_tokens(self, name: str, value: Tensor, counted: Tensor | None) -> Tensor:
        """Return the loss or metric ``name`` as a scalar: here the mean over the tokens that count.

        An operator whose loss is another function of its tokens records what that needs of each, and overrides this. It
        must not depend on tokens that do not count.

        Args:
            value: what was recorded, (B, T, ...), (B T, ...), or of any shape where the layer runs alone.
            counted: bool of the leading sizes of ``value``; None if all tokens count.
        """
        if counted is None:
            return value.mean()
        return torch.where(counted, value, 0.0).sum() / counted.sum().clamp(min=1)

    def _reduced(self, values: dict[str, Tensor], counted: Tensor | None) -> dict[str, Tensor]:
        """Return scalars as they are, values of every token by ``reduce_over_tokens``."""
        return {
            name: value if value.ndim == 0 else self.reduce_over_tokens(name, value, _of_tokens(counted, value))
            for name, value in values.items()
        }

    note = RenamedHook("record_auxiliary")
    over_tokens = RenamedHook("reduce_over_tokens")

    def record_auxiliary(self, aux_losses: dict[str, Tensor], metrics: dict[str, Tensor]) -> None:
        """Record losses and metrics of this training forward, of every token (``reduce_over_tokens``) or as scalars.

        Of several calls in one forward of a model the last one counts. Nothing is recorded when gradient checkpointing
        repeats a layer in the backward pass: the means of that forward have been taken already.
        """
        # a forward of the whole model clears its terms first
        again = self._aux_losses and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if not again:
            # not nn.Module.__setattr__, which looks for parameters
            object.__setattr__(self, "_aux_losses", aux_losses)
            object.__setattr__(self, "_metrics", metrics)

    def reduce_auxiliary(self, counted: Tensor | None) -> None:
        """Reduce what the last forward recorded for every token to means over the tokens that count.

        Args:
            counted: (B, T) bool, or None for all. If an operator saw tokens in another shape (those routed to an
                expert, say), all that it saw count.
        """
        for part in self._recording():
            part._aux_losses = part._reduced(part._aux_losses, counted)
            if torch.compiler.is_compiling():
                part._metrics = part._reduced(part._metrics, counted)
            elif part._counted is None or part._counted[0] is not part._metrics:  # else they are of an earlier forward
                part._counted = part._metrics, counted  # few steps of a training read them: means are taken there

    def __getstate__(self) -> dict[str, Any]:
        # Tensors with a graph can be neither copied nor pickled, and belong to a forward that the copy never saw.
        state = super().__getstate__()
        return state | {n: {} if isinstance(state[n], dict) else None for n in self._transient if n in state}


def _of_tokens(counted: Tensor | None, value: Tensor) -> Tensor | None:
    """Return ``counted`` (B, T) in the leading sizes of ``value``, (B, T, ...) or (B T, ...); None for others."""
    if counted is None:
        return None
    for shape in (counted.shape, (counted.numel(),)):
        if value.shape[: len(shape)] == shape:
            return counted.reshape(shape).to(value.device)
    return None
