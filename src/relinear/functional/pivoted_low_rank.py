"""Low-rank linear maps whose latent contains some of the inputs unchanged (reference).

The factors of a product of rank R are determined up to an invertible (R, R) matrix. It can be chosen so that R columns
of the first factor are an identity. This saves R^2 parameters and as many multiplications and keeps the product.
"""

# Legend: I in_features, O out_features, R rank, S the inputs in the latent (pivots)

import torch
from torch import Tensor

from relinear.clifford.tables import take_last

#: entries of a pivoted basis stay below this in magnitude, so that rounding errors stay small
MAX_PIVOTED_ENTRY = 1.05


def pivoted_low_rank(x: Tensor, order: Tensor, mix: Tensor, up: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return y = (x_S + mix x_rest) up^T + bias: a product of rank R whose latent contains R of the inputs unchanged.

    Args:
        x: (..., I).
        order: (I,) integers, a permutation of the inputs; the first R of them are S.
        mix: (R, I - R), the map of the remaining inputs into the latent.
        up: (O, R).
        bias: (O,) or None.
    """
    return torch.nn.functional.linear(latent(in_order(x, order), mix), up, bias)


def in_order(x: Tensor, order: Tensor) -> Tensor:
    """Return x[..., order]."""
    return take_last(x, order)


def latent(x: Tensor, mix: Tensor) -> Tensor:
    """Return x_S + mix x_rest (..., R) for ordered inputs x (..., I)."""
    rank = mix.shape[0]
    return x[..., :rank] + torch.nn.functional.linear(x[..., rank:], mix)


def pivoted_factors(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewrite up @ down with an identity in ``down``: return order (I,), mix (R, I - R), up (O, R); in float64.

    With R columns D_S of ``down``, the product is (up D_S) (D_S^(-1) down). Its second factor contains an identity,
    which is neither stored nor multiplied by. S is initialised as the pivots of an LU decomposition. Columns are then
    exchanged until no entry of ``mix`` exceeds ``MAX_PIVOTED_ENTRY``; each exchange increases |det D_S|, so this ends.

    Args:
        down: (R, I) with R at most I.
        up: (O, R).
    """
    rank = len(down)
    tall = down.detach().double().T
    pivots, lower, _ = torch.linalg.lu(tall)
    order = pivots.argmax(0)
    mix = torch.linalg.solve_triangular(lower[:rank], lower[rank:], upper=False, left=False, unitriangular=True)
    while mix.numel():
        row, column = divmod(int(mix.abs().argmax()), rank)
        pivot = mix[row, column].clone()
        if pivot.abs() <= MAX_PIVOTED_ENTRY:
            break
        change = mix[row].clone()
        change[column] -= 1
        rows = mix[:, column].clone()
        rows[row] += 1
        mix -= torch.outer(rows, change / pivot)
        order[[column, rank + row]] = order[[rank + row, column]]
    return order, mix.T, up.double() @ tall[order[:rank]].T
