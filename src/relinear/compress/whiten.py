"""Training steps in coordinates in which all directions of a weight cost alike.

A change D of a layer's weight costs about 0.5 tr(G D A D^T) nats a token, with A and G the moments of its inputs and of
its outputs' gradients. With A = C C^T and G = K K^T (Cholesky, after a ridge) and D = K^(-T) S C^(-1) that is
0.5 |S|^2: an optimiser that steps in S meets no direction that is a thousand times steeper than another, as there are
in a pretrained decoder, whose inputs have a few channels of enormous size. Gradients become K^(-1) g C^(-T), and what
the optimiser makes of them is taken back.
"""

# Legend: I in_features, O out_features, P, Q sizes of a parameter (P, Q)

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from relinear.core.moments import Moments

__all__ = ["WhitenedSteps"]

#: added to a moment before it is decomposed, as a share of its mean diagonal
RIDGE = 1e-2


class _Factors(NamedTuple):
    """Lower triangles K (P, P), or None for the identity, and C (Q, Q)."""

    left: Tensor | None
    right: Tensor


def _triangle(moment: Tensor, like: Tensor) -> Tensor:
    moment = moment.detach().double()
    scale = float(moment.diagonal().mean()) or 1.0
    pull = RIDGE * scale * torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
    return torch.linalg.cholesky(moment + pull).to(like)


class WhitenedSteps(TrainerCallback):
    """Lets the run's optimiser step in whitened coordinates for some parameters.

    Args:
        moments: parameters (P, Q), each with the moments of what it multiplies (Q, Q) and of its results' gradients
            (P, P); taken one by one, so that they need not be in memory together.
    """

    def __init__(self, moments: Iterable[tuple[nn.Parameter, Moments]]) -> None:
        self.factors = {
            p: _Factors(None if m.outputs is None else _triangle(m.outputs, p), _triangle(m.inputs, p))
            for p, m in moments
        }
        self._kept: dict[nn.Parameter, Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        optimizer = objects["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)
        self._handles = (
            optimizer.register_step_pre_hook(lambda *_: self._whiten()),
            optimizer.register_step_post_hook(lambda *_: self._take_back()),
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _whiten(self) -> None:
        """Gradients become those of S; parameters become S, which is 0 before each step."""
        for parameter, (left, right) in self.factors.items():
            if parameter.grad is None:
                continue
            grad = torch.linalg.solve_triangular(right.T, parameter.grad, upper=True, left=False)
            if left is not None:
                grad = torch.linalg.solve_triangular(left, grad, upper=False)
            parameter.grad.copy_(grad)
            self._kept[parameter] = parameter.detach().clone()
            parameter.zero_()

    @torch.no_grad()
    def _take_back(self) -> None:
        for parameter, before in self._kept.items():
            left, right = self.factors[parameter]
            change = torch.linalg.solve_triangular(right, parameter.detach(), upper=False, left=False)
            if left is not None:
                change = torch.linalg.solve_triangular(left.T, change, upper=True)
            parameter.copy_(before + change)
        self._kept.clear()
