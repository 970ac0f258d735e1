"""Linear maps of several steps, some rows at a time: what lies between the steps stays in cache and is not kept."""

# Legend: N rows, I inputs, O outputs

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from relinear.kernels.autograd import differentiable_as, lowered, save
from relinear.kernels.choice import against_portions, took
from relinear.kernels.cpu.portions import PORTION_BYTES, row_portions

__all__ = ["by_rows"]

#: entries of an input from which on it is taken in portions
FEWEST_ENTRIES_IN_PORTIONS = 1 << 20


def by_rows(
    name: str, function: Callable[..., Tensor], x: Tensor, out_features: int, *parameters: Tensor | None
) -> Tensor:
    """function(x, *parameters), in portions where x is large and on a CPU.

    The backward pass computes the steps of each portion again, so that it needs the memory of its inputs and its
    result, whatever lies between.

    Args:
        name: the operator, for ``choice.took``.
        function: of torch operations, acts on every row of x by itself, without random numbers.
        x: (..., I).
        out_features: O.
        parameters: what else ``function`` takes.
    """
    reason = against_portions(x, FEWEST_ENTRIES_IN_PORTIONS)
    took(name, "whole" if reason else "by portions of rows", x, portions=reason)
    if reason:
        return function(x, *parameters)
    rows, *given = lowered(x.reshape(-1, x.shape[-1]), *parameters)
    with torch.autocast(x.device.type, enabled=False):
        run: Any = _ByRows.apply if torch.is_grad_enabled() else _forward
        return run(function, out_features, rows, *given).view(*x.shape[:-1], out_features)


def _portions(x: Tensor, out_features: int) -> list[slice]:
    """Rows of ``PORTION_BYTES`` at a time, fewer where outputs are wider: up to twice as much of those."""
    return row_portions(x, min(PORTION_BYTES, 2 * PORTION_BYTES * x.shape[1] // max(1, out_features)))


def _forward(function: Callable[..., Tensor], out_features: int, x: Tensor, *parameters: Tensor | None) -> Tensor:
    y = x.new_empty(x.shape[0], out_features)
    for rows in _portions(x, out_features):
        y[rows] = function(x[rows], *parameters)
    return y


def _whole(function: Callable[..., Tensor], out_features: int, x: Tensor, *parameters: Tensor | None) -> Tensor:
    return function(x, *parameters)


class _ByRows(torch.autograd.Function):
    """``_forward``, which keeps its inputs alone."""

    @staticmethod
    def forward(ctx, function, out_features, x, *parameters):
        save(ctx, (function, out_features, x, *parameters))
        return _forward(function, out_features, x, *parameters)

    @staticmethod
    @differentiable_as(_whole)
    def backward(ctx, grad):
        function, out_features = ctx.plain[:2]
        _, _, x, *parameters = ctx.saved_tensors
        need_x, *need = ctx.needs_input_grad[2:]
        given = [None if p is None else p.detach().requires_grad_(n) for p, n in zip(parameters, need, strict=True)]
        totals = [torch.zeros_like(p, dtype=_wide(p)) for p in given if p is not None and p.requires_grad]
        to_x = torch.empty_like(x) if need_x else None

        def add(rows: slice) -> None:  # a function, so that nothing of one portion is alive during the next
            part = x[rows].detach().requires_grad_(need_x)
            with torch.enable_grad():
                y = function(part, *given)
            wanted = [t for t in (part, *given) if t is not None and t.requires_grad]
            found = list(torch.autograd.grad(y, wanted, grad[rows]))
            if to_x is not None:
                to_x[rows] = found.pop(0)
            for total, gradient in zip(totals, found, strict=True):
                total += gradient

        for rows in _portions(x, out_features):
            add(rows)
        sums = iter(totals)
        of_parameters = [next(sums).to(p.dtype) if p is not None and p.requires_grad else None for p in given]
        return None, None, to_x, *of_parameters


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)
