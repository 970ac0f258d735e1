"""Low-rank products: a few rows, as in decoding, run in one C++ kernel."""

# Legend: I in_features, O out_features, R rank

from __future__ import annotations

from torch import Tensor

from relinear.functional import low_rank as reference
from relinear.kernels import native
from relinear.kernels.choice import against_few_rows, took

__all__ = ["few_rows", "low_rank"]


def low_rank(x: Tensor, down: Tensor, up: Tensor, bias: Tensor | None = None) -> Tensor:
    """As ``functional.low_rank.low_rank``."""
    y = few_rows(x, None, down, up, bias)
    return reference.low_rank(x, down, up, bias) if y is None else y


def few_rows(x: Tensor, order: Tensor | None, down: Tensor, up: Tensor, bias: Tensor | None) -> Tensor | None:
    """(down x) up^T + bias, or (x_S + down x_rest) up^T + bias with an ``order`` (I,), in C++; None where that is not
    to run."""
    against = against_few_rows(x, down, up, bias, order=order, fewest=native.FEWEST_CHAIN_WEIGHTS)
    took("a low-rank product", "two products" if against else "C++ for a few rows", x, few=against)
    if against:
        return None
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y = rows.new_empty(rows.shape[0], up.shape[0])
    native.kernels().chain(y, rows, order, down, up, bias)
    return y.view(*x.shape[:-1], up.shape[0])
