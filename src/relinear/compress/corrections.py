"""Predicted nats held against measured ones: fits of single layers, tried on tokens that calibration never saw."""

# Legend: N blocks, T tokens, B batch, D hidden size

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from relinear.compress.allocate import Candidate
from relinear.compress.calibrate import Calibration
from relinear.compress.in_order import fit_operator
from relinear.compress.layerwise import LayerByLayer
from relinear.compress.plan import layer_type
from relinear.compress.work import Work
from relinear.core.operator import OperatorConfig, dense_weight
from relinear.distill.fit import swapped

#: corrections stay within this factor, and powers within these bounds: points are few
LARGEST_FACTOR = 8.0
POWERS = (0.5, 1.5)
#: with fewer points than these what layers of one type differ in passes for a power
POWER_POINTS = 6


@dataclasses.dataclass(frozen=True)
class MeasuredPoint:
    """One layer as an operator, the rest as it was: nats a token that were predicted and that were measured."""

    name: str
    operator: OperatorConfig
    predicted: float
    measured: float

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return dataclasses.asdict(self) | {"operator": self.operator.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MeasuredPoint:
        """Return what ``to_dict`` wrote."""
        return cls(**{**values, "operator": OperatorConfig.from_dict(values["operator"])})


@dataclasses.dataclass(frozen=True)
class Correction:
    """``factor * predicted ** power`` in place of ``predicted``, for one type of layer."""

    factor: float = 1.0
    power: float = 1.0

    def __call__(self, nats: float) -> float:
        return self.factor * nats**self.power if nats > 0 else nats


def choose_points(candidates: Mapping[str, Sequence[Candidate]], count: int) -> list[tuple[str, Candidate]]:
    """``count`` choices for every type of layer, spread over its depth and its candidates' costs."""
    types: dict[str, list[str]] = {}
    for name, options in candidates.items():
        if any(c.config is not None for c in options):
            types.setdefault(layer_type(name), []).append(name)
    chosen = []
    for names in types.values():
        for i in range(count):
            name = names[int((i + 0.5) / count * len(names))]
            options = sorted((c for c in candidates[name] if c.config is not None), key=lambda c: c.cost)
            # between a tenth and six tenths of the largest: noise hides what larger ones cost
            place = 0.1 + 0.5 * ((i * 0.618 + 0.5) % 1)
            chosen.append((name, options[min(len(options) - 1, int(place * len(options)))]))
    return chosen


@torch.no_grad()
def measure_points(
    work: Work, blocks: Tensor, calibration: Calibration, chosen: Sequence[tuple[str, Candidate]]
) -> list[MeasuredPoint]:
    """Return the rise of the loss for each choice by itself, measured; the model is left as it was.

    The original's hidden states are carried from layer to layer, so that each choice costs the layers behind it alone.

    Args:
        work: of the original, in eval mode.
        blocks: token ids (N, T) that calibration has not seen.
        calibration: for the fits.
        chosen: layers and what each is to be, one at a time.
    """
    layers, distinct, found = LayerByLayer(work.model), dict.fromkeys(chosen), dict[tuple[str, Candidate], float]()
    parts = blocks.to(next(work.model.parameters()).device).split(1)
    hidden = [layers.embed(part) for part in parts]
    last = max(index for index, names in work.by_layer.items() if any(name in names for name, _ in chosen))
    for index in range(last + 1):
        for name, candidate in distinct:
            if name not in work.by_layer.get(index, ()):
                continue
            assert candidate.config is not None, "points are operators"
            source = work.modules[name]
            weight, moments = dense_weight(source).detach(), calibration.moments(name)
            with swapped(work.model, {name: fit_operator(candidate.config, source, weight, moments)}):
                found[name, candidate] = _loss(layers, index, hidden, parts)
            work.on_progress("points", len(found), len(distinct))
        hidden = [layers.layer(index, states) for states in hidden]
    start = _loss(layers, last + 1, hidden, parts)
    return [MeasuredPoint(name, c.config, c.nats, found[name, c] - start) for name, c in chosen]  # type: ignore[arg-type]


def _loss(layers: LayerByLayer, start: int, hidden: Sequence[Tensor], parts: Sequence[Tensor]) -> float:
    """Mean loss in nats a token, from the hidden states before layer ``start``."""
    total, count = 0.0, 0
    for states, ids in zip(hidden, parts, strict=True):
        for index in range(start, len(layers)):
            states = layers.layer(index, states)
        for _, _, logits, labels in layers.next_tokens(states, ids):
            total += float(F.cross_entropy(logits, labels, reduction="sum"))
        count += ids[:, 1:].numel()
    return total / count


def corrections(points: Sequence[MeasuredPoint]) -> dict[str, Correction]:
    """For every type of layer with points, how its predictions are corrected.

    A factor: the measured sum by the predicted one. From ``POWER_POINTS`` points that rose on, factor and power by
    least squares of logarithms. Bounded, as points are few and noisy.
    """
    types: dict[str, list[MeasuredPoint]] = {}
    for point in points:
        types.setdefault(layer_type(point.name), []).append(point)
    return {kind: _fit(found) for kind, found in types.items()}


def _fit(points: Sequence[MeasuredPoint]) -> Correction:
    rising = [(math.log(p.predicted), math.log(p.measured)) for p in points if p.predicted > 0 and p.measured > 0]
    if len(rising) < POWER_POINTS:
        predicted, measured = sum(p.predicted for p in points), sum(p.measured for p in points)
        ratio = measured / predicted if predicted > 0 else 1.0
        return Correction(min(max(ratio, 1 / LARGEST_FACTOR), LARGEST_FACTOR))
    x, y = (sum(values) / len(rising) for values in zip(*rising, strict=True))
    spread = sum((a - x) ** 2 for a, _ in rising)
    power = sum((a - x) * (b - y) for a, b in rising) / spread if spread > 0 else 1.0
    power = min(max(power, POWERS[0]), POWERS[1])
    level = min(max(y - x, -math.log(LARGEST_FACTOR)), math.log(LARGEST_FACTOR))  # at the points' middle
    return Correction(math.exp(x + level - power * x), power)


def correct(
    candidates: Mapping[str, Sequence[Candidate]], found: Mapping[str, Correction]
) -> dict[str, list[Candidate]]:
    """Yield the candidates with corrected nats."""

    def corrected(name: str, options: Sequence[Candidate]) -> Iterator[Candidate]:
        change = found.get(layer_type(name), Correction())
        for option in options:
            yield option if option.config is None else dataclasses.replace(option, nats=change(option.nats))

    return {name: list(corrected(name, options)) for name, options in candidates.items()}
