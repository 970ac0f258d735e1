"""Enumerate the candidates for each layer, choose a plan among them, and fit its operators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relinear.compression.budget import Budget, Candidate, allocate
from relinear.compression.calibrate import Calibration
from relinear.compression.file_formats import FILE_FORMATS
from relinear.compression.layer_statistics import Statistics
from relinear.compression.plan import CompressPlan, LayerPlan, check_fittable
from relinear.compression.settings import CompressSettings
from relinear.contract.linear_layers import dense_bias, dense_weight, linear_features, linear_of
from relinear.contract.operator import OperatorConfig
from relinear.surgery.plan import plan as plan_surgery
from relinear.surgery.states import flat_states, replace_with_states_


class SearchSpace:
    """What each layer may become: the operators of the setting ``candidates``, at all their sizes.

    Args:
        modules: the layers that may be replaced, by name.
        settings: settings of the compression.
        budget: budget for all these layers together.

    Raises:
        ValueError: if an operator fits no layer, cannot be fitted or counted, or no choice meets the budget.
    """

    def __init__(self, modules: Mapping[str, nn.Module], settings: CompressSettings, budget: Budget) -> None:
        self.modules, self.settings, self.budget = modules, settings, budget
        self.file_format = FILE_FORMATS[settings.reader]
        default = self.file_format.candidates if settings.by_bytes else ("pivoted_low_rank",)
        #: operators, whose sizes are the candidates
        self.operators = [OperatorConfig.read(text) for text in settings.candidates or default]
        if not settings.candidates:  # K types take inputs in multiples of 256
            self.operators = [operator for operator in self.operators if self._fitting(operator)]
        for operator in self.operators:
            self._check(operator)
        #: layer -> operator -> its sizes
        self.candidates = {name: self._sizes(name) for name in modules}
        least = sum(
            min(budget.cost(name, config) for config in (None, *itertools.chain(*sizes.values())))
            for name, sizes in self.candidates.items()
        )
        if least > budget.limit:
            raise ValueError(
                f"{budget.text} cannot be met: the smallest that these layers and candidates allow is "
                f"{budget.setting_for(least)}; ask for that or more, replace more layers, or give other candidates"
            )

    def _fitting(self, operator: OperatorConfig) -> list[nn.Module]:
        return [module for module in self.modules.values() if operator.candidates(*linear_features(module))]

    def _check(self, operator: OperatorConfig) -> None:
        """Raise ValueError if ``operator`` fits no layer, cannot be fitted, or is not counted by the budget."""
        if not (fitting := self._fitting(operator)):
            shapes = ", ".join(str(s) for s in sorted({linear_features(m) for m in self.modules.values()})[:5])
            raise ValueError(f"candidates: {operator} fits none of the layers; their (in, out) sizes are {shapes}")
        smallest = min(fitting, key=lambda module: module.weight.numel())
        built = check_fittable(operator.candidates(*linear_features(smallest))[0], smallest)
        integers = any(buffer.dtype == torch.uint8 for buffer in built.buffers())
        if self.settings.by_bytes and not integers:
            raise ValueError(
                f"candidates: {operator} stores floats, but bits and size need operators that store integers: give "
                "candidates=quantized, or keep in place of bits or size"
            )
        if integers and not self.settings.by_bytes:
            raise ValueError(f"candidates: {operator} stores integers, but keep counts parameters: give bits or size")

    def _sizes(self, name: str) -> dict[OperatorConfig, list[OperatorConfig]]:
        """Return the sizes of each operator for the layer ``name``; of several with the same cost, the last."""
        features = linear_features(self.modules[name])
        sizes: dict[OperatorConfig, list[OperatorConfig]] = {}
        for operator in self.operators:
            by_cost = {self.budget.cost(name, config): config for config in operator.candidates(*features)}
            by_cost.pop(math.inf, None)
            if by_cost:
                sizes[operator] = [*by_cost.values()]
        return sizes

    def plan(self, calibration: Calibration) -> CompressPlan:
        """Measure the candidates, and return the plan of least predicted loss under the budget."""
        nats = self._nats(calibration)
        groups = self.file_format.groups(self.modules)
        choices = {
            key: group_candidates([(name, nats[name]) for name in names], self.budget) for key, names in groups.items()
        }
        chosen = allocate(choices, self.budget.limit, self.budget.unit)
        configs = {name: chosen[key].config for key, names in groups.items() for name in names}
        layers = dict[str, LayerPlan]()
        for name, module in self.modules.items():
            config = configs[name]
            stored = self.budget.cost(name, config) if self.settings.by_bytes else None
            layers[name] = LayerPlan.of(module, config, 0.0 if config is None else nats[name][config], stored)
        return CompressPlan(layers)

    def _nats(self, calibration: Calibration) -> dict[str, dict[OperatorConfig, float]]:
        """Return the predicted nats per token of each layer's candidates: 0.5 tr(G (W - W') A (W - W')^T)."""
        inputs = [self.settings.reader, *(operator.to_dict() for operator in self.operators)]
        # rounding is planned as if rows did not make up for each other: the diagonal of the gradients is enough
        errors = calibration.map_layers("candidates", inputs, self._errors, diagonal=self.settings.by_bytes)
        nats = dict[str, dict[OperatorConfig, float]]()
        for name, sizes in self.candidates.items():
            in_order = itertools.chain(*sizes.values())
            nats[name] = dict(zip(in_order, (0.5 * errors[name]).tolist(), strict=True)) if name in errors else {}
        return nats

    def _errors(self, statistics: Statistics) -> dict[str, Tensor]:
        """Return the errors of each layer's candidates, by the layer's name."""
        errors = dict[str, Tensor]()
        for name, layer_statistics in statistics.items():
            module, tokens = self.modules[name], layer_statistics.tokens
            if tokens is None or tokens >= linear_features(module)[0]:  # an expert may have seen too few
                by_operator = self.candidates[name].items()
                pairs = [one.candidate_errors(module, layer_statistics, sizes) for one, sizes in by_operator]
                errors[name] = torch.tensor([error for _, error in itertools.chain(*pairs)], dtype=torch.float64)
        return errors


def load_plan(
    path: str | Path, model: Any, modules: Mapping[str, nn.Module], settings: CompressSettings, budget: Budget
) -> CompressPlan:
    """Read a plan from a file. Raises ValueError if it is not a plan for this model and the layers ``modules``."""
    loaded = CompressPlan.load(path, model, budget.cost if settings.by_bytes else None)
    for name, config in loaded.replaced.items():
        if name not in modules:
            hint = "" if settings.by_bytes else "; embedding and head need a budget of bits or size"
            raise ValueError(f"{path} replaces {name}, which targets= and exclude= leave alone{hint}")
        if budget.cost(name, config) == math.inf:
            raise ValueError(f"{path}: {name}: no file for {settings.reader} stores {config}")
    return loaded


def group_candidates(layers: Sequence[tuple[str, Mapping[OperatorConfig, float]]], budget: Budget) -> list[Candidate]:
    """Return the joint candidates of layers, from the nats of each; the first leaves all unchanged."""
    candidates = [Candidate(None, sum(budget.cost(name, None) for name, _ in layers), 0.0)]
    for config in layers[0][1]:
        if all(config in nats for _, nats in layers):
            cost = sum(budget.cost(name, config) for name, _ in layers)
            if cost < candidates[0].cost:
                candidates.append(Candidate(config, cost, sum(nats[config] for _, nats in layers)))
    return candidates


def fit_layers_(plan: CompressPlan, calibration: Calibration) -> None:
    """Put a plan's operators into the model, fitted to their layers under the original's statistics."""
    model = calibration.model

    def fits(statistics: Statistics) -> dict[str, Tensor]:
        fitted = dict[str, nn.Module]()
        for name, config in plan.replaced.items():
            if name in statistics:
                source = model.get_submodule(name)
                exact = linear_of(dense_weight(source).detach().double(), dense_bias(source))
                fitted[name] = config.convert(source).fit_to_calibration_(exact, statistics[name])
        return flat_states(fitted)

    operators = {name: config.to_dict() for name, config in plan.replaced.items()}
    states = calibration.map_layers("fit", operators, fits)
    replace_with_states_(model, plan_surgery(model, dict(plan.replaced)).replacements, states)
