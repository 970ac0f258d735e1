"""Twin of ``functional.monarch``: what lies between both factors stays in cache."""

# Legend: I in, O out, K blocks, P = ceil(I / K), S = ceil(O / K), R rank of a sub-block

from __future__ import annotations

from torch import Tensor

from relinear.functional import monarch as reference
from relinear.kernels.cpu.by_rows import by_rows

__all__ = ["monarch"]


def monarch(x: Tensor, right: Tensor, left: Tensor, out_features: int, bias: Tensor | None = None) -> Tensor:
    """``functional.monarch.monarch`` for large inputs in portions of rows."""

    def product(x: Tensor, right: Tensor, left: Tensor, bias: Tensor | None) -> Tensor:
        return reference.monarch(x, right, left, out_features, bias)

    return by_rows("monarch", product, x, out_features, right, left, bias)
