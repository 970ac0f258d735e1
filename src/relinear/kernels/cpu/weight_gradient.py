"""The product that every weight's gradient is, in a form that bfloat16 is fast in."""

from __future__ import annotations

from torch import Tensor

from relinear.kernels.choice import against_transposed_copy, took
from relinear.kernels.cpu.compiled import compiled

__all__ = ["weight_gradient"]

#: how many times narrower x has to be for its transposed copy to be the cheaper one
NARROW = 4


def _transposed(x: Tensor) -> Tensor:
    return x.T.contiguous()


def weight_gradient(grad: Tensor, x: Tensor, total: Tensor | None = None) -> Tensor:
    """grad^T x (O, I) of grad (N, O) and x (N, I), added to ``total`` in place where that is given.

    A CPU's bfloat16 product takes twice as long where its first matrix is a transposed view, more than a compiled copy
    of it costs.
    """
    reason = against_transposed_copy(grad, x)
    took("weight's gradient", "product of a view" if reason else "product of a copy", grad, copy=reason)
    if not reason:
        if x.shape[1] * NARROW <= grad.shape[1]:
            part = (x.T.contiguous() @ grad).T
            return part if total is None else total.add_(part)
        left = compiled(_transposed)(grad)
    else:
        left = grad.T
    return left @ x if total is None else total.addmm_(left, x)
