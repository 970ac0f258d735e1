"""Compute ``functional.pivoted_low_rank`` with a faster gradient of the inputs: it is gathered by index.

Autograd of the reference adds it up with scatter operations, which on a CPU take longer than all products.
"""

import torch
from torch import Tensor

from relinear.functional import pivoted_low_rank as reference
from relinear.kernels.autograd import with_backward
from relinear.kernels.implementations import Call, Implementation, dispatch

#: elements of x from which gathering is faster than the scattered sum
MIN_PERMUTED = 1 << 12


def _latent(x: Tensor, order: Tensor, mix: Tensor) -> Tensor:
    return reference.latent(reference.in_order(x, order), mix)


@with_backward(_latent, _latent)
def _gathered_latent(ctx, grad):
    x, order, mix = ctx.saved_tensors
    to_x = to_mix = None
    if ctx.needs_input_grad[0]:
        to_x = reference.in_order(torch.cat((grad, grad @ mix), 1), order.argsort())
    if ctx.needs_input_grad[2]:
        to_mix = grad.T @ reference.in_order(x, order[len(mix) :])
    return to_x, None, to_mix


def _unsupported(call: Call) -> str:
    if not (call.grad and call.x.requires_grad):
        return "no gradient for the inputs"
    return call.opaque or ("too few numbers" if call.size < MIN_PERMUTED else "")


def _gathered(x: Tensor, order: Tensor, mix: Tensor, up: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(_gathered_latent(x, order, mix), up, bias)


pivoted_low_rank = dispatch(Implementation("gradient gathered", _unsupported, _gathered), otherwise="reference")(
    reference.pivoted_low_rank
)
