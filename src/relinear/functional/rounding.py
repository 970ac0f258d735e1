"""Round matrices to grids of few bits, to nearest or by GPTQ, and estimate GPTQ's error without running it."""

# Legend: I in_features, O out_features, B bits, K groups of a row; A, G moments of inputs and output gradients

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from relinear.functional.quantized import SUPER

#: number of clipping ranges to try
_CLIPS = 12
#: number of units to try in ``with_units``
_UNITS = 8
#: block size of ``gptq``: columns after which errors are propagated to all later ones
_COLUMNS = 32
#: added to a moment's diagonal, as a share of its mean
_DAMPING = 1e-2
#: shrinkage that makes a moment positive definite if it was summed in float32 over few tokens
_MINIMAL_SHRINKAGE = 1e-3
#: shrinkages of moments to try, see ``cross_validated_shrinkage``
SHRINKAGES = (0.02, 0.1, 0.2, 0.4, 0.7)
#: random vectors that estimate a mean squared error
_PROBES = 64
#: number of groups of rows that ``coordinate_descent`` changes one after another
_PARTS = 16


class Grid(NamedTuple):
    """The values that codes represent: code c in row o and group k is the weight scale_ok (c - zero_ok).

    Attributes:
        scale: (O, K).
        zero: (O, K), in units of codes.
        top: (O, 1), the largest code.
        levels: the codes in ascending order; None for the integers from 0 to ``top``.
        units: (O, U, 2); for each block of ``SUPER`` inputs, scales are integer multiples of the first and offsets
            (scale times zero) of the second; None if they are not.
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


def nearest_codes(codes: Tensor, top: Tensor | int, levels: Tensor | None = None) -> Tensor:
    """Round ``codes``, real numbers, to the nearest codes of a ``Grid``; the argument may be changed in place."""
    if levels is not None:
        return levels[torch.bucketize(codes, (levels[1:] + levels[:-1]) / 2)]
    codes.round_()
    return codes.clamp_(0, top) if isinstance(top, int) else codes.clamp_(min=0).minimum(top)


def _as_stored(scale: Tensor, zero: Tensor, bits: int, middle: float | None) -> tuple[Tensor, Tensor]:
    """Round scales to bfloat16 and zero points to a byte; with ``middle`` all zero points are ``middle``.

    Weights are normalised to a largest one of about 1. Scales are at least 2^-17 in magnitude, so that groups of zeros
    have one, too.
    """
    scale = torch.where(scale.abs() < 2.0**-17, torch.where(scale < 0, -1, 1) * 2.0**-17, scale)
    if middle is not None:
        return scale.bfloat16().to(scale), torch.full_like(zero, middle)
    step = 2.0 ** (bits - 8)
    return scale.bfloat16().to(scale), (zero / step).round().clamp(0, 255) * step


def _to_half_precision(unit: Tensor) -> Tensor:
    """Round to numbers that both bfloat16 and float16 represent, other than 0."""
    unit = unit.bfloat16().half().to(unit)
    return unit.masked_fill(unit == 0, 2.0**-24)


def _error_weights(weight: Tensor, importance: Tensor | None) -> Tensor:
    """Return positive weights (I,) of the inputs' squared errors; None means equal weights."""
    weights = torch.ones(weight.shape[1]).to(weight) if importance is None else importance.to(weight)
    return weights + 1e-6 * weights.mean().clamp_min(1e-30)


def nearest_grid(
    weight: Tensor,
    bits: int,
    group: int,
    symmetric: bool,
    importance: Tensor | None = None,
    fits: int = 2,
    levels: Tensor | None = None,
) -> Grid:
    """Return the grid for rounding ``weight`` (O, I) to nearest with the least squared error of every group.

    Several clipping ranges are tried. For each, scales and zero points are fitted to the codes by least squares.

    Args:
        weight: (O, I).
        bits: B.
        group: neighbouring inputs that share a scale and a zero point.
        symmetric: whether the zero point is fixed in the middle.
        importance: (I,) weights of the squared errors; None for 1.
        fits: how often scales and zero points are fitted to the codes.
        levels: the codes of a symmetric grid in ascending order; None for whole numbers. With levels, scales are
            rounded to float16, as llama.cpp stores them.
    """
    inputs = weight.shape[1]
    pad = -inputs % group
    w, h = (
        torch.nn.functional.pad(t, (0, pad)).unflatten(-1, (-1, group))
        for t in (weight, _error_weights(weight, importance))
    )
    # divide by a power of two near the group's largest weight, so that the result does not depend on their size
    unit = torch.ldexp(torch.ones_like(w[..., 0]), torch.frexp(w.abs().amax(2)).exponent.clamp_min(-100))
    w = w / unit[..., None]
    low, high = w.amin(2).clamp_max(0), w.amax(2).clamp_min(0)
    top, half = 2**bits - 1, 2.0 ** (bits - 1)
    middle, reach = (0.0, -float(levels[0])) if levels is not None else (half if symmetric else None, half)

    def codes_of(scale: Tensor, zero: Tensor) -> Tensor:
        return nearest_codes(torch.addcdiv(zero[..., None], w, scale[..., None]), top, levels)

    total_h, sum_w = h.sum(-1), (h * w).sum(2)

    def fitted(scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
        """Fit scale and zero point by least squares to the codes that ``scale`` and ``zero`` give."""
        codes = codes_of(scale, zero)
        if middle is not None:
            codes -= middle
            fitted_scale = (h * codes * w).sum(2) / (h * codes.square()).sum(2).clamp_min(1e-30)
            return _as_stored(fitted_scale, zero, bits, middle)
        sum_c = (h * codes).sum(2)
        variance = (h * codes.square()).sum(2) - sum_c.square() / total_h
        fitted_scale = ((h * codes * w).sum(2) - sum_c * sum_w / total_h) / variance.clamp_min(1e-12 * total_h)
        fitted_scale = torch.where(variance > 1e-9 * total_h, fitted_scale, scale)
        return _as_stored(fitted_scale, (sum_c - sum_w / fitted_scale) / total_h, bits, None)

    scale, zero, best = low, low, torch.full_like(low, torch.inf)
    widest = 1 + 2.0**-bits  # most ranges that are tried are near the whole range, which is best for many bits
    for clip in (widest - (widest - 1 + 1.2 / bits) * torch.linspace(0, 1, _CLIPS).square()).tolist():
        if middle is not None:  # the largest weight gets the lowest code, which is farthest from the middle
            trial_scale = torch.where(-low > high, -low, -high) / reach * clip
        else:
            trial_scale = (high - low) / top * clip
        trial = _as_stored(trial_scale, -low / trial_scale.masked_fill(trial_scale == 0, 1), bits, middle)
        for _ in range(fits):
            trial = fitted(*trial)
        difference = (codes_of(*trial) - trial[1][..., None]).mul_(trial[0][..., None]).sub_(w)
        error = difference.square_().mul_(h).sum(2)
        better = error < best
        best = torch.where(better, error, best)
        scale, zero = (torch.where(better, new, old) for new, old in zip(trial, (scale, zero), strict=True))
    scale = scale * unit
    if levels is not None:
        scale = scale.half().to(scale)
    return Grid(scale, zero, torch.full((len(weight), 1), float(top)).to(weight), levels)


def with_units(weight: Tensor, grid: Grid, group: int, symmetric: bool, bits: int, importance: Tensor | None) -> Grid:
    """Return ``grid`` with scales and offsets rounded to integer multiples of units, as in llama.cpp's K types.

    Args:
        weight: (O, I).
        grid: the grid of ``weight``.
        group, symmetric, importance: as for ``nearest_grid``.
        bits: bits of the multiples, which have a sign if ``symmetric``. No multiple of a scale is 0, as all codes would
            then mean the same.
    """
    blocks = (-1, SUPER // group, group)
    w, h = (t.unflatten(-1, blocks) for t in (weight, _error_weights(weight, importance)))
    scale, zero = (t.unflatten(1, blocks[:2]) for t in (grid.scale, grid.zero))
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if symmetric else (1, 2**bits - 1)
    largest = scale.gather(2, scale.abs().argmax(2, keepdim=True)) / (low if symmetric else high)
    top = int(grid.top[0])
    best = torch.full_like(largest, torch.inf)
    results: tuple[Tensor, ...] = (scale, zero, largest, largest)
    for clip in torch.linspace(1.05, 0.8, _UNITS).tolist():
        unit = offset_unit = _to_half_precision(largest * clip)
        multiples = (scale / unit).round().clamp(low, high)
        trial_scale = multiples.masked_fill(multiples == 0, 1) * unit
        trial_zero = zero
        codes = nearest_codes(torch.addcdiv(trial_zero[..., None], w, trial_scale[..., None]), top)
        if not symmetric:
            offset = (h * (codes * trial_scale[..., None] - w)).sum(3) / h.sum(2)  # least squares for these codes
            offset_unit = _to_half_precision(offset.amax(2, keepdim=True) / high)
            trial_zero = (offset / offset_unit).round().clamp(0, high) * offset_unit / trial_scale
            codes = nearest_codes(torch.addcdiv(trial_zero[..., None], w, trial_scale[..., None]), top)
        difference = (codes - trial_zero[..., None]).mul_(trial_scale[..., None]).sub_(w)
        error = difference.square_().mul_(h).sum((2, 3)).unsqueeze(2)
        trial = (trial_scale, trial_zero, unit, offset_unit)
        results = tuple(torch.where(error < best, *both) for both in zip(trial, results, strict=True))
        best = torch.minimum(error, best)
    scale, zero, *units = (t.flatten(1) for t in results)
    return grid._replace(scale=scale, zero=zero, units=torch.stack(units, 2))


def round_to_nearest(weight: Tensor, grid: Grid, group: int) -> Tensor:
    """Return the codes (O, I), floats, whose values are nearest to ``weight``."""
    scale, zero = grid.wide(group, weight.shape[1])
    return nearest_codes(torch.addcdiv(zero, weight, scale), grid.top, grid.levels)


def shrunk(moment: Tensor, shrinkage: float, damping: float = _DAMPING) -> Tensor:
    """Return a square ``moment``, shrunk towards its diagonal by the share ``shrinkage``, and damped.

    Without shrinkage a fit would overfit the correlations of the calibration sample.
    """
    diagonal = moment.diagonal()
    result = moment * (1 - shrinkage)
    result.diagonal().copy_(diagonal + damping * diagonal.mean().clamp_min(1e-30))
    return result


def _rounding_order(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the order in which to round inputs (descending mean squares) and A's Cholesky factor in reverse order."""
    order = inputs.diagonal().argsort(descending=True)
    a = inputs.double()[order][:, order]
    a.diagonal().add_(_DAMPING * a.diagonal().mean().clamp_min(1e-30))
    return order, torch.linalg.cholesky(a.flip(0, 1))  # reversed, so that A need not be inverted


def gptq_costs(inputs: Tensor) -> Tensor:
    """Return for every input the part of its mean square (I,) that later inputs cannot compensate in ``gptq``.

    A rounding error e of input i adds e^2 times this number, the squared diagonal of the Cholesky factor, to the error
    of ``gptq``. So the error of a grid can be estimated from the rounding errors of a few rows, without ``gptq``.

    Args:
        inputs: A (I, I).
    """
    order, lower = _rounding_order(inputs)
    return torch.empty(len(order)).to(lower).index_copy_(0, order, lower.diagonal().flip(0).square())


@functools.lru_cache(maxsize=1)  # several layers have the same inputs
def cross_validated_shrinkage(moments: tuple[Tensor, ...]) -> tuple[float, Tensor]:
    """Return the best of ``SHRINKAGES`` for the inputs' moments, and the costs (I,) of errors with it.

    The cost of input i is what an error e of this input, compensated by ``gptq`` under some moments, adds to the error
    under other moments, divided by e^2. Half of it is measured on all kinds of text, compensated under their mean. The
    other half is the mean over kinds, each compensated under the mean of the other kinds.

    Args:
        moments: A (I, I) of two or more kinds of text.
    """
    total = torch.stack(moments).double().sum(0)
    probes = _probes(len(moments[0])).to(moments[0].device)
    # (moment to compensate under, moment to measure on, weight)
    pairs = [(total / len(moments), total / len(moments), 0.5)]
    pairs += [((total - moment) / (len(moments) - 1), moment.double(), 0.5 / len(moments)) for moment in moments]
    prepared = []
    best = (SHRINKAGES[0], torch.full_like(total[0], torch.inf))
    for fitted, moment, weight in pairs:
        order = fitted.diagonal().argsort()
        root = torch.linalg.cholesky(shrunk(moment[order][:, order], _MINIMAL_SHRINKAGE, 1e-6))
        prepared.append((fitted[order][:, order].float(), (root @ probes).float(), order, weight))
    for shrinkage in SHRINKAGES:
        costs = torch.zeros_like(total[0])
        for fitted, samples, order, weight in prepared:
            lower = torch.linalg.cholesky(shrunk(fitted, shrinkage))
            remaining = torch.linalg.solve_triangular(lower, samples, upper=False) * lower.diagonal()[:, None]
            costs[order] += weight * remaining.square().mean(1)
        if costs.sum() >= best[1].sum():
            break
        best = shrinkage, costs
    return best


def _probes(size: int) -> Tensor:
    """Draw random signs (size, P): the mean square of M @ signs estimates the squared norms of M's rows."""
    generator = torch.Generator().manual_seed(0)
    return 2.0 * torch.randint(2, (size, _PROBES), generator=generator, dtype=torch.float64) - 1


def expected_error(weight: Tensor, rows: Tensor, grid: Grid, group: int, costs: Tensor, row_weights: Tensor) -> Tensor:
    """Estimate the error of ``weight`` (O, I) after ``gptq`` by rounding a few rows to nearest.

    The errors of other rows are assumed to be proportional to the squared ranges of their groups.

    Args:
        weight: (O, I).
        rows: (R,), indices of the rows that are rounded.
        grid: the grid of these rows.
        group: inputs that share a scale.
        costs: (I,), as ``gptq_costs`` returns them.
        row_weights: (O,), weights of the rows' squared errors.
    """
    sample = weight[rows]
    pad = -weight.shape[1] % group
    w, h = (torch.nn.functional.pad(t, (0, pad)).unflatten(-1, (-1, group)) for t in (weight, costs))
    ranges = (w.amax(2).clamp_min(0) - w.amin(2).clamp_max(0)).square() @ h.sum(1)
    errors = (grid.values(round_to_nearest(sample, grid, group), group) - sample).square() @ costs
    return errors.sum() / ranges[rows].sum().clamp_min(1e-30) * (ranges @ row_weights)


def gptq(weight: Tensor, grid: Grid, group: int, inputs: Tensor) -> Tensor:
    """Round one input after another, so that later inputs compensate the error so far; return float codes (O, I).

    This is GPTQ (Frantar et al. 2022), that is OBQ in a fixed order: inputs by falling mean squares. With the Cholesky
    decomposition U^T U of (A + damping)^(-1), the error e of input i changes the later columns of the weight by
    -e / U_ii times row i of U.

    Args:
        weight: (O, I).
        grid: scales and zero points of every row and group; they do not change.
        group: inputs that share a scale.
        inputs: A (I, I).
    """
    order, lower = _rounding_order(inputs)
    upper = torch.linalg.solve_triangular(lower, torch.eye(len(lower)).to(lower), upper=False).flip(0, 1).to(weight)
    scale, zero = (t[:, order].T.contiguous() for t in grid.wide(group, weight.shape[1]))
    target = weight[:, order].T.contiguous()
    codes = torch.empty_like(scale)
    top = grid.top.T.squeeze(0)
    for start in range(0, len(target), _COLUMNS):
        stop = min(start + _COLUMNS, len(target))
        errors = torch.empty_like(target[start:stop])  # divided by U_ii
        for i in range(start, stop):
            code = nearest_codes(torch.addcdiv(zero[i], target[i], scale[i]), top, grid.levels)
            codes[i] = code
            torch.addcmul(target[i], code.sub_(zero[i]), scale[i], value=-1, out=errors[i - start])
            errors[i - start].div_(upper[i, i])
            target[i + 1 : stop].addr_(upper[i, i + 1 : stop], errors[i - start], alpha=-1)
        target[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
    return torch.empty_like(weight).index_copy_(1, order, codes.T)


def change_codes(
    values: Tensor,
    codes: Tensor,
    weighted: Tensor,
    outputs: Tensor,
    scale: Tensor,
    zero: Tensor,
    top: Tensor,
    moment,
    parts,
    levels: Tensor | None = None,
) -> None:
    """Change the codes of one input i in place if that lowers tr(G D A D^T), one group of rows at a time.

    Args:
        values, codes: (O,), the weights of input i and their codes.
        weighted: (O,), column i of G D A, the weighted difference; it is updated.
        outputs: G (O, O).
        scale, zero, top: (O,), of input i's group.
        moment: A_ii.
        parts: number of groups of rows; rows o, o + parts, ... are one.
        levels: levels of the ``Grid``.
    """
    for part in range(parts):
        rows = slice(part, None, parts)
        optimum = torch.addcdiv(values[rows], weighted[rows], outputs.diagonal()[rows], value=1 / moment)
        code = nearest_codes(torch.addcdiv(zero[rows], optimum, scale[rows]), top[rows], levels)
        step = (code - codes[rows]) * scale[rows]
        change = (outputs[:, rows] @ step).mul_(moment)
        if step @ (2 * weighted[rows] - change[rows]) > 0:
            codes[rows] = code
            values[rows] += step
            weighted -= change


def coordinate_descent(
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

    If one code changes alone, its best value is known: the current one plus (G D A)_oi / (G_oo A_ii), rounded to the
    nearest. For each input, the codes of every ``_PARTS``-th row change together if that lowers the error.

    Args:
        weight: (O, I).
        codes: initial codes (O, I).
        grid, group: scales and zero points of the codes; they do not change.
        inputs: A (I, I), positive definite.
        outputs: G (O, O); None for the identity.
        sweeps: passes over all inputs.
        change: ``change_codes``, or a kernel of it.
    """
    scale, zero = (t.T.contiguous() for t in grid.wide(group, weight.shape[1]))
    target = weight.T.contiguous()
    codes = codes.T.contiguous()
    top = grid.top.flatten()
    values = (codes - zero) * scale
    g = torch.eye(len(weight)).to(weight) if outputs is None else outputs.contiguous()
    parts = 1 if outputs is None else min(_PARTS, len(weight))
    input_moments = inputs.diagonal().tolist()
    for start in [*range(0, len(target), _COLUMNS)] * sweeps:
        stop = min(start + _COLUMNS, len(target))
        products = inputs[start:stop] @ (target - values)  # rows of A D^T
        for i in range(start, stop):
            before = values[i].clone()
            change(values[i], codes[i], g @ products[i - start], g, scale[i], zero[i], top, input_moments[i], parts)
            products[i + 1 - start :].addr_(inputs[i + 1 : stop, i], values[i] - before, alpha=-1)
    return codes.T.contiguous()
