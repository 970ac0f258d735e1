"""Pivoted low-rank products: pivots join the first one, and the gradient for the inputs scatters no sum; a few rows, as
in decoding, run in one C++ kernel."""

# Legend: I in_features, O out_features, R rank

from __future__ import annotations

import torch
from torch import Tensor

from relinear.functional import pivoted_low_rank as reference
from relinear.kernels.choice import against_opaque
from relinear.kernels.low_rank import few_rows

__all__ = ["pivoted_low_rank"]


class _Permuted(torch.autograd.Function):
    """x[..., order]; differentiable any number of times, as its gradient is of its own kind."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor) -> Tensor:
        ctx.order = order
        return reference.in_order(x, order)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return _Permuted.apply(grad, ctx.order.argsort()), None


def pivoted_low_rank(x: Tensor, order: Tensor, mix: Tensor, up: Tensor, bias: Tensor | None = None) -> Tensor:
    """As ``functional.pivoted_low_rank.pivoted_low_rank``."""
    y = few_rows(x, order, mix, up, bias)
    if y is not None:
        return y
    if against_opaque():
        return reference.pivoted_low_rank(x, order, mix, up, bias)
    rank = up.shape[1]
    rows = (_Permuted.apply(x, order) if x.requires_grad else reference.in_order(x, order)).reshape(-1, x.shape[-1])
    z = torch.addmm(rows[:, :rank], rows[:, rank:], mix.mT)  # one pass less over z than a sum of its own
    return torch.nn.functional.linear(z, up, bias).view(*x.shape[:-1], up.shape[0])
