"""Shared by our autograd functions: autocast, derivatives beyond the first, results that change, portions.

torch cannot lower them under autocast: ``lowered`` does. A backward pass written by hand is in no graph. Where one is
wanted (``create_graph=True``), or torch maps over several gradients at once, the gradients are those of the reference.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from relinear.kernels.implementations import is_transformed

#: size of a portion on a CPU
PORTION_BYTES = 1 << 21
#: the same for outputs whose gradients are computed at a time: smaller ones make small products
BACKWARD_PORTION = 1 << 22
#: larger portions are a multiple of so many rows: a bfloat16 product over an odd number of them (a weight's gradient)
#: takes up to a quarter longer
ROWS = 64

#: numbers from which intermediate results are computed again, and not kept
FEWEST_RECOMPUTED = 1 << 17


def lowered(x: Tensor, *tensors: Any) -> tuple[Any, ...]:
    """Cast floats as autocast does for a matrix product (double precision stays); return all without it."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, *tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in (x, *tensors)
    )


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Switch autocast off for the block, after ``lowered`` has cast the tensors."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def on_rows(function: Any, forward: Callable[..., Tensor], x: Tensor, *arguments: Any) -> Tensor:
    """Apply an autograd function of a matrix (N, I) to x (..., I), as autocast asks; return (..., O).

    Args:
        function: a subclass of ``torch.autograd.Function``.
        forward: its forward pass, for calls without a graph.
        arguments: those after the matrix.
    """
    run = function.apply if torch.is_grad_enabled() else forward
    cast = lowered(x.reshape(-1, x.shape[-1]), *arguments)
    with without_autocast(x):
        y = run(*cast)
    return y.view(*x.shape[:-1], y.shape[1])


def save(ctx: Any, inputs: Sequence[Any], *results: Tensor | None) -> None:
    """Keep all arguments of a forward pass, tensors or not, and some results: these are ``ctx.saved_tensors``."""
    tensors: list[Tensor | None] = [None] * len(inputs)
    ctx.plain = list(inputs)
    for at, value in enumerate(inputs):
        if isinstance(value, Tensor):
            tensors[at], ctx.plain[at] = value, None
    ctx.save_for_backward(*tensors, *results)


def differentiable_as(reference: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the backward pass of a function that ``save`` was called for: it can be differentiated again.

    Args:
        reference: of torch operations, with the arguments and the results of the forward pass.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def run(ctx: Any, *grads: Tensor | None) -> Any:
            if torch.compiler.is_compiling() or not (torch.is_grad_enabled() or is_transformed(*grads)):
                # compilers lower it, and users may run it, within autocast, which the forward pass has obeyed already;
                # that is on, or not, when it is lowered: what holds when it is traced says nothing
                kind = next((grad.device.type for grad in grads if grad is not None), "cpu")
                off = torch.compiler.is_compiling() or torch.is_autocast_enabled(kind)
                with torch.autocast(kind, enabled=False) if off else contextlib.nullcontext():
                    return backward(ctx, *grads)
            return _gradients_of(reference, ctx, grads)

        return run

    return decorate


def keeping_arguments(forward: Callable[..., Tensor], reference: Callable[..., Tensor]) -> Callable[..., Any]:
    """Decorate a backward pass ``(ctx, grad)`` that computes from the arguments of ``forward``, which alone are kept.

    It becomes a function of x (..., I) and further arguments (``on_rows``). ``ctx.saved_tensors`` has a place for each.

    Args:
        forward: of a matrix (N, I) and these, without a graph.
        reference: of torch operations, with the same arguments and result.
    """

    def decorate(by_hand: Callable[..., Any]) -> Callable[..., Tensor]:
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *arguments):
                save(ctx, arguments)
                return forward(*arguments)

            backward = staticmethod(differentiable_as(reference)(by_hand))

        return functools.partial(on_rows, Function, forward)

    return decorate


def _gradients_of(reference: Callable[..., Any], ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """One gradient an argument, with a graph of its own where gradients are enabled."""
    need, further = ctx.needs_input_grad, torch.is_grad_enabled()
    device = next((grad.device.type for grad in grads if grad is not None), "cpu")
    with torch.enable_grad(), torch.autocast(device, enabled=False):
        # Views, because an argument may have been computed from another: its gradient must not run on into that one.
        copies = [
            tensor.view_as(tensor) if needed else value if tensor is None else tensor
            for value, tensor, needed in zip(ctx.plain, ctx.saved_tensors, need)
        ]
        results = reference(*copies)
        pairs = [
            (result, grad)
            for result, grad in zip(results if isinstance(results, tuple) else (results,), grads)
            if grad is not None and result.requires_grad
        ]
        if not pairs:
            return (None,) * len(need)
        outputs, upstream = zip(*pairs)
        wanted = [value for value, needed in zip(copies, need) if needed]
        gradients = iter(torch.autograd.grad(outputs, wanted, upstream, create_graph=further, allow_unused=True))
    return tuple(next(gradients) if needed else None for needed in need)


class _Recomputed(torch.autograd.Function):
    """A function of its first argument; keeps the others, and calls it again in the backward pass."""

    @staticmethod
    def forward(ctx, function, *arguments):
        save(ctx, (function, *arguments))
        kind = arguments[0].device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        results = function(*arguments)
        # whoever gets a result may change it in place, which torch refuses for a view made in here
        return tuple(result.data for result in results) if isinstance(results, tuple) else results.data

    @staticmethod
    def backward(ctx, *grads):
        def run(function, *arguments):
            with torch.autocast(*ctx.autocast):
                return function(*arguments)

        return _gradients_of(run, ctx, grads)


def recomputed(function: Callable[..., Any], x: Tensor, *arguments: Any) -> Any:
    """``function(x, *arguments)``, of which only the arguments are kept for the backward pass, where x is large.

    For what is cheap beside the memory of its intermediates; products in it are computed once more.
    """
    if x.numel() < FEWEST_RECOMPUTED or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function(x, *arguments)
    if is_transformed(x) or x.device.type == "meta":
        return function(x, *arguments)
    return _Recomputed.apply(function, x, *arguments)


def watched(ctx: Any, y: Tensor) -> Tensor:
    """Return the result y for ``save``, of which ``was_changed`` tells in the backward pass whether it still holds.

    Whoever gets y may change it in place (``relu_``), as they may that of a linear layer. torch refuses the backward
    pass of a function that saved such a result; a function that can compute y again need not.
    """
    ctx.counter = None
    if type(y) is not Tensor or torch.compiler.is_compiling():
        return y
    ctx.counter, ctx.version = y.detach(), y._version
    ctx.counter.data = y.new_empty(0)  # it counts changes of y and holds nothing of its memory
    return y.data


def was_changed(ctx: Any) -> bool:
    """Return whether the result given to ``watched`` has been changed in place since."""
    return ctx.counter is not None and ctx.counter._version != ctx.version


def row_portions(x: Tensor, size: int = PORTION_BYTES) -> list[slice]:
    """Slices over the rows of x (N, M), of about ``size`` bytes each; one slice off the CPU, and of no rows."""
    rows, columns = x.shape
    step = max(1, size // (max(1, columns) * x.itemsize)) if x.device.type == "cpu" else max(1, rows)
    step = max(1, round(step / ROWS)) * ROWS if step >= ROWS else step
    return [slice(start, min(start + step, rows)) for start in range(0, max(1, rows), step)]
