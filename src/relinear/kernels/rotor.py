"""Twin of ``functional.rotor``, sums of sandwiches: two products of small matrices a term, token by token in cache.

The intermediate X B^T of a few hundred tokens stays in the processor's cache and is recomputed in the backward pass
rather than kept, so that a layer needs no memory beyond its input and output.
"""

# Legend: N tokens, I / O windows of the input / output, W terms, M coordinates, L and R sizes of the factors

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from relinear.functional import rotor as reference
from relinear.kernels.autograd import differentiable_as, save
from relinear.kernels.choice import against_opaque, against_triton, took
from relinear.kernels.cpu.portions import row_portions

__all__ = ["sandwich_windows", "shared_sandwich_sum"]


def _terms(left: Tensor):
    """(w, o, i) of every term, output windows outermost."""
    terms, outputs, inputs = left.shape[:3]
    return ((w, o, i) for o, w, i in itertools.product(range(outputs), range(terms), range(inputs)))


def _rows(x: Tensor, columns: int) -> Tensor:
    # (n, M) -> (n M/R, R), a view where x is contiguous
    return x.reshape(-1, columns)


def _repeated(matrix: Tensor, count: int) -> Tensor:
    """``matrix`` once a token, for batched products: (count, K, K)."""
    repeated = matrix.expand(count, *matrix.shape)
    # in half precision a CPU copies an expanded operand at every product, so that it is copied once here
    return repeated.contiguous() if matrix.device.type == "cpu" and matrix.dtype.itemsize == 2 else repeated


def _shares(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Views of ``count`` parts of the coordinates of x (N, I, M count), each (N, I, M)."""
    return x.unflatten(-1, (count, -1)).unbind(-2)


def _forward(x: Tensor, left: Tensor, right: Tensor, count: int = 1) -> Tensor:
    """The product of each of ``count`` parts of the coordinates with the same factors."""
    y = x.new_empty(x.shape[0], left.shape[1], x.shape[-1])
    for given, result in zip(_shares(x, count), _shares(y, count), strict=True):
        _fill(result, given, left, right)
    return y


def _fill(y: Tensor, x: Tensor, left: Tensor, right: Tensor) -> None:
    rows, columns, size = left.shape[-1], right.shape[-1], x.shape[-1]
    portions = row_portions(x[:, 0])
    factors = {at: _repeated(left[at], portions[0].stop) for at in _terms(left)}
    for portion in portions:
        count = portion.stop - portion.start
        half = x.new_empty(count * size // columns, columns)
        written = set()
        for at in _terms(left):
            _, o, i = at
            torch.mm(_rows(x[portion, i], columns), right[at].mT, out=half)
            factor, middle = factors[at][:count], half.view(count, rows, size // rows)
            target = y[portion, o].view(count, rows, size // rows)
            if o in written:
                target.baddbmm_(factor, middle)
            elif target.is_contiguous():
                torch.bmm(factor, middle, out=target)
            else:
                target.copy_(torch.bmm(factor, middle))
            written.add(o)


def _backward(grad: Tensor, x: Tensor, left: Tensor, right: Tensor, to_x: bool, count: int) -> tuple:
    wide = torch.promote_types(left.dtype, torch.float32)
    grad_x = torch.empty_like(x) if to_x else None
    totals = torch.zeros_like(left, dtype=wide), torch.zeros_like(right, dtype=wide)
    to_parts = (None,) * count if grad_x is None else _shares(grad_x, count)
    for part, given, to_part in zip(_shares(grad, count), _shares(x, count), to_parts, strict=True):
        _add_gradients(*totals, to_part, part, given, left, right)
    return grad_x, totals[0].to(left.dtype), totals[1].to(right.dtype)


def _add_gradients(
    grad_left: Tensor, grad_right: Tensor, grad_x: Tensor | None, grad: Tensor, x: Tensor, left: Tensor, right: Tensor
) -> None:
    """Adds to the gradients of the factors, and writes that of x."""
    rows, columns, size = left.shape[-1], right.shape[-1], x.shape[-1]
    portions = row_portions(x[:, 0])
    factors = {at: _repeated(left[at].mT, portions[0].stop) for at in _terms(left)}
    for portion in portions:
        count = portion.stop - portion.start
        written = set()
        ready, out = -1, grad
        for at in _terms(left):
            _, o, i = at
            b = right[at]
            source = _rows(x[portion, i], columns)
            half = (source @ b.mT).view(count, rows, size // rows)
            if o != ready:
                # an expanded gradient (that of a sum) takes batched products several times as long; this is a view
                # where it is contiguous, and else one copy of the portion for all terms
                ready, out = o, grad[portion, o].reshape(count, rows, size // rows).contiguous()
            # token by token, then the sum: on a CPU faster than transposed copies and one long product
            grad_left[at] += torch.bmm(out, half.mT).sum(0)
            grad_half = torch.bmm(factors[at][:count], out).view(-1, columns)
            grad_right[at] += grad_half.mT @ source
            if grad_x is None:
                continue
            target = grad_x[portion, i]
            if i in written:
                target += (grad_half @ b).view(count, size)
            elif target.is_contiguous():
                torch.mm(grad_half, b, out=target.view(-1, columns))
            else:
                target.copy_((grad_half @ b).view(count, size))
            written.add(i)


class _SandwichSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, left, right, count):
        save(ctx, (x, left, right, count))
        return _forward(x, left, right, count)

    @staticmethod
    @differentiable_as(reference.shared_sandwich_sum)
    def backward(ctx, grad):
        x, left, right, _ = ctx.saved_tensors
        return *_backward(grad, x, left, right, ctx.needs_input_grad[0], ctx.plain[3]), None


def shared_sandwich_sum(x: Tensor, left: Tensor, right: Tensor, count: int = 1) -> Tensor:
    """``functional.rotor.shared_sandwich_sum`` (same arguments and result)."""
    opaque = against_opaque()
    took("rotor", "reference" if opaque else "two products a term, by portions", x, opaque=opaque)
    if opaque:
        return reference.shared_sandwich_sum(x, left, right, count)
    if torch.is_grad_enabled() and (x.requires_grad or left.requires_grad or right.requires_grad):
        return _SandwichSum.apply(x, left, right, count)
    return _forward(x, left, right, count)


def sandwich_windows(x: Tensor, left: Tensor, right: Tensor, basis: str = "spinor") -> Tensor:
    """``functional.rotor.sandwich_windows`` (same arguments and result)."""
    triton = against_triton("rotor", x, left, right)
    took("rotor's windows and basis", "torch's operations" if triton else "Triton", x, triton=triton)
    if not triton:
        from relinear.kernels.triton import rotor as fused

        return fused.sandwich_windows(x, left, right, basis)
    return reference.through_blocks(x, left, right, basis, shared_sandwich_sum)
