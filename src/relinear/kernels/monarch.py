"""Compute ``functional.monarch`` by products on slices; the first product is recomputed in the backward pass.

The two permutations copy; the products read and write slices in place.
"""

# Legend: N tokens, I in, O out, K blocks, S = ceil(O / K), R rank of a sub-block

from torch import Tensor

from relinear.functional import monarch as reference
from relinear.functional.block_diagonal import zero_padded
from relinear.kernels.autograd import with_backward
from relinear.kernels.block_diagonal import block_gradient, block_product, slices_unsupported
from relinear.kernels.implementations import Implementation, dispatch


def _swapped(x: Tensor, rows: int, columns: int) -> Tensor:
    """Exchange rows and columns of x (N, rows columns M), M numbers each; exchanging the sizes inverts it."""
    return x.view(len(x), rows, columns, -1).transpose(1, 2).reshape(len(x), -1)


def _hidden(x: Tensor, right: Tensor) -> Tensor:
    """Return the inputs (N, K K R) of the second factor."""
    return _swapped(block_product(zero_padded(x, right.shape[0] * right.shape[2]), right), len(right), len(right))


def _forward(x: Tensor, right: Tensor, left: Tensor, out_features: int, bias: Tensor | None) -> Tensor:
    y = _swapped(block_product(_hidden(x, right), left), *left.shape[:2])
    y = y if y.shape[1] == out_features else y[:, :out_features].clone()  # a view must not be changed in place here
    return y if bias is None else y.add_(bias)


@with_backward(_forward, reference.monarch)
def _sliced(ctx, grad):
    x, right, left, *_ = ctx.saved_tensors
    need = ctx.needs_input_grad
    blocks, rows, _ = left.shape
    to_result = _swapped(zero_padded(grad, blocks * rows), rows, blocks)
    to_left = block_gradient(to_result, _hidden(x, right), left) if need[2] else None
    to_hidden = _swapped(block_product(to_result, left.mT), blocks, blocks)
    to_right = block_gradient(to_hidden, zero_padded(x, blocks * right.shape[2]), right) if need[1] else None
    to_x = block_product(to_hidden, right.mT)[:, : x.shape[1]] if need[0] else None
    return to_x, to_right, to_left, None, grad.sum(0) if need[4] else None


monarch = dispatch(Implementation("on slices", slices_unsupported, _sliced), otherwise="reference")(reference.monarch)
