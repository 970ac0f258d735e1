"""The plan of a compression, a file that can be edited: what layers become, and what that is expected to cost."""

# Legend: N blocks, T tokens, B batch, D hidden size

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from relinear.compress.budget import Budget, Candidate, Choices, allocate, best_uniform, size_of
from relinear.compress.calibrate import Calibration
from relinear.compress.checksums import read_record, write_record
from relinear.compress.in_order import fit_operator
from relinear.compress.layerwise import LayerByLayer
from relinear.compress.work import Work
from relinear.core.config import parse_setting, shown
from relinear.core.operator import NotLinearError, Operator, OperatorConfig, dense_weight, is_linear, linear_features
from relinear.distill.fit import swapped
from relinear.surgery.summary import module_parameters
from relinear.system.files import read_json, understood
from relinear.system.grouped import grouped
from relinear.system.text import columns

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """One layer: its operator (None: it stays as it is), parameters after and before, predicted nats a token.

    bits: that are stored for each weight of the layer as it was, floats at no more than half precision.
    """

    operator: OperatorConfig | None
    parameters: int
    parameters_before: int
    nats: float | None
    bits: float | None = None

    @classmethod
    def of(cls, module: Any, operator: OperatorConfig | None, nats: float | None) -> Self:
        """Return what the linear layer ``module`` becomes."""
        size, before = size_of(module, operator), module_parameters(module)
        return cls(operator, size.parameters, before, nats, 8 * size.stored / before)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return dataclasses.asdict(self) | {"operator": None if self.operator is None else self.operator.to_dict()}


def read_layers(path: str | Path) -> dict[str, dict[str, Any]]:
    """Return what a plan's file says of each layer, for whatever model. Raises ValueError if it is no plan."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no plan {path}: give the file, such as DIR/plan.json")
    with understood(path, "no compression plan", "give the file, such as DIR/plan.json"):
        values = read_json(path)
        layers = dict(values["layers"])
        stated = {name: dict(layer) for name, layer in layers.items()}
    if values.get("format", FORMAT) != FORMAT or not stated:
        what = f"format {FORMAT} is read, got {shown(values.get('format'))}" if stated else "it names no layer"
        raise ValueError(f"{path} is no compression plan that can be carried out: {what}")
    return stated


@dataclasses.dataclass(frozen=True)
class CompressPlan:
    """What every layer that may be replaced becomes. ``str`` shows it by type of layer.

    layers: by name, in the model's order. others: parameters of the model outside of them.
    """

    layers: dict[str, LayerPlan]
    others: int

    @classmethod
    def of(cls, model: Any, layers: dict[str, LayerPlan]) -> CompressPlan:
        """Return the plan for ``layers`` of ``model``."""
        return cls(layers, module_parameters(model) - sum(layer.parameters_before for layer in layers.values()))

    @property
    def replaced(self) -> dict[str, OperatorConfig]:
        """Name -> operator of the layers that are replaced."""
        return {name: layer.operator for name, layer in self.layers.items() if layer.operator is not None}

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """Name -> what a plan's file and a report say of the layer."""
        return {name: layer.to_dict() for name, layer in self.layers.items()}

    @property
    def changed(self) -> bool:
        """Whether any layer becomes another."""
        return bool(self.replaced) or self.parameters != self.parameters_before

    @property
    def parameters(self) -> int:
        """Of the layers after compression."""
        return sum(layer.parameters for layer in self.layers.values())

    @property
    def parameters_before(self) -> int:
        """Of the layers as they are."""
        return sum(layer.parameters_before for layer in self.layers.values())

    @property
    def nats(self) -> float | None:
        """Predicted increase of the loss, in nats a token; None where a layer has no prediction."""
        each = [layer.nats for layer in self.layers.values()]
        return None if any(value is None for value in each) else sum(each)  # type: ignore[arg-type]

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, atomically."""
        write_record(path, {"format": FORMAT, "others": self.others, "layers": self.rows})

    @classmethod
    def load(cls, path: str | Path, model: Any) -> CompressPlan:
        """Return a plan from a file, perhaps edited: sizes are counted again, operators may be objects or text.

        Raises:
            ValueError: if the file is no plan, or names a layer that the model does not have or an operator that does
                not fit it.
        """
        modules = dict(model.named_modules())
        plans = {}
        for name, layer in read_layers(path).items():
            module = modules.get(name)
            if module is None or not is_linear(module) or isinstance(module, Operator):
                raise ValueError(f"{path}: the model has no linear layer {shown(name)}; the plan is for another model")
            try:
                stated = layer.get("operator")
                stated = parse_setting(stated) if isinstance(stated, str) else stated
                operator = None if stated is None else OperatorConfig.from_dict(stated)
                made = LayerPlan.of(module, operator, None)
                plans[name] = dataclasses.replace(made, nats=_nats(layer, made))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}: {name}: {error}") from error
        _check_linear({name: p.operator for name, p in plans.items() if p.operator is not None}, modules, Path(path))
        return cls.of(model, plans)

    def __str__(self) -> str:
        in_bits = holds_integers(self.rows)
        rows = [("layers", "count", "dense", "bits" if in_bits else "kept", "predicted nats")]
        for row in by_type(self.rows):
            nats = "" if row["nats"] is None else f"{row['nats']:.4f}"
            kept = f"{row['bits']:.2f}" if in_bits else f"{row['after'] / row['before']:.3f}"
            rows.append((row["name"], str(row["count"]), str(row["dense"]), kept, nats))
        return columns(rows)


def by_type(layers: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for every type of layer (as ``LayerPlan.to_dict`` has them), and one for all."""
    groups = grouped((layer_type(name), layer) for name, layer in layers.items())
    groups["all"] = list(layers.values())
    rows = []
    for name, group in groups.items():
        nats = [layer["nats"] for layer in group]
        row = {"name": name, "count": len(group), "nats": None if None in nats else sum(nats)}
        row["dense"] = sum(layer["operator"] is None for layer in group)
        row["before"] = sum(layer["parameters_before"] for layer in group)
        row["after"] = sum(layer["parameters"] for layer in group)
        row["bits"] = sum(layer["parameters_before"] * (layer.get("bits") or 0) for layer in group) / row["before"]
        rows.append(row)
    return rows


def holds_integers(layers: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether bits say more of ``layers`` than parameters do: some are stored as integers."""
    kept = ((layer.get("bits"), layer["parameters"] / layer["parameters_before"]) for layer in layers.values())
    return any(bits is not None and abs(bits - 16 * share) > 0.1 for bits, share in kept)


def layer_type(name: str) -> str:
    """Return what layers of one type share: the last part of the name."""
    return name.rpartition(".")[2]


def _nats(layer: Mapping[str, Any], made: LayerPlan) -> float | None:
    """What a layer of a file is predicted to cost; None where its sizes say that it was edited."""
    nats = layer.get("nats")
    if not isinstance(nats, int | float) or isinstance(nats, bool):
        return None
    if not -1e-6 <= nats < math.inf:  # sums of squares, but for rounding
        raise ValueError(f"nats must be a predicted increase of the loss, so 0 or more, got {nats!r}")
    if made.operator is None:
        return 0.0
    alike = all(layer.get(key) in (None, getattr(made, key)) for key in ("parameters", "bits"))
    return float(nats) if alike else None


def _check_linear(operators: Mapping[str, OperatorConfig], modules: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError for an operator that has no dense matrix by which it could be fitted."""
    seen = set()
    for name in sorted(operators, key=lambda name: modules[name].weight.numel()):
        operator = operators[name]
        # sizes decide nothing here: of operators that differ in whole numbers alone one is built
        key = str({k: v for k, v in operator.to_dict().items() if type(v) is not int})
        if key in seen:
            continue
        seen.add(key)
        check_fittable(operator, modules[name], f"{path}: {name}")


def check_fittable(operator: OperatorConfig, module: Any, where: str) -> None:
    """Raise ValueError, which names ``where``, if an operator for the linear layer ``module`` has no dense matrix."""
    if operator.conditioned:
        raise ValueError(f"{where}: {operator} reads a context, which a plain layer does not have")
    try:
        operator.build(*linear_features(module), bias=False).to_dense()
    except NotLinearError as error:
        raise ValueError(f"{where}: {error}; only operators with a dense matrix can be fitted") from error


def layer_candidates(
    module: Any, name: str, calibration: Calibration, menu: tuple[OperatorConfig, ...], budget: Budget
) -> list[Candidate]:
    """Return what the linear layer ``module`` could become, at what cost in the budget's unit; itself among it.

    The nats are the second-order estimate 0.5 tr(G (W - W') A (W - W')^T) of the loss's increase per token.
    """
    sizes = linear_features(module)
    dense = Candidate(None, budget.cost(name, None), 0.0)
    if not calibration.knows(name, module):
        return [dense]  # an expert that hardly saw a token: its moments say nothing
    found = [dense]
    for entry in menu:
        for config, error in calibration.error_curve(entry, name, module) if entry.sizes(*sizes) else ():
            cost = budget.cost(name, config)
            if cost < dense.cost:
                found.append(Candidate(config, cost, 0.5 * error))
    return _useful(found)


def _useful(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that lose less than every other that costs no more; itself first."""
    found: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.cost, c.nats)):
        if not found or candidate.nats < found[-1].nats:
            found.append(candidate)
    return found[::-1]


def make_plan(work: Work, candidates: Mapping[str, list[Candidate]], budget: Budget) -> CompressPlan:
    """Return the best plan under the budget.

    Where no moments of gradients were measured (``fisher``), nats do not compare across layers, and every layer keeps
    the same share.

    Raises:
        ValueError: if the budget cannot be met.
    """
    weighed = work.settings.fisher
    if weighed:
        chosen = allocate(candidates, budget.limit, budget.unit)
    else:
        chosen = best_uniform(candidates, budget.limit / budget.whole)
    layers = {}
    for name, choice in chosen.items():
        layers[name] = LayerPlan.of(work.modules[name], choice.config, choice.nats if weighed else None)
    return CompressPlan.of(work.model, layers)


# Predictions held against measurements


#: corrections stay within this factor, and powers within these bounds: points are few
LARGEST_FACTOR = 8.0
POWERS = (0.5, 1.5)
#: windows that single fits are tried on
POINT_WINDOWS = 4
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


def choose_points(candidates: Choices, count: int) -> list[tuple[str, Candidate]]:
    """``count`` choices for every type of layer, spread over its depth and its candidates' costs."""
    able = [name for name, options in candidates.items() if any(c.config is not None for c in options)]
    chosen = []
    for names in grouped((layer_type(name), name) for name in able).values():
        for i in range(count):
            name = names[int((i + 0.5) / count * len(names))]
            options = sorted((c for c in candidates[name] if c.config is not None), key=lambda c: c.cost)
            # between a tenth and six tenths of the largest: noise hides what larger ones cost
            place = 0.1 + 0.5 * ((i * 0.618 + 0.5) % 1)
            chosen.append((name, options[min(len(options) - 1, int(place * len(options)))]))
    return chosen


def correct(candidates: Choices, found: Mapping[str, Correction]) -> dict[str, list[Candidate]]:
    """Return the candidates with corrected nats."""
    changed: dict[str, list[Candidate]] = {}
    for name, options in candidates.items():
        change = found.get(layer_type(name), Correction())
        changed[name] = [c if c.config is None else dataclasses.replace(c, nats=change(c.nats)) for c in options]
    return changed


def corrected(
    work: Work, candidates: Choices, calibration: Calibration, judging: Tensor
) -> tuple[dict[str, list[Candidate]], list[MeasuredPoint]]:
    """Return the candidates with nats corrected by points that are measured on windows (N, T), and these points."""
    chosen = choose_points(candidates, work.settings.measured_points)
    points = _measured_once(work, judging[:POINT_WINDOWS], calibration, chosen) if chosen else []
    return correct(candidates, corrections(points)), points


def _measured_once(
    work: Work, blocks: Tensor, calibration: Calibration, chosen: Sequence[tuple[str, Candidate]]
) -> list[MeasuredPoint]:
    """The chosen points, measured once a directory."""
    what = [[name, c.config.to_dict(), c.nats] for name, c in chosen if c.config is not None]
    mark = hashlib.sha256(json.dumps(what).encode() + blocks.numpy().tobytes()).hexdigest()
    path = work.folder / "points.json"
    with contextlib.suppress(ValueError):  # none are kept, or damaged ones
        if (kept := read_record(path))["mark"] == mark:
            return [MeasuredPoint.from_dict(values) for values in kept["points"]]
    points = measure_points(work, blocks, calibration, chosen)
    write_record(path, {"mark": mark, "points": [point.to_dict() for point in points]})
    return points


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
    types = grouped((layer_type(point.name), point) for point in points)
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
