"""Kernels of ``functional.pivoted_low_rank``: training orders inputs again, and gathers their gradient.

The reference's is a scattered sum, which on a CPU takes longer than all products.
"""

import torch
from torch import Tensor

from relinear.functional import pivoted_low_rank as reference
from relinear.kernels.autograd import recomputed
from relinear.kernels.implementations import Call, Implementation, dispatch

#: numbers from which the scattered sum takes longer than the calls of ours
FEWEST_PERMUTED = 1 << 12


class _Permuted(torch.autograd.Function):
    """x[..., order]; differentiable any number of times, as its gradient is of its own kind."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor) -> Tensor:
        ctx.order = order
        return reference.in_order(x, order)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return _Permuted.apply(grad, ctx.order.argsort()), None


def _unsupported(call: Call) -> str:
    if not (call.grad and call.x.requires_grad):
        return "no gradient for the inputs"
    return call.opaque or ("too few numbers" if call.size < FEWEST_PERMUTED else "")


def _latent(x: Tensor, order: Tensor, mix: Tensor) -> Tensor:
    return reference.latent(_Permuted.apply(x, order), mix)


def _gathered(x: Tensor, order: Tensor, mix: Tensor, up: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(recomputed(_latent, x, order, mix), up, bias)


pivoted_low_rank = dispatch(Implementation("gradient gathered", _unsupported, _gathered), otherwise="reference")(
    reference.pivoted_low_rank
)
