"""Sums of sandwiches, the fast form: two products of small matrices a term, token by token in cache.

The intermediate X B^T of a few hundred tokens stays in the processor's cache and is recomputed in the backward pass
rather than kept, so that a layer needs no memory beyond its input and output.
"""

# Legend: N tokens, I / O windows of the input / output, W terms, M coordinates, L and R sizes of the factors

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from relinear.functional import rotor as reference

__all__ = ["sandwich_sum"]

#: numbers that an intermediate holds on a CPU: about a megabyte in single precision, what a core's cache takes
CHUNK_NUMBERS = 1 << 18


def _chunks(x: Tensor) -> list[slice]:
    step = max(1, CHUNK_NUMBERS // x.shape[-1]) if x.device.type == "cpu" else max(1, x.shape[0])
    return [slice(start, min(start + step, x.shape[0])) for start in range(0, x.shape[0], step)]


def _terms(left: Tensor):
    """(w, o, i) of every term, output windows outermost."""
    terms, outputs, inputs = left.shape[:3]
    return ((w, o, i) for o, w, i in itertools.product(range(outputs), range(terms), range(inputs)))


def _rows(x: Tensor, columns: int) -> Tensor:
    # (n, M) -> (n M/R, R), a view where x is contiguous
    return x.reshape(-1, columns)


def _forward(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    rows, columns, size = left.shape[-1], right.shape[-1], x.shape[-1]
    y = x.new_empty(x.shape[0], left.shape[1], size)
    for chunk in _chunks(x):
        count = chunk.stop - chunk.start
        half = x.new_empty(count * size // columns, columns)
        written = set()
        for w, o, i in _terms(left):
            torch.mm(_rows(x[chunk, i], columns), right[w, o, i].mT, out=half)
            factor, middle = left[w, o, i].expand(count, rows, rows), half.view(count, rows, -1)
            target = y[chunk, o].view(count, rows, -1)
            if o in written:
                target.baddbmm_(factor, middle)
            elif target.is_contiguous():
                torch.bmm(factor, middle, out=target)
            else:
                target.copy_(torch.bmm(factor, middle))
            written.add(o)
    return y


def _backward(grad: Tensor, x: Tensor, left: Tensor, right: Tensor, to_x: bool) -> tuple:
    rows, columns, size = left.shape[-1], right.shape[-1], x.shape[-1]
    wide = torch.promote_types(left.dtype, torch.float32)
    grad_x = torch.zeros_like(x) if to_x else None
    grad_left, grad_right = torch.zeros_like(left, dtype=wide), torch.zeros_like(right, dtype=wide)
    for chunk in _chunks(x):
        count = chunk.stop - chunk.start
        for w, o, i in _terms(left):
            a, b = left[w, o, i], right[w, o, i]
            source = _rows(x[chunk, i], columns)
            half = (source @ b.mT).view(count, rows, -1)
            out = grad[chunk, o].reshape(count, rows, -1)
            # token by token, then the sum: on a CPU faster than transposed copies and one long product
            grad_left[w, o, i] += torch.bmm(out, half.mT).sum(0)
            grad_half = torch.bmm(a.mT.expand(count, rows, rows), out).view(-1, columns)
            grad_right[w, o, i] += grad_half.mT @ source
            if to_x:
                grad_x[chunk, i] += (grad_half @ b).view(count, size)
    return grad_x, grad_left.to(left.dtype), grad_right.to(right.dtype)


class _SandwichSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, left, right):
        ctx.save_for_backward(x, left, right)
        return _forward(x, left, right)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, left, right = ctx.saved_tensors
        return _backward(grad, x, left, right, ctx.needs_input_grad[0])


def sandwich_sum(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``functional.rotor.sandwich_sum`` (same arguments and result), differentiable once.

    Inside ``torch.compile`` the reference form is traced, which the compiler can fuse with its surroundings.
    """
    if torch.compiler.is_compiling():
        return reference.sandwich_sum(x, left, right)
    if torch.is_grad_enabled() and (x.requires_grad or left.requires_grad or right.requires_grad):
        return _SandwichSum.apply(x, left, right)
    return _forward(x, left, right)
