"""Round matrices to grids of few bits: to nearest, or by GPTQ, with which errors compensate each other."""

# Legend: I in_features, O out_features, B bits, K groups of a row; A, G moments of inputs and output gradients

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from relinear.functional.quantized import SUPER

#: number of clipping ranges to try
_CLIPS = 12
#: number of units of scales to try
_UNITS = 8
#: block size of ``gptq``: columns after which errors are propagated to all later ones
_COLUMNS = 32
#: added to a moment's diagonal, as a share of its mean
_DAMPING = 1e-2
#: shrinkage that makes a moment positive definite that was summed in float32 over few tokens
_SUMMED = 1e-3
#: shrinkages of moments to try
SHRINKAGES = (0.02, 0.1, 0.2, 0.4, 0.7)
#: random vectors that estimate what errors leave
_PROBES = 64
#: number of groups of rows that ``descend`` changes one after another
_PARTS = 16


class Grid(NamedTuple):
    """Hold scales and zero points: a code c of row o and group k represents the weight scale (c - zero).

    scale, zero: (O, K); zero in codes. top: (O, 1), the largest code. levels: the codes in ascending order, unless they
    are the integers from 0 to ``top``. units: (O, U, 2): the scales and the offsets (scale times zero) of ``SUPER``
    inputs are integer multiples of these; None if they are not.
    """

    scale: Tensor
    zero: Tensor
    top: Tensor
    levels: Tensor | None = None
    units: Tensor | None = None

    def wide(self, group: int, in_features: int) -> tuple[Tensor, Tensor]:
        """Return the scale and zero point (O, I) of every weight."""
        scale, zero = (t.repeat_interleave(group, 1)[:, :in_features] for t in (self.scale, self.zero))
        return scale, zero

    def values(self, codes: Tensor, group: int) -> Tensor:
        """Return the matrix (O, I) that ``codes`` represent."""
        scale, zero = self.wide(group, codes.shape[1])
        return (codes.to(scale) - zero) * scale


def snapped(codes: Tensor, top: Tensor | int, levels: Tensor | None = None) -> Tensor:
    """Return the nearest codes of a ``Grid``; ``codes`` may be changed in place."""
    if levels is not None:
        return levels[torch.bucketize(codes, (levels[1:] + levels[:-1]) / 2)]
    codes.round_()
    return codes.clamp_(0, top) if isinstance(top, int) else codes.clamp_(min=0).minimum(top)


def _stored(scale: Tensor, zero: Tensor, bits: int, middle: float | None) -> tuple[Tensor, Tensor]:
    """Round scales to bfloat16 and zero points to a byte.

    Scales are of weights whose largest is about 1, and least 2^-17: a group of zeros, or of codes 0, has one, too.
    """
    scale = torch.where(scale.abs() < 2.0**-17, torch.where(scale < 0, -1, 1) * 2.0**-17, scale)
    if middle is not None:
        return scale.bfloat16().to(scale), torch.full_like(zero, middle)
    step = 2.0 ** (bits - 8)
    return scale.bfloat16().to(scale), (zero / step).round().clamp(0, 255) * step


def _held(unit: Tensor) -> Tensor:
    """Round to numbers that bfloat16 and float16 represent, other than 0."""
    unit = unit.bfloat16().half().to(unit)
    return unit.masked_fill(unit == 0, 2.0**-24)


def _weights(weight: Tensor, importance: Tensor | None) -> Tensor:
    """Return positive weights (I,) of the inputs' squared errors."""
    share = torch.ones(weight.shape[1]).to(weight) if importance is None else importance.to(weight)
    return share + 1e-6 * share.mean().clamp_min(1e-30)


def nearest_grid(
    weight: Tensor,
    bits: int,
    group: int,
    symmetric: bool,
    importance: Tensor | None = None,
    fits: int = 2,
    levels: Tensor | None = None,
) -> Grid:
    """Return grids for rounding ``weight`` (O, I) to nearest: clipped if that is better, then fitted to the codes.

    Args:
        weight: (O, I).
        bits: B. group: neighbouring inputs of one grid. symmetric: whether the zero point is fixed in the middle.
        importance: (I,) weights of the squared errors; None for 1.
        fits: how often scales and zero points are fitted to the codes by least squares.
        levels: the codes of a symmetric grid, from its lowest, in place of whole numbers. Scales are then ones that
            float16 holds, as llama.cpp stores them.
    """
    inputs = weight.shape[1]
    pad = -inputs % group
    w, h = (
        torch.nn.functional.pad(t, (0, pad)).unflatten(-1, (-1, group)) for t in (weight, _weights(weight, importance))
    )
    # in units of the group's largest weight, a power of two, so that the size of weights changes nothing
    unit = torch.ldexp(torch.ones_like(w[..., 0]), torch.frexp(w.abs().amax(2)).exponent.clamp_min(-100))
    w = w / unit[..., None]
    low, high = w.amin(2).clamp_max(0), w.amax(2).clamp_min(0)
    top, half = 2**bits - 1, 2.0 ** (bits - 1)
    middle, reach = (0.0, -float(levels[0])) if levels is not None else (half if symmetric else None, half)

    def codes_of(scale: Tensor, zero: Tensor) -> Tensor:
        return snapped(torch.addcdiv(zero[..., None], w, scale[..., None]), top, levels)

    mass, mean_w = h.sum(-1), (h * w).sum(2)

    def fitted(scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
        """Fit scale and zero point by least squares to the codes that ``scale`` and ``zero`` give."""
        codes = codes_of(scale, zero)
        if middle is not None:
            codes -= middle
            fitted_scale = (h * codes * w).sum(2) / (h * codes.square()).sum(2).clamp_min(1e-30)
            return _stored(fitted_scale, zero, bits, middle)
        mean_c = (h * codes).sum(2)
        variance = (h * codes.square()).sum(2) - mean_c.square() / mass
        fitted_scale = ((h * codes * w).sum(2) - mean_c * mean_w / mass) / variance.clamp_min(1e-12 * mass)
        fitted_scale = torch.where(variance > 1e-9 * mass, fitted_scale, scale)
        return _stored(fitted_scale, (mean_c - mean_w / fitted_scale) / mass, bits, None)

    scale, zero, best = low, low, torch.full_like(low, torch.inf)
    widest = 1 + 2.0**-bits  # most of those that are tried are near the whole range, which wide codes need
    for clip in (widest - (widest - 1 + 1.2 / bits) * torch.linspace(0, 1, _CLIPS).square()).tolist():
        if middle is not None:  # the largest weight gets the lowest code, which reaches farther
            trial_scale = torch.where(-low > high, -low, -high) / reach * clip
        else:
            trial_scale = (high - low) / top * clip
        trial = _stored(trial_scale, -low / trial_scale.masked_fill(trial_scale == 0, 1), bits, middle)
        for _ in range(fits):
            trial = fitted(*trial)
        missed = (codes_of(*trial) - trial[1][..., None]).mul_(trial[0][..., None]).sub_(w)
        error = missed.square_().mul_(h).sum(2)
        better = error < best
        best = torch.where(better, error, best)
        scale, zero = (torch.where(better, n, o) for n, o in zip(trial, (scale, zero), strict=True))
    scale = scale * unit
    if levels is not None:
        scale = scale.half().to(scale)
    return Grid(scale, zero, torch.full((len(weight), 1), float(top)).to(weight), levels)


def on_units(weight: Tensor, grid: Grid, group: int, symmetric: bool, bits: int, importance: Tensor | None) -> Grid:
    """Return ``grid`` with scales and offsets that are integer multiples of units, as in llama.cpp's K types.

    Args:
        weight: (O, I), its squared errors weighed by ``importance`` (I,); None for 1.
        grid: for it. group, symmetric: of ``nearest_grid``.
        bits: of the multiples, which have a sign if ``symmetric``. A scale has none of 0: all codes stay apart.
    """
    pieces = (-1, SUPER // group, group)
    w, h = (t.unflatten(-1, pieces) for t in (weight, _weights(weight, importance)))
    scale, zero = (t.unflatten(1, pieces[:2]) for t in (grid.scale, grid.zero))
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if symmetric else (1, 2**bits - 1)
    largest = scale.gather(2, scale.abs().argmax(2, keepdim=True)) / (low if symmetric else high)
    top, best = int(grid.top[0]), torch.full_like(largest, torch.inf)
    results: tuple[Tensor, ...] = (scale, zero, largest, largest)
    for clip in torch.linspace(1.05, 0.8, _UNITS).tolist():
        unit = offset_unit = _held(largest * clip)
        multiples = (scale / unit).round().clamp(low, high)
        trial_scale, trial_zero = multiples.masked_fill(multiples == 0, 1) * unit, zero
        codes = snapped(torch.addcdiv(trial_zero[..., None], w, trial_scale[..., None]), top)
        if not symmetric:
            offset = (h * (codes * trial_scale[..., None] - w)).sum(3) / h.sum(2)  # the best for these codes
            offset_unit = _held(offset.amax(2, keepdim=True) / high)
            trial_zero = (offset / offset_unit).round().clamp(0, high) * offset_unit / trial_scale
            codes = snapped(torch.addcdiv(trial_zero[..., None], w, trial_scale[..., None]), top)
        missed = (codes - trial_zero[..., None]).mul_(trial_scale[..., None]).sub_(w)
        error = missed.square_().mul_(h).sum((2, 3)).unsqueeze(2)
        trial = (trial_scale, trial_zero, unit, offset_unit)
        results = tuple(torch.where(error < best, *both) for both in zip(trial, results, strict=True))
        best = torch.minimum(error, best)
    scale, zero, *units = (t.flatten(1) for t in results)
    return grid._replace(scale=scale, zero=zero, units=torch.stack(units, 2))


def nearest(weight: Tensor, grid: Grid, group: int) -> Tensor:
    """Return the codes (O, I), floats, whose values are nearest to ``weight``."""
    scale, zero = grid.wide(group, weight.shape[1])
    return snapped(torch.addcdiv(zero, weight, scale), grid.top, grid.levels)


def shrunk(moment: Tensor, shrinkage: float, damping: float = _DAMPING) -> Tensor:
    """Return ``moment`` (K, K), shrunk towards its diagonal by the share ``shrinkage``, and damped.

    Without shrinkage a fit would overfit the correlations of its sample.
    """
    diagonal = moment.diagonal()
    result = moment * (1 - shrinkage)
    result.diagonal().copy_(diagonal + damping * diagonal.mean().clamp_min(1e-30))
    return result


def _in_order(inputs: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return the order in which to round inputs (descending mean squares) and A's Cholesky factor in reverse order."""
    order = inputs.diagonal().argsort(descending=True)
    a = inputs.double()[order][:, order]
    a.diagonal().add_(damping * a.diagonal().mean().clamp_min(1e-30))
    return order, torch.linalg.cholesky(a.flip(0, 1))  # backwards, so that no inverse is multiplied out


def uncompensated(inputs: Tensor, damping: float = _DAMPING) -> Tensor:
    """Return the mean square (I,) of every input that later ones cannot compensate in ``gptq``.

    An error e of input i, whatever it is, adds e^2 times this to the error of ``gptq``: the square of the Cholesky
    factor's diagonal. So what a grid costs is known from the rounding errors of a few rows, without ``gptq``.

    Args:
        inputs: A (I, I). damping: as there.
    """
    order, lower = _in_order(inputs, damping)
    return torch.empty(len(order)).to(lower).index_copy_(0, order, lower.diagonal().flip(0).square())


@functools.lru_cache(maxsize=1)  # several layers see the same inputs
def held_out(moments: tuple[Tensor, ...]) -> tuple[float, Tensor]:
    """Return the best shrinkage of the inputs' moments, and ``uncompensated`` (I,) with that.

    An error e of input i, made up for under some moments, leaves e^2 times a number on tokens of others. It is taken in
    equal parts for all kinds under their mean, and for each kind under the mean of the others.

    Args:
        moments: A (I, I) of two kinds of text or more.
    """
    total, probes = torch.stack(moments).double().sum(0), _probes(len(moments[0])).to(moments[0].device)
    pairs = [(total / len(moments), total / len(moments), 0.5)]
    pairs += [((total - moment) / (len(moments) - 1), moment.double(), 0.5 / len(moments)) for moment in moments]
    seen, best = [], (SHRINKAGES[0], torch.full_like(total[0], torch.inf))
    for known, moment, share in pairs:
        order = known.diagonal().argsort()
        root = torch.linalg.cholesky(shrunk(moment[order][:, order], _SUMMED, 1e-6))
        seen.append((known[order][:, order].float(), (root @ probes).float(), order, share))
    for shrinkage in SHRINKAGES:
        left = torch.zeros_like(total[0])
        for known, errors, order, share in seen:
            lower = torch.linalg.cholesky(shrunk(known, shrinkage))
            remaining = torch.linalg.solve_triangular(lower, errors, upper=False) * lower.diagonal()[:, None]
            left[order] += share * remaining.square().mean(1)
        if left.sum() >= best[1].sum():
            break
        best = shrinkage, left
    return best


def _probes(size: int) -> Tensor:
    """Draw random signs (size, P): the mean square of M @ signs estimates the squared norms of M's rows."""
    draws = torch.Generator().manual_seed(0)
    return 2.0 * torch.randint(2, (size, _PROBES), generator=draws, dtype=torch.float64) - 1


def expected_error(weight: Tensor, rows: Tensor, grid: Grid, group: int, left: Tensor, share: Tensor) -> Tensor:
    """Return the error that ``gptq`` is expected to leave of ``weight`` (O, I), from rounding a few rows to nearest.

    Other rows have errors in proportion to the squared ranges of their groups.

    Args:
        weight: (O, I). rows: (R,), which are rounded. grid: of these. group: inputs that share one.
        left: (I,) of ``uncompensated``. share: (O,), what the squared error of a row counts.
    """
    sample, pad = weight[rows], -weight.shape[1] % group
    w, h = (torch.nn.functional.pad(t, (0, pad)).unflatten(-1, (-1, group)) for t in (weight, left))
    ranges = (w.amax(2).clamp_min(0) - w.amin(2).clamp_max(0)).square() @ h.sum(1)
    missed = (grid.values(nearest(sample, grid, group), group) - sample).square() @ left
    return missed.sum() / ranges[rows].sum().clamp_min(1e-30) * (ranges @ share)


def gptq(weight: Tensor, grid: Grid, group: int, inputs: Tensor, damping: float = _DAMPING) -> Tensor:
    """Round one input after another, so that later inputs compensate the error so far; return float codes (O, I).

    GPTQ (Frantar et al. 2022), which is OBQ in a given order, here that of falling mean squares of the inputs: with
    the Cholesky factor U^T U of (A + damping)^(-1), the error e of input i, over U_ii, goes on to later ones by U_i.

    Args:
        weight: (O, I).
        grid: of every row and group, kept as it is. group: inputs that share one.
        inputs: A (I, I).
        damping: share of the mean diagonal of A that is added to it.
    """
    order, lower = _in_order(inputs, damping)
    upper = torch.linalg.solve_triangular(lower, torch.eye(len(lower)).to(lower), upper=False).flip(0, 1).to(weight)
    scale, zero = (t[:, order].T.contiguous() for t in grid.wide(group, weight.shape[1]))
    left, codes, top = weight[:, order].T.contiguous(), torch.empty_like(scale), grid.top.T.squeeze(0)
    for start in range(0, len(left), _COLUMNS):
        stop = min(start + _COLUMNS, len(left))
        missed = torch.empty_like(left[start:stop])
        for i in range(start, stop):
            code = snapped(torch.addcdiv(zero[i], left[i], scale[i]), top, grid.levels)
            codes[i] = code
            torch.addcmul(left[i], code.sub_(zero[i]), scale[i], value=-1, out=missed[i - start])
            missed[i - start].div_(upper[i, i])
            left[i + 1 : stop].addr_(upper[i, i + 1 : stop], missed[i - start], alpha=-1)
        left[stop:].addmm_(upper[start:stop, stop:].T, missed, alpha=-1)
    return torch.empty_like(weight).index_copy_(1, order, codes.T)


def change_codes(
    values: Tensor,
    codes: Tensor,
    pull: Tensor,
    outputs: Tensor,
    scale: Tensor,
    zero: Tensor,
    top: Tensor,
    moment,
    parts,
    levels: Tensor | None = None,
) -> None:
    """Change the codes of one input in place if that lowers tr(G D A D^T), one group of rows at a time.

    Args:
        values, codes: (O,), what the codes mean, and they. pull: (O,), the column of G D A.
        outputs: G (O, O). scale, zero, top: (O,). moment: A_ii. parts: rows o, o + parts, ... are one. levels: of the
            ``Grid``.
    """
    for part in range(parts):
        rows = slice(part, None, parts)
        aim = torch.addcdiv(values[rows], pull[rows], outputs.diagonal()[rows], value=1 / moment)
        code = snapped(torch.addcdiv(zero[rows], aim, scale[rows]), top[rows], levels)
        step = (code - codes[rows]) * scale[rows]
        back = (outputs[:, rows] @ step).mul_(moment)
        if step @ (2 * pull[rows] - back[rows]) > 0:
            codes[rows] = code
            values[rows] += step
            pull -= back


def descend(
    weight: Tensor,
    codes: Tensor,
    grid: Grid,
    group: int,
    inputs: Tensor,
    outputs: Tensor | None,
    sweeps: int = 2,
    change: Callable[..., None] = change_codes,
) -> Tensor:
    """Lower tr(G D A D^T), D = weight - values, by coordinate descent over codes; return the codes (O, I).

    For one code alone the best value is exact: its own plus (G D A)_oi / (G_oo A_ii), to nearest. Of one input the
    codes of every ``_PARTS``-th row change together, where they gain together.

    Args:
        weight: (O, I).
        codes: to start from. grid, group: their meaning, kept as it is.
        inputs: A (I, I), positive definite. outputs: G (O, O); None for the identity.
        sweeps: over all inputs.
        change: ``change_codes``, or a faster form of it.
    """
    scale, zero = (t.T.contiguous() for t in grid.wide(group, weight.shape[1]))
    target, codes, top = weight.T.contiguous(), codes.T.contiguous(), grid.top.flatten()
    values = (codes - zero) * scale
    g = torch.eye(len(weight)).to(weight) if outputs is None else outputs.contiguous()
    parts = 1 if outputs is None else min(_PARTS, len(weight))
    input_moments = inputs.diagonal().tolist()
    for start in [*range(0, len(target), _COLUMNS)] * sweeps:
        stop = min(start + _COLUMNS, len(target))
        left = inputs[start:stop] @ (target - values)
        for i in range(start, stop):
            before = values[i].clone()
            change(values[i], codes[i], g @ left[i - start], g, scale[i], zero[i], top, input_moments[i], parts)
            left[i + 1 - start :].addr_(inputs[i + 1 : stop, i], values[i] - before, alpha=-1)
    return codes.T.contiguous()
