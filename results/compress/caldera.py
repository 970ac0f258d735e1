"""CALDERA (Saha et al. 2405.18886) for frontier.py, written from its paper and QuIP#'s (Tseng et al. 2402.04396).

A matrix becomes Q + L R with the least tr(E A E^T), A the second moment of its inputs, in TURNS turns: Q takes W - L R
by LDLQ in blocks of eight on QuIP#'s E8P code, whose 2^16 words are two bits per weight; L and R take W - Q, first as
the best matrix of that rank, then in INNER turns by least squares, each rounded to four bits by two stages of E8P. The
turn with the least error is kept. Three bits are a stage of E8P and one of 2^8 words of E8, four are two of E8P.

The authors' ranks are the same in every layer, of models whose layers are all wide; here a rank takes the same bits a
weight in every layer. Both sides are turned by random orthogonal matrices, where the authors take random signs and a
Hadamard matrix: theirs are powers of two. Nothing is trained afterwards. Scales, one a stage, are
not counted.
"""

from __future__ import annotations

import itertools
import math

import numba
import numpy as np
import torch
from torch import Tensor

__all__ = ["caldera"]

TURNS, INNER, DAMPING, FACTOR_BITS, BLOCK = 15, 10, 0.01, 4, 8
#: of QuIP#: the root mean square at which a code of so many bits is used, and how much finer its second stage is
SCALE, FINER = {2: 1.03, 3: 0.98, 4: 1.03}, {3: 2.04, 4: 3.45}


def _magnitudes() -> np.ndarray:
    """E8P's 256 patterns: magnitudes of the half-integral D8 vectors up to a squared norm of 10, and 29 of 12."""
    small, large = [], []
    for pattern in itertools.product((0.5, 1.5, 2.5), repeat=BLOCK):
        norm = sum(x * x for x in pattern)
        if norm <= 10:
            small.append(pattern)
        elif norm == 12 and 2.5 not in pattern:
            large.append(pattern)
    return np.array([*small, *large[:29]], dtype=np.float32)


def _words() -> np.ndarray:
    """256 vectors of E8: nought, the 240 of squared norm 2, and 15 of 4."""
    whole = [v for v in itertools.product((-2, -1, 0, 1, 2), repeat=BLOCK) if sum(v) % 2 == 0 and sum(map(abs, v)) <= 4]
    halves = [v for v in itertools.product((-0.5, 0.5), repeat=BLOCK) if sum(v) % 2 == 0]
    norms = {n: [v for v in [*whole, *halves] if sum(x * x for x in v) == n] for n in (0, 2, 4)}
    return np.array([*norms[0], *norms[2], *norms[4][:15]], dtype=np.float32)


MAGNITUDES, WORDS = _magnitudes(), _words()
#: whether an even number of a pattern's signs is negative: then the sum is even, as it is in D8
EVEN = MAGNITUDES.sum(1) % 2 == 0


@numba.njit(fastmath=True, cache=False)
def _e8p(x, magnitudes, even, squares):
    """The nearest word of E8P to each row of x (N, 8): a pattern with signs of even sum, moved by a quarter."""
    out = np.empty_like(x)
    z, s = np.empty(8, np.float32), np.empty(8, np.float32)
    for n in range(x.shape[0]):
        least = np.float32(1e30)
        for side in range(2):
            move = np.float32(0.25 if side == 0 else -0.25)
            negative, square = 0, np.float32(0)
            for i in range(8):
                v = x[n, i] - move
                z[i] = abs(v)
                square += v * v
                s[i] = 1.0
                if v < 0:
                    s[i] = -1.0
                    negative += 1
            for p in range(magnitudes.shape[0]):
                dot, cheapest = np.float32(0), np.float32(1e30)
                for i in range(8):
                    product = magnitudes[p, i] * z[i]
                    dot += product
                    cheapest = min(cheapest, product)
                if (negative % 2 == 0) != even[p]:
                    dot -= 2 * cheapest
                error = square - 2 * dot + squares[p]
                if error < least:
                    least = error
                    flip = -1
                    if (negative % 2 == 0) != even[p]:
                        cheapest = np.float32(1e30)
                        for i in range(8):
                            if magnitudes[p, i] * z[i] < cheapest:
                                cheapest = magnitudes[p, i] * z[i]
                                flip = i
                    for i in range(8):
                        out[n, i] = move + (-s[i] if i == flip else s[i]) * magnitudes[p, i]
    return out


def _to_e8p(x: Tensor) -> Tensor:
    found = _e8p(np.ascontiguousarray(x.numpy()), MAGNITUDES, EVEN, (MAGNITUDES**2).sum(1))
    return torch.from_numpy(found)


def _to_words(x: Tensor) -> Tensor:
    words = torch.from_numpy(WORDS)
    return words[(2 * x @ words.T - words.square().sum(1)).argmax(1)]


def coded(x: Tensor, bits: int, scale: float) -> Tensor:
    """Vectors (N, 8) as the nearest that ``bits`` a weight can say, in one stage or two."""
    x = x / scale
    first = _to_e8p(x)
    if bits > 2:
        rest = (x - first) * FINER[bits]
        first = first + (_to_words if bits == 3 else _to_e8p)(rest) / FINER[bits]
    return first * scale


def nearest(matrix: Tensor, bits: int) -> Tensor:
    """A matrix, its entries taken eight at a time, rounded to ``bits``."""
    scale = float(matrix.square().mean().sqrt()) / SCALE[bits]
    return coded(matrix.reshape(-1, BLOCK), bits, scale).view_as(matrix)


def ldlq(weight: Tensor, lower: Tensor, bits: int) -> Tensor:
    """W (O, I) rounded from its last inputs to its first, each block told the errors of those before it."""
    scale = float(weight.square().mean().sqrt()) / SCALE[bits]
    found, errors = torch.empty_like(weight), torch.zeros_like(weight)
    for start in range(weight.shape[1] - BLOCK, -1, -BLOCK):
        own, later = slice(start, start + BLOCK), slice(start + BLOCK, None)
        asked = weight[:, own] - errors[:, later] @ lower[later, own]
        found[:, own] = coded(asked, bits, scale)
        errors[:, own] = found[:, own] - weight[:, own]
    return found


def block_lower(moment: Tensor) -> Tensor:
    """L of L D L^T with identities as its blocks on the diagonal."""
    factor = torch.linalg.cholesky(moment)
    blocks = factor.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    return torch.cat([factor[:, BLOCK * i : BLOCK * (i + 1)] @ block.inverse() for i, block in enumerate(blocks)], 1)


def low_rank(rest: Tensor, moment: Tensor, root: Tensor, rank: int) -> Tensor:
    """L R of rounded factors near ``rest`` under the moment; ``root`` is its Cholesky factor."""
    left = torch.linalg.svd(rest @ root, full_matrices=False).U[:, :rank]
    turn = torch.linalg.qr(torch.randn(rank, rank)).Q  # columns of L, and rows of R, of one size
    size = math.sqrt(float((left.T @ rest).norm()) / rank)
    left = nearest(left @ turn * size, FACTOR_BITS)
    best, least = torch.zeros_like(rest), 0.0
    for _ in range(INNER):
        right = nearest(torch.linalg.solve(left.T @ left, left.T @ rest), FACTOR_BITS)
        weighed = moment @ right.T
        square, both = right @ weighed, rest @ weighed
        left = nearest(torch.linalg.solve(square, both.T).T, FACTOR_BITS)
        gain = float(((left.T @ left) * square).sum() - 2 * (left * both).sum())  # of tr, beside a correction of nought
        if gain < least:
            best, least = left @ right, gain
    return best


def caldera(weight: Tensor, inputs: Tensor, bits: int, rank: int) -> Tensor:
    """Q + L R for a weight (O, I) under the second moment of its inputs (I, I), as a matrix."""
    outputs, width = weight.shape
    one, other = (torch.linalg.qr(torch.randn(n, n)).Q for n in (outputs, width))
    turned = one @ weight.float() @ other.T
    moment = other.double() @ inputs.double() @ other.double().T
    moment += DAMPING * moment.diagonal().mean() * torch.eye(width, dtype=torch.float64)
    root, lower = torch.linalg.cholesky(moment).float(), block_lower(moment).float()
    moment = moment.float()
    correction, best, least = torch.zeros_like(turned), turned, math.inf
    for _ in range(TURNS if rank else 1):
        integers = ldlq(turned - correction, lower, bits)
        if rank:
            correction = low_rank(turned - integers, moment, root, rank)
        error = float(((integers + correction - turned) @ root).square().sum())
        if error < least:
            best, least = integers + correction, error
    return one.T @ best @ other
