"""Pivoted low-rank products whose gradient for the inputs is a permutation and no scattered sum."""

# Legend: I in_features, O out_features, R rank

from __future__ import annotations

import torch
from torch import Tensor

from relinear.functional import pivoted_low_rank as reference
from relinear.kernels.choice import against_opaque

__all__ = ["pivoted_low_rank"]


class _Permuted(torch.autograd.Function):
    """x[..., order]; differentiable any number of times, as its gradient is of its own kind."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor) -> Tensor:
        ctx.order = order
        return x.index_select(-1, order)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return _Permuted.apply(grad, ctx.order.argsort()), None


def pivoted_low_rank(x: Tensor, order: Tensor, mix: Tensor, up: Tensor, bias: Tensor | None = None) -> Tensor:
    """As ``functional.pivoted_low_rank.pivoted_low_rank``."""
    if not x.requires_grad or against_opaque():
        return reference.pivoted_low_rank(x, order, mix, up, bias)
    return reference.pivoted_product(_Permuted.apply(x, order), mix, up, bias)
