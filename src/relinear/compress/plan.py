"""The plan of a compression: what every layer becomes and what that is predicted to cost; a file that can be edited."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relinear.compress.allocate import Candidate, allocate, best_uniform
from relinear.compress.budget import Budget, layer_parameters
from relinear.compress.calibrate import Calibration
from relinear.core.config import parse_setting, shown
from relinear.core.operator import NotLinearError, Operator, OperatorConfig, is_linear, linear_features
from relinear.surgery.summary import module_parameters
from relinear.system.files import write_json
from relinear.system.text import cut

__all__ = ["CompressPlan", "LayerPlan", "check_fittable", "layer_candidates", "make_plan"]

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """One layer: its operator (None: it stays as it is), parameters after and before, predicted nats a token."""

    operator: OperatorConfig | None
    parameters: int
    parameters_before: int
    nats: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return dataclasses.asdict(self) | {"operator": None if self.operator is None else self.operator.to_dict()}


def read_layers(path: str | Path) -> dict[str, dict[str, Any]]:
    """Return what a plan's file says of each layer, for whatever model. Raises ValueError if it is no plan."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no plan {path}: give the file, such as DIR/plan.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        layers = dict(values["layers"])
        stated = {name: dict(layer) for name, layer in layers.items()}
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no compression plan ({type(error).__name__}: {cut(str(error))})") from error
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

    @property
    def replaced(self) -> dict[str, OperatorConfig]:
        """Name -> operator of the layers that are replaced."""
        return {name: layer.operator for name, layer in self.layers.items() if layer.operator is not None}

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
        layers = {name: layer.to_dict() for name, layer in self.layers.items()}
        write_json(path, {"format": FORMAT, "others": self.others, "layers": layers})

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
            operator = _operator(layer.get("operator"), f"{path}: {name}")
            size = _size(operator, module, f"{path}: {name}")
            plans[name] = LayerPlan(
                operator, size, module_parameters(module), _nats(layer, operator, size, f"{path}: {name}")
            )
        _check_linear({name: p.operator for name, p in plans.items() if p.operator is not None}, modules, Path(path))
        whole = module_parameters(model)
        return cls(plans, whole - sum(p.parameters_before for p in plans.values()))

    def __str__(self) -> str:
        by_type: dict[str, list[LayerPlan]] = {}
        for name, layer in self.layers.items():
            by_type.setdefault(name.rpartition(".")[2], []).append(layer)
        header = ("layers", "count", "dense", "kept", "predicted nats")
        rows: list[tuple[str, ...]] = [header]
        for kind, layers in by_type.items():
            rows.append((kind, *_figures(layers)))
        rows.append(("all", *_figures(list(self.layers.values()))))
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        )


def _figures(layers: list[LayerPlan]) -> tuple[str, ...]:
    before = sum(layer.parameters_before for layer in layers)
    kept = sum(layer.parameters for layer in layers) / before
    nats = None if any(layer.nats is None for layer in layers) else sum(layer.nats for layer in layers)  # type: ignore[misc]
    dense = sum(layer.operator is None for layer in layers)
    return str(len(layers)), str(dense), f"{kept:.3f}", "" if nats is None else f"{nats:.4f}"


def _operator(value: Any, where: str) -> OperatorConfig | None:
    if value is None:
        return None
    try:
        return OperatorConfig.from_dict(parse_setting(value) if isinstance(value, str) else value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error


def _nats(layer: Mapping[str, Any], operator: OperatorConfig | None, size: int, where: str) -> float | None:
    """What a layer of a file is predicted to cost; None where its size says that it was edited."""
    nats = layer.get("nats")
    if not isinstance(nats, int | float) or isinstance(nats, bool):
        return None
    if not -1e-6 <= nats < math.inf:  # sums of squares, but for rounding
        raise ValueError(f"{where}: nats must be a predicted increase of the loss, so 0 or more, got {nats!r}")
    if operator is None:
        return 0.0
    return float(nats) if layer.get("parameters", size) == size else None


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


def _size(operator: OperatorConfig | None, module: Any, where: str) -> int:
    """Parameters of what ``module`` becomes."""
    try:
        return layer_parameters(module, operator)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


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


def make_plan(
    model: Any,
    modules: Mapping[str, Any],
    candidates: Mapping[str, list[Candidate]],
    budget: Budget,
    weighed: bool,
) -> CompressPlan:
    """Return the best plan under the budget.

    Args:
        model: the original.
        modules: the layers that may be replaced, by name.
        candidates: of each of them.
        budget: what they may cost together.
        weighed: whether the candidates' nats compare across layers (moments of gradients were measured); where not,
            every layer keeps the same share.

    Raises:
        ValueError: if the budget cannot be met.
    """
    if weighed:
        chosen = allocate(candidates, budget.limit, budget.unit)
    else:
        chosen = best_uniform(candidates, budget.limit / budget.whole)
    layers = {
        name: LayerPlan(
            c.config,
            layer_parameters(modules[name], c.config),
            module_parameters(modules[name]),
            c.nats if weighed else None,
        )
        for name, c in chosen.items()
    }
    return CompressPlan(layers, module_parameters(model) - sum(p.parameters_before for p in layers.values()))
