"""Twin of ``functional.rotor``, sums of sandwiches: two products of small matrices a term, token by token in cache.

The intermediate X B^T of a few hundred tokens stays in the processor's cache and is recomputed in the backward pass
rather than kept, so that a layer needs no memory beyond its input and output.
"""

# Legend: N tokens, I / O windows of the input / output, W terms, M coordinates, L and R sizes of the factors

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from relinear.functional import rotor as reference
from relinear.kernels import native
from relinear.kernels.autograd import differentiable_as, save
from relinear.kernels.choice import (
    against_native_branches,
    against_native_network,
    against_opaque,
    against_triton,
    step_kind,
    took,
)
from relinear.kernels.cpu.portions import row_portions

__all__ = [
    "PreparedNetwork",
    "mixed_branches",
    "rotor_network",
    "rotor_step",
    "sandwich_windows",
    "shared_sandwich_sum",
]

#: tokens that are worth gradients of their own, which are summed at the end
TOKENS_OF_A_SHARE = 64


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
    triton = against_triton("rotor", x, left, right, outputs=x.shape[-1] * left.shape[1])
    took("rotor's windows and basis", "torch's operations" if triton else "Triton", x, triton=triton)
    if not triton:
        from relinear.kernels.triton import rotor as fused

        return fused.sandwich_windows(x, left, right, basis)
    return reference.through_blocks(x, left, right, basis, shared_sandwich_sum)


def _single(values: Tensor, branches: int) -> Tensor:
    """Numbers of the branches, or one for all of them, for the kernel: (W,) in single precision."""
    return values.detach().float().expand(branches).contiguous()


class _MixedBranches(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, slopes, mix, normalize):
        save(ctx, (x, order, slopes, mix, normalize))
        return _mix(x, order, slopes, mix, normalize)

    @staticmethod
    @differentiable_as(reference.mixed_branches)
    def backward(ctx, grad):
        x, order, slopes, mix, _ = ctx.saved_tensors
        x, branches = x.contiguous(), x.shape[1]
        grad_x, sums = torch.empty_like(x), x.new_empty(len(x), 2, branches, dtype=torch.float32)
        numbers = _single(slopes, branches), _single(mix, branches), ctx.plain[4]
        native.kernels().mix_branches_backward(grad_x, sums, grad.contiguous(), x, order, *numbers)
        to_slopes, to_mix = sums.sum(0)
        return grad_x, None, to_slopes.sum_to_size(slopes.shape).to(slopes.dtype), to_mix.to(mix.dtype), None


def _mix(x: Tensor, order: Tensor, slopes: Tensor, mix: Tensor, normalize: bool) -> Tensor:
    y = x.new_empty(x.shape[0], x.shape[2])
    numbers = (_single(values, x.shape[1]) for values in (slopes, mix))
    native.kernels().mix_branches(y, x.contiguous(), order, *numbers, normalize)
    return y


def mixed_branches(
    x: Tensor,
    order: Tensor | None,
    slopes: Tensor,
    mix: Tensor,
    normalize: bool = True,
    activation: str = "prelu",
) -> Tensor:
    """``functional.rotor.mixed_branches`` (same arguments and result)."""
    against = "no PReLU" if callable(reference.ACTIVATIONS[activation]) else ""
    against = against or against_native_branches(x, order, slopes, mix)
    took("rotor's branches", "torch's operations" if against else "one pass in C++", x, native=against)
    if against:
        return reference.mixed_branches(x, order, slopes, mix, normalize, activation)
    assert order is not None
    if torch.is_grad_enabled() and (x.requires_grad or slopes.requires_grad or mix.requires_grad):
        return _MixedBranches.apply(x, order, slopes, mix, normalize)
    return _mix(x, order, slopes, mix, normalize)


def rotor_step(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    slopes: Tensor,
    mix: Tensor,
    seed: int | None,
    step: int = 0,
    basis: str = "spinor",
    normalize: bool = True,
    activation: str = "prelu",
) -> Tensor:
    """``functional.rotor.rotor_step`` (same arguments and result)."""
    triton = against_triton(step_kind(x.shape[-1]), x, left, right, slopes, mix, outputs=x.shape[-1])
    took("rotor's hidden step", "torch's operations" if triton else "Triton", x, triton=triton)
    if not triton:
        from relinear.kernels.triton import rotor_step as fused

        return fused.rotor_step(x, left, right, slopes, mix, seed, step, basis, normalize, activation)
    branches = sandwich_windows(x.unsqueeze(1), left, right, basis)
    order = None if seed is None else reference.step_order(x, left.shape[1], seed, step)
    return mixed_branches(branches, order, slopes, mix, normalize, activation)


def _ready(values: Tensor) -> Tensor:
    """Numbers for the kernel: in single precision, contiguous."""
    if values.dtype == torch.float32 and not values.requires_grad and values.is_contiguous():
        return values
    return values.detach().float().contiguous()


class PreparedNetwork:
    """A network as the kernel takes it: ``rotor_network`` without gradients, where nothing speaks against the kernel.

    Args:
        in_features: size of the inputs.
        left, right, orders, slopes, mix, form: as for ``rotor_network``.
    """

    def __init__(
        self,
        in_features: int,
        left: Sequence[Tensor],
        right: Sequence[Tensor],
        orders: Tensor | None,
        slopes: Tensor,
        mix: Tensor,
        form: reference.NetworkForm,
    ) -> None:
        self.left, self.right = [_ready(factor) for factor in left], [_ready(factor) for factor in right]
        sizes = zip(form.windows, self.left, self.right, strict=True)
        self.parts = [window // reference.shared_coordinates(window, a, b) for window, a, b in sizes]
        self.orders = slopes.new_empty(0, dtype=torch.int32) if orders is None else orders.flatten()
        self.numbers = [_ready(values) for values in (slopes, mix)]
        self.tables = reference.window_tables(in_features, form.out_features, form, slopes)
        self.form = form
        sizes_and_basis = form.windows, self.parts, *reference.basis_tables(form, slopes)
        self.layers = self.left, self.right, *sizes_and_basis, self.orders, *self.numbers, *self.tables
        curved = callable(reference.ACTIVATIONS[form.activation])
        self.settings = form.normalize, form.after_entry, form.residual, form.activation if curved else "prelu"

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = x.new_empty(x.shape[0], self.form.out_features)
        given_bias = None if bias is None else _ready(bias)
        native.kernels().rotor_network(y, x.detach().contiguous(), *self.layers, given_bias, *self.settings)
        return y


def _network_of_factors(form, orders, x, slopes, mix, bias, *factors) -> Tensor:
    half = len(factors) // 2
    return reference.rotor_network(x, factors[:half], factors[half:], orders, slopes, mix, bias, form)


class _Network(torch.autograd.Function):
    """The network in one pass, of which the backward pass computes everything between input and output again."""

    @staticmethod
    def forward(ctx, form, orders, x, slopes, mix, bias, *factors):
        save(ctx, (form, orders, x, slopes, mix, bias, *factors))
        half = len(factors) // 2
        ctx.given = PreparedNetwork(x.shape[1], factors[:half], factors[half:], orders, slopes, mix, form)
        return ctx.given(x, bias)

    @staticmethod
    @differentiable_as(_network_of_factors)
    def backward(ctx, grad):
        _, _, x, slopes, mix, bias, *factors = ctx.saved_tensors  # which says whether one was changed in place
        need_x, need_bias = ctx.needs_input_grad[2], ctx.needs_input_grad[5]
        given, x, grad = ctx.given, x.contiguous(), grad.contiguous()
        grad_x = torch.empty_like(x) if need_x else None
        parameters = [*itertools.chain(*zip(given.left, given.right, strict=True)), slopes, mix]
        sizes = [parameter.numel() for parameter in parameters]
        shares = max(1, min(torch.get_num_threads(), len(x) // TOKENS_OF_A_SHARE))
        sums = x.new_empty(shares, sum(sizes), dtype=torch.float32)
        native.kernels().rotor_network_backward(grad_x, sums, grad, x, *given.layers, *given.settings)
        *found, to_slopes, to_mix = sums.sum(0).split(sizes)
        ordered = [*found[::2], *found[1::2]]
        to_factors = [g.view(f.shape).to(f.dtype) for g, f in zip(ordered, factors, strict=True)]
        to_bias = grad.sum(0).to(bias.dtype) if need_bias else None
        return None, None, grad_x, to_slopes.to(slopes.dtype), to_mix.to(mix.dtype), to_bias, *to_factors


def rotor_network(
    x: Tensor,
    left: Sequence[Tensor],
    right: Sequence[Tensor],
    orders: Tensor | None,
    slopes: Tensor,
    mix: Tensor,
    bias: Tensor | None,
    form: reference.NetworkForm,
) -> Tensor:
    """``functional.rotor.rotor_network`` (same arguments and result)."""
    against = against_native_network(x, [factor.shape[-1] for factor in (*left, *right)])
    took("rotor's network", "torch's operations" if against else "tiles of tokens in C++", x, native=against)
    if against:
        return reference.rotor_network(x, left, right, orders, slopes, mix, bias, form)
    if torch.is_grad_enabled():
        return _Network.apply(form, orders, x, slopes, mix, bias, *left, *right)
    return PreparedNetwork(x.shape[1], left, right, orders, slopes, mix, form)(x, bias)
