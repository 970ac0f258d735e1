"""Twin of ``functional.rotor``, sums of sandwiches: two products of small matrices a term, token by token in cache.

The intermediate X B^T of a few hundred tokens stays in the processor's cache and is recomputed in the backward pass
rather than kept, so that a layer needs no memory beyond its input and output.
"""

# Legend: N tokens, I / O windows of the input / output, W terms, M coordinates, L and R sizes of the factors

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from relinear.functional import rotor as reference
from relinear.kernels import native, triton
from relinear.kernels.autograd import differentiable_as, save
from relinear.kernels.cpu.portions import row_portions
from relinear.kernels.forms import Call, Form, dispatch, refuses_opaque, refuses_small

__all__ = [
    "PreparedNetwork",
    "rotor_network",
    "rotor_step",
    "sandwich_windows",
    "shared_sandwich_sum",
    "takes_network",
    "takes_step",
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


def _by_portions(x: Tensor, left: Tensor, right: Tensor, count: int) -> Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or left.requires_grad or right.requires_grad):
        return _SandwichSum.apply(x, left, right, count)
    return _forward(x, left, right, count)


@dispatch(Form("two products a term, by portions", refuses_small, _by_portions), otherwise="reference")
def shared_sandwich_sum(x: Tensor, left: Tensor, right: Tensor, count: int = 1) -> Tensor:
    """``functional.rotor.shared_sandwich_sum`` (same arguments and result)."""
    return reference.shared_sandwich_sum(x, left, right, count)


_refuses_triton = functools.partial(
    triton.refuses,
    kind="rotor",
    tensors=3,
    outputs=lambda call: call.x.shape[-1] * call.given[1].shape[1],
    most=2**40,
    training=False,
)


def _triton(*given: Any) -> Tensor:
    from relinear.kernels.triton import rotor as fused

    return fused.sandwich_windows(*given)


@dispatch(Form("Triton", _refuses_triton, _triton))
def sandwich_windows(x: Tensor, left: Tensor, right: Tensor, basis: str = "spinor") -> Tensor:
    """``functional.rotor.sandwich_windows`` (same arguments and result)."""
    return reference.through_blocks(x, left, right, basis, shared_sandwich_sum)


def _refuses_step(call: Call) -> str:
    # factors of 64 numbers and more are checked by themselves, as compilers take their products in other ways
    window = call.x.shape[-1]
    kind = "rotor_step" if window < 2048 else "rotor_step_2048" if window < 4096 else "rotor_step_4096"
    return triton.refuses(call, kind, 5, lambda call: window)


def _step_in_triton(*given: Any) -> Tensor:
    from relinear.kernels.triton import rotor as fused

    return fused.rotor_step(*given)


def takes_step(x: Tensor, left: Tensor, right: Tensor, slopes: Tensor, mix: Tensor) -> bool:
    """Whether ``rotor_step`` is one kernel for such tensors, for whom it would cost to compute factors otherwise."""
    return not _refuses_step(Call(x, left, right, slopes, mix))


@dispatch(Form("Triton", _refuses_step, _step_in_triton))
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
    branches = sandwich_windows(x.unsqueeze(1), left, right, basis)
    order = None if seed is None else reference.step_order(x, left.shape[1], seed, step)
    return reference.mixed_branches(branches, order, slopes, mix, normalize, activation)


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


def _refuses_network(call: Call) -> str:
    """Training keeps to one form, whatever has been built; in inference a few tokens take what is there."""
    _, left, right, *_ = call.given
    return _refuses_sizes(call, [factor.shape[-1] for factor in (*left, *right)])


def _refuses_sizes(call: Call, sizes: Sequence[int]) -> str:
    if any(size % 8 for size in sizes):
        return "factors of sizes not divisible by 8"
    reason = refuses_opaque(call) or native.refuses(call, native.FEWEST_NETWORK_ENTRIES)
    if reason and not call.grad:
        reason = refuses_opaque(call) or native.refuses(call, fewest=1, may_build=False)
    return reason


def takes_network(x: Tensor, sizes: Sequence[int]) -> bool:
    """Return whether ``rotor_network`` is one kernel for inputs x (N, I) and factors of such sizes."""
    return not _refuses_sizes(Call(x), sizes)


def _in_tiles(x, left, right, orders, slopes, mix, bias, form) -> Tensor:
    if torch.is_grad_enabled():
        return _Network.apply(form, orders, x, slopes, mix, bias, *left, *right)
    return PreparedNetwork(x.shape[1], left, right, orders, slopes, mix, form)(x, bias)


@dispatch(Form("tiles of tokens in C++", _refuses_network, _in_tiles))
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
    return reference.rotor_network(x, left, right, orders, slopes, mix, bias, form)
