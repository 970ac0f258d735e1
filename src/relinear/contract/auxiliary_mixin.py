"""Record an operator's auxiliary losses and metrics per token, and reduce them to means over tokens.

1. Before a forward, hooks on the model (``hf.training_loss``) clear what the last forward recorded.
2. During the forward, operators call ``record_auxiliary`` with one value per token.
3. After it, the hooks reduce the values over the loss mask and add them to the loss. ``reduce_auxiliary`` is what the
   hooks call; ``reduce_over_tokens`` is what an operator overrides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from relinear.deprecated import with_attributes_of_0_2


def is_recomputing() -> bool:
    """Return whether a backward pass runs this forward again, for gradient checkpointing; False in compiled code."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


@with_attributes_of_0_2
class AuxiliaryLossMixin(nn.Module):
    """Record auxiliary losses and metrics per token; ``hf.labels.loss_mask`` says which tokens are averaged."""

    #: whether a model has added the losses of its last forward to its loss; a model around it does not do so again
    is_in_loss: bool = False

    def __init__(self) -> None:
        super().__init__()
        #: by name: one value per token (leading sizes as the input's), or a scalar
        self._auxiliary_losses: dict[str, Tensor] = {}
        self._metrics: dict[str, Tensor] = {}

    def auxiliary_losses(self) -> dict[str, Tensor]:
        """Return the weighted auxiliary losses (token means) of the last training forward, by name; {} in eval.

        In a model the means are over the tokens of ``hf.labels.loss_mask``, in a layer alone over all tokens.
        """
        return self._scalars_by_name("_auxiliary_losses", only_training=True)

    def metrics(self) -> dict[str, Tensor]:
        """Return detached scalars of the last training forward to log, by name; they are not losses."""
        return self._scalars_by_name("_metrics")

    def _scalars_by_name(self, attribute: str, *, only_training: bool = False) -> dict[str, Tensor]:
        """Return scalars of this module and of those inside; a name that is taken follows the module's own name."""
        scalars: dict[str, Tensor] = {}
        for path, recorder in self._recorders():
            if recorder.training or not only_training:
                for name, value in recorder._as_scalars(getattr(recorder, attribute)).items():
                    scalars[f"{path}.{name}" if name in scalars else name] = value
        return scalars

    def _recorders(self) -> list[tuple[str, AuxiliaryLossMixin]]:
        """Return this module and those inside that record losses and metrics, by name."""
        return [(path, module) for path, module in self.named_modules() if isinstance(module, AuxiliaryLossMixin)]

    def has_auxiliary(self) -> bool:
        """Return whether the last forward recorded a loss or a metric."""
        return any(recorder._auxiliary_losses or recorder._metrics for _, recorder in self._recorders())

    def clear_auxiliary_losses(self) -> None:
        """Drop the losses of an earlier forward, with their graph, and in training its metrics."""
        self.is_in_loss = False
        for _, recorder in self._recorders():
            recorder._auxiliary_losses = {}
            recorder._metrics = {} if recorder.training else recorder._metrics

    def reduce_over_tokens(self, name: str, value: Tensor, mask: Tensor | None) -> Tensor:
        """Reduce the per-token loss or metric ``name`` to a scalar: by default the mean over the tokens in ``mask``.

        Override this if the loss is not a mean of per-token values; record what it needs of each token. The result must
        not depend on tokens outside of ``mask``.

        Args:
            value: what was recorded: (B, T, ...), (B T, ...), or any shape if the layer runs alone.
            mask: bool, with the leading sizes of ``value``; None for all tokens.
        """
        if mask is None:
            return value.mean()
        mask = mask.reshape(*mask.shape, *[1] * (value.ndim - mask.ndim)).expand_as(value)
        return torch.where(mask, value, 0.0).sum() / mask.sum().clamp(min=1)

    def _as_scalars(self, values: dict[str, Tensor], mask: Tensor | None = None) -> dict[str, Tensor]:
        """Return ``values`` as scalars: per-token values reduced, scalars unchanged."""
        return {
            name: value if value.ndim == 0 else self.reduce_over_tokens(name, value, _mask_for(value, mask))
            for name, value in values.items()
        }

    def record_auxiliary(self, losses: dict[str, Tensor], metrics: dict[str, Tensor]) -> None:
        """Record losses and (detached) metrics of this training forward, one value per token or scalars.

        If one forward of the model records a name several times, the last time counts. Nothing is recorded in eval, nor
        when gradient checkpointing recomputes a layer in the backward pass: that forward is reduced already.
        """
        # the model's forward clears both first, so if there are any, this runs within its backward pass
        if self.training and not ((self._auxiliary_losses or self._metrics) and is_recomputing()):
            # nn.Module.__setattr__ would look for parameters
            detached = zip(metrics, map(Tensor.detach, metrics.values()))
            object.__setattr__(self, "_auxiliary_losses", self._auxiliary_losses | losses)
            object.__setattr__(self, "_metrics", self._metrics | dict(detached))

    def reduce_auxiliary(self, mask: Tensor | None) -> None:
        """Reduce what the last forward recorded per token to means over the tokens in ``mask``.

        Args:
            mask: (B, T) bool, or None for all. If shapes differ from the mask (an expert sees the tokens that are
                routed to it), the loss averages over all tokens that the operator saw.
        """
        for _, recorder in self._recorders():
            recorder._auxiliary_losses = recorder._as_scalars(recorder._auxiliary_losses, mask)
            recorder._metrics = recorder._as_scalars(recorder._metrics, mask)

    def __getstate__(self) -> dict[str, Any]:
        # deepcopy refuses tensors with a graph
        return super().__getstate__() | {"_auxiliary_losses": {}, "_metrics": {}}


def _mask_for(value: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return ``mask`` (B, T) in the leading shape of ``value``, (B, T, ...) or (B T, ...); None if neither fits."""
    if mask is None:
        return None
    for shape in (mask.shape, (mask.numel(),)):
        if value.shape[: len(shape)] == shape:
            return mask.reshape(shape).to(value.device)
    return None
