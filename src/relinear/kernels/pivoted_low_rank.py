"""Pivoted low-rank products: pivots join the first one, and the gradient for the inputs scatters no sum, which on a CPU
takes longer than all products."""

# Legend: I in_features, O out_features, R rank

from __future__ import annotations

import torch
from torch import Tensor

from relinear.functional import pivoted_low_rank as reference
from relinear.kernels.forms import Call, Form, dispatch

__all__ = ["pivoted_low_rank"]

#: numbers from which the gradient of the reference's permutation, a scattered sum, takes longer than the calls of ours
FEWEST_PERMUTED = 1 << 11


class _Permuted(torch.autograd.Function):
    """x[..., order]; differentiable any number of times, as its gradient is of its own kind."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor) -> Tensor:
        ctx.order = order
        return reference.in_order(x, order)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return _Permuted.apply(grad, ctx.order.argsort()), None


def _gathered(x: Tensor, order: Tensor, mix: Tensor, up: Tensor, bias: Tensor | None) -> Tensor:
    rank = up.shape[1]
    rows = _Permuted.apply(x, order).reshape(-1, x.shape[-1])
    z = torch.addmm(rows[:, :rank], rows[:, rank:], mix.mT)  # one pass less over z than a sum of its own
    return torch.nn.functional.linear(z, up, bias).view(*x.shape[:-1], up.shape[0])


def _refuses(call: Call) -> str:
    if not (call.grad and call.x.requires_grad):
        return "no gradient for the inputs"
    return call.opaque or ("too few numbers" if call.size < FEWEST_PERMUTED else "")


@dispatch(Form("pivots in the first product", _refuses, _gathered), otherwise="reference")
def pivoted_low_rank(x: Tensor, order: Tensor, mix: Tensor, up: Tensor, bias: Tensor | None = None) -> Tensor:
    """As ``functional.pivoted_low_rank.pivoted_low_rank``."""
    return reference.pivoted_low_rank(x, order, mix, up, bias)
