"""What an operator's training forward finds for every token, and its means over the tokens that count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class TokenTerms(nn.Module):
    """A module that notes auxiliary losses and metrics for every token (``core.aux`` says which tokens count)."""

    #: attributes of the last forward (tensors with a graph): dropped on deepcopy and pickling
    _transient: tuple[str, ...] = ("_aux_losses", "_metrics", "_counted")
    #: metrics whose means are not taken yet, and the tokens that count in them
    _counted: tuple[dict[str, Tensor], Tensor | None] | None = None

    def __init__(self) -> None:
        super().__init__()
        #: by name, for every token that was seen (a tensor of the leading sizes of the input) or as a mean over them
        self._aux_losses: dict[str, Tensor] = {}
        self._metrics: dict[str, Tensor] = {}

    def aux_losses(self) -> dict[str, Tensor]:
        """Weighted auxiliary losses (scalars, token means) of the last training forward, by name; {} in eval.

        The means are over the tokens that count: in a model those whose prediction counts in its loss (see
        ``core.aux.counted_tokens``), in a layer that runs by itself all of them.
        """
        noted = [part._aux_losses for part in self._noting() if part.training]
        return {name: _token_mean(value, None) for values in noted for name, value in values.items()}

    def metrics(self) -> dict[str, Tensor]:
        """Detached scalars of the last training forward that are worth logging (not losses), by name."""
        found: dict[str, Tensor] = {}
        for part in self._noting():
            metrics, counted = part._counted or (None, None)
            found |= _token_means(part._metrics, counted if metrics is part._metrics else None)
        return found

    def _noting(self) -> list[TokenTerms]:
        """What notes the terms of this module."""
        return [self]

    def has_noted(self) -> bool:
        """Return whether the last forward noted a loss or a metric."""
        return any(part._aux_losses or part._metrics for part in self._noting())

    def forget_losses(self) -> None:
        """Drop the losses of an earlier forward, with their graph."""
        for part in self._noting():
            part._aux_losses = {}

    def note(self, aux_losses: dict[str, Tensor], metrics: dict[str, Tensor]) -> None:
        """Keep what this training forward found, by name: a value for every token, or a mean over them.

        Of several calls in one forward of a model the last one's is kept. A sum would need to know where a forward of
        the model starts and ends, also in one that is compiled or run again, and a layer alone would add up for ever.

        What a layer finds when gradient checkpointing runs it again, during the backward pass, is not kept: it is that
        of a forward whose means have been taken, and nobody would tell again which tokens count.
        """
        # a whole model that is run again has forgotten its terms first
        again = self._aux_losses and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if not again:
            # past nn.Module's own, which looks for parameters
            object.__setattr__(self, "_aux_losses", aux_losses)
            object.__setattr__(self, "_metrics", metrics)

    def count_tokens(self, counted: Tensor | None) -> None:
        """Make what the last forward noted for every token into means over those that count.

        Args:
            counted: (B, T) bool, or None for all. An operator that saw other tokens than these (those routed to an
                expert, say) takes the mean over all that it saw.
        """
        for part in self._noting():
            part._aux_losses = _token_means(part._aux_losses, counted)
            if torch.compiler.is_compiling():
                part._metrics = _token_means(part._metrics, counted)
            elif part._counted is None or part._counted[0] is not part._metrics:  # else they are of an earlier forward
                part._counted = part._metrics, counted  # few steps of a training read them: means are taken there

    def __getstate__(self) -> dict[str, Any]:
        # Tensors with a graph can be neither copied nor pickled, and belong to a forward that the copy never saw.
        state = super().__getstate__()
        return state | {n: {} if isinstance(state[n], dict) else None for n in self._transient if n in state}


def _token_means(values: dict[str, Tensor], counted: Tensor | None) -> dict[str, Tensor]:
    return {name: _token_mean(value, counted) for name, value in values.items()}


def _token_mean(value: Tensor, counted: Tensor | None) -> Tensor:
    """The mean over the tokens that count of a value for each, (B, T) or (B T,); a scalar is a mean already."""
    if value.ndim == 0:
        return value
    if counted is None or value.shape not in (counted.shape, (counted.numel(),)):
        return value.mean()
    counted = counted.reshape(value.shape).to(value.device)
    return torch.where(counted, value, 0.0).sum() / counted.sum().clamp(min=1)
