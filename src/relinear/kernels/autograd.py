"""Helpers for custom autograd functions: autocast, higher derivatives, results changed in place, portions of rows.

torch does not cast the arguments of such functions under autocast: ``autocasted`` does. A backward pass written by hand
has no graph. If one is needed (``create_graph=True``), or torch maps over several gradients at once (``vmap``), the
reference is differentiated instead.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from relinear.kernels.implementations import is_transformed

#: bytes of the rows that are processed at a time on a CPU
PORTION_BYTES = 1 << 21
#: the same for outputs in a backward pass: smaller portions would make its products too small
BACKWARD_PORTION = 1 << 22
#: portions of at least this many rows are a multiple of it: a bfloat16 product over an odd number of rows (a weight's
#: gradient) takes up to a quarter longer
ROWS = 64

#: elements of x from which intermediate results are recomputed instead of saved
MIN_RECOMPUTED = 1 << 17


def autocasted(x: Tensor, *tensors: Any) -> tuple[Any, ...]:
    """Return the arguments, floating-point tensors cast as by autocast for a matrix product; float64 is not cast."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, *tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in (x, *tensors)
    )


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Switch autocast off for the block, after ``autocasted`` has cast the tensors."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def on_rows(function: Any, forward: Callable[..., Tensor], x: Tensor, *arguments: Any) -> Tensor:
    """Apply an autograd function of a matrix (N, I) to x (..., I), cast as by autocast; return (..., O).

    Args:
        function: a subclass of ``torch.autograd.Function``.
        forward: its forward pass, for calls without a graph.
        arguments: those after the matrix.
    """
    run = function.apply if torch.is_grad_enabled() else forward
    cast = autocasted(x.reshape(-1, x.shape[-1]), *arguments)
    with without_autocast(x):
        y = run(*cast)
    return y.view(*x.shape[:-1], y.shape[1])


def save(ctx: Any, inputs: Sequence[Any], *results: Tensor | None) -> None:
    """Save all arguments of a forward pass and some results for the backward pass.

    ``ctx.saved_tensors`` holds all arguments, None for those that are not tensors, and the results. ``ctx.plain`` holds
    all arguments, None for those that are tensors.
    """
    tensors: list[Tensor | None] = [None] * len(inputs)
    ctx.plain = list(inputs)
    for index, value in enumerate(inputs):
        if isinstance(value, Tensor):
            tensors[index], ctx.plain[index] = value, None
    ctx.save_for_backward(*tensors, *results)


def differentiable_as(reference: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a backward pass so that it can be differentiated again; the forward pass must have called ``save``.

    Args:
        reference: torch operations with the arguments and the results of the forward pass.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def run(ctx: Any, *grads: Tensor | None) -> Any:
            if torch.compiler.is_compiling() or not (torch.is_grad_enabled() or is_transformed(*grads)):
                # Compilers and users may run this within autocast, which the forward pass has already applied. A
                # compiler cannot know while it traces, so autocast is then switched off in any case.
                device = next((grad.device.type for grad in grads if grad is not None), "cpu")
                switch_off = torch.compiler.is_compiling() or torch.is_autocast_enabled(device)
                with torch.autocast(device, enabled=False) if switch_off else contextlib.nullcontext():
                    return backward(ctx, *grads)
            return _gradients_of(reference, ctx, grads)

        return run

    return decorate


def with_backward(forward: Callable[..., Tensor], reference: Callable[..., Tensor]) -> Callable[..., Any]:
    """Decorate a backward pass ``(ctx, grad)``: it becomes the differentiable function whose forward is ``forward``.

    The arguments of ``forward`` are saved (``save``). The function takes x (..., I) and more arguments (``on_rows``).

    Args:
        forward: the forward pass for a matrix (N, I) and the further arguments, without a graph.
        reference: torch operations with the same arguments and result.
    """

    def decorate(backward_pass: Callable[..., Any]) -> Callable[..., Tensor]:
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *arguments):
                save(ctx, arguments)
                return forward(*arguments)

            backward = staticmethod(differentiable_as(reference)(backward_pass))

        return functools.partial(on_rows, Function, forward)

    return decorate


def _gradients_of(reference: Callable[..., Any], ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return the gradients of all arguments by differentiating ``reference``; with a graph if gradients are enabled."""
    need, create_graph = ctx.needs_input_grad, torch.is_grad_enabled()
    device = next((grad.device.type for grad in grads if grad is not None), "cpu")
    with torch.enable_grad(), torch.autocast(device, enabled=False):
        # Views, as one argument may have been computed from another: its gradient must not flow on into that one.
        views = [
            tensor.view_as(tensor) if needed else value if tensor is None else tensor
            for value, tensor, needed in zip(ctx.plain, ctx.saved_tensors, need)
        ]
        results = reference(*views)
        pairs = [
            (result, grad)
            for result, grad in zip(results if isinstance(results, tuple) else (results,), grads)
            if grad is not None and result.requires_grad
        ]
        if not pairs:
            return (None,) * len(need)
        outputs, upstream = zip(*pairs)
        inputs = [value for value, needed in zip(views, need) if needed]
        gradients = iter(torch.autograd.grad(outputs, inputs, upstream, create_graph=create_graph, allow_unused=True))
    return tuple(next(gradients) if needed else None for needed in need)


class _Recomputed(torch.autograd.Function):
    """Call the first argument, a function, with the others; save only these and call it again in the backward pass."""

    @staticmethod
    def forward(ctx, function, *arguments):
        save(ctx, (function, *arguments))
        kind = arguments[0].device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        results = function(*arguments)
        # callers may change a result in place, for which torch raises an error if it is a view made in here
        return tuple(result.data for result in results) if isinstance(results, tuple) else results.data

    @staticmethod
    def backward(ctx, *grads):
        def run(function, *arguments):
            with torch.autocast(*ctx.autocast):
                return function(*arguments)

        return _gradients_of(run, ctx, grads)


def recomputed(function: Callable[..., Any], x: Tensor, *arguments: Any) -> Any:
    """Return ``function(x, *arguments)``; if x is large, save only the arguments and recompute in the backward pass.

    This is for cheap functions with large intermediate results; their matrix products are computed twice.
    """
    if x.numel() < MIN_RECOMPUTED or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function(x, *arguments)
    if is_transformed(x) or x.device.type == "meta":
        return function(x, *arguments)
    return _Recomputed.apply(function, x, *arguments)


def track_changes(ctx: Any, y: Tensor) -> Tensor:
    """Return the result y to ``save``; in the backward pass ``was_changed`` says whether it was changed in place.

    The caller may change y in place (``relu_``), as the result of any linear layer. torch then raises an error in the
    backward pass of a function that saved y as usual; with this, the function can compute y again instead.
    """
    ctx.counter = None
    if type(y) is not Tensor or torch.compiler.is_compiling():
        return y
    ctx.counter, ctx.version = y.detach(), y._version
    ctx.counter.data = y.new_empty(0)  # it shares y's version counter without keeping its memory
    return y.data


def was_changed(ctx: Any) -> bool:
    """Return whether the result passed to ``track_changes`` has been changed in place since."""
    return ctx.counter is not None and ctx.counter._version != ctx.version


def add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """Add the product of ``left`` and ``right`` to ``total``, or overwrite it if ``first``.

    With a float32 ``total``, a sum over portions of half-precision rows is not rounded at every portion.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=0 if first else 1)
    else:
        (total.copy_ if first else total.add_)(left @ right)


def row_portions(x: Tensor, size: int = PORTION_BYTES) -> list[slice]:
    """Split the rows of x (N, M) into slices of about ``size`` bytes; one slice if x is empty or not on a CPU."""
    rows, columns = x.shape
    step = max(1, size // (max(1, columns) * x.itemsize)) if x.device.type == "cpu" else max(1, rows)
    step = max(1, round(step / ROWS)) * ROWS if step >= ROWS else step
    return [slice(start, min(start + step, rows)) for start in range(0, max(1, rows), step)]
