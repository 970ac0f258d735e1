"""Enumerate the candidates for each layer, choose a plan among them, and fit its operators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from relinear.compression.budget import Budget, Candidate, allocate
from relinear.compression.calibrate import Calibration, Statistics
from relinear.compression.plan import CompressPlan, LayerPlan, check_fittable
from relinear.compression.readers import READERS
from relinear.compression.task import Task
from relinear.contract.linear_layers import dense_bias, dense_weight, linear_features, linear_of
from relinear.contract.operator import OperatorConfig
from relinear.surgery.plan import plan
from relinear.surgery.states import flat_states, replace_with_states_


class SearchSpace:
    """Enumerate the operators of the setting ``candidates`` at all their sizes, for each layer separately."""

    def __init__(self, task: Task, budget: Budget) -> None:
        self.task, self.budget = task, budget
        self.reader = READERS[task.settings.reader]
        default = self.reader.candidates if task.settings.by_bytes else ("pivoted_low_rank",)
        self.entries = tuple(OperatorConfig.read(text) for text in task.settings.candidates or default)
        if not task.settings.candidates:  # K types take inputs in multiples of 256
            self.entries = tuple(entry for entry in self.entries if self._fitting(entry))

    def _fitting(self, entry: OperatorConfig) -> list[nn.Module]:
        return [module for module in self.task.modules.values() if entry.candidates(*linear_features(module))]

    def check(self) -> None:
        """Raise ValueError if an operator fits no layer, cannot be fitted or counted, or no choice meets the budget."""
        modules, settings, budget = self.task.modules, self.task.settings, self.budget
        for entry in self.entries:
            if not (fitting := self._fitting(entry)):
                shapes = ", ".join(str(s) for s in sorted({linear_features(m) for m in modules.values()})[:5])
                raise ValueError(f"candidates: {entry} fits none of the layers; their (in, out) sizes are {shapes}")
            smallest = min(fitting, key=lambda module: module.weight.numel())
            operator = check_fittable(entry.candidates(*linear_features(smallest))[0], smallest)
            integers = any(buffer.dtype == torch.uint8 for buffer in operator.buffers())
            if settings.by_bytes and not integers:
                raise ValueError(
                    f"candidates: {entry} stores floats, but bits and size need operators that store integers: give "
                    "candidates=quantized, or keep in place of bits or size"
                )
            if integers and not settings.by_bytes:
                raise ValueError(f"candidates: {entry} stores integers, but keep counts parameters: give bits or size")
        least = 0.0
        for name in modules:
            configs = itertools.chain([None], *self._candidates(name).values())
            least += min(budget.cost(name, config) for config in configs)
        if least > budget.limit:
            raise ValueError(
                f"{budget.what} cannot be met: the smallest that these layers and candidates allow is "
                f"{budget.setting(least)}; ask for that or more, replace more layers, or give other candidates"
            )

    def load_plan(self, path: str | Path) -> CompressPlan:
        """Read a plan from a file. Raises ValueError if it is not a plan for this model and these layers."""
        task, budget = self.task, self.budget
        loaded = CompressPlan.load(path, task.model, budget.cost if task.settings.by_bytes else None)
        unknown = sorted(set(loaded.replaced) - set(task.modules))
        if unknown:
            hint = "" if task.settings.by_bytes else "; embedding and head need a budget of bits or size"
            raise ValueError(f"{path} replaces {unknown[0]}, which targets= and exclude= leave alone{hint}")
        for name, config in loaded.replaced.items():
            if budget.cost(name, config) == math.inf:
                raise ValueError(f"{path}: {name}: no file for {task.settings.reader} stores {config}")
        return loaded

    def plan(self, calibration: Calibration) -> CompressPlan:
        """Return the best plan under the budget. Raises ValueError if it cannot be met."""
        modules, budget, by_bytes = self.task.modules, self.budget, self.task.settings.by_bytes
        candidates = {name: self._candidates(name) for name in modules}
        inputs = [self.task.settings.reader, *(entry.to_dict() for entry in self.entries)]
        # rounding is planned as if rows did not make up for each other: the diagonal of the gradients is enough
        errors = calibration.map_layers("candidates", inputs, partial(self._errors, candidates), diagonal=by_bytes)
        nats = dict[str, dict[OperatorConfig, float]]()
        for name, by_entry in candidates.items():  # the second-order estimate 0.5 tr(G (W - W') A (W - W')^T)
            in_order = itertools.chain(*by_entry.values())
            nats[name] = dict(zip(in_order, (0.5 * errors[name]).tolist(), strict=True)) if name in errors else {}
        groups = self.reader.groups(modules)
        choices = {
            key: group_candidates([(name, nats[name]) for name in names], budget) for key, names in groups.items()
        }
        chosen = allocate(choices, budget.limit, budget.unit)
        configs = {name: chosen[key].config for key, names in groups.items() for name in names}
        layers = dict[str, LayerPlan]()
        for name, module in modules.items():
            config = configs[name]
            stored = budget.cost(name, config) if by_bytes else None
            layers[name] = LayerPlan.of(module, config, 0.0 if config is None else nats[name][config], stored)
        return CompressPlan(layers)

    def _candidates(self, name: str) -> dict[OperatorConfig, list[OperatorConfig]]:
        """Return the candidates for the layer ``name`` by entry; of several with the same cost, the last."""
        features, candidates = linear_features(self.task.modules[name]), dict[OperatorConfig, list[OperatorConfig]]()
        for entry in self.entries:
            by_cost = {self.budget.cost(name, config): config for config in entry.candidates(*features)}
            by_cost.pop(math.inf, None)
            if by_cost:
                candidates[entry] = [*by_cost.values()]
        return candidates

    def _errors(
        self, candidates: Mapping[str, Mapping[OperatorConfig, Sequence[OperatorConfig]]], statistics: Statistics
    ) -> dict[str, Tensor]:
        """Return the errors of each layer's candidates, by the layer's name."""
        errors = dict[str, Tensor]()
        for name, layer_statistics in statistics.items():
            module = self.task.modules[name]
            inputs, tokens = linear_features(module)[0], layer_statistics.tokens
            if tokens is None or tokens >= inputs:  # an expert may have seen too few for an estimate
                by_entry = candidates[name].items()
                pairs = [entry.candidate_errors(module, layer_statistics, configs) for entry, configs in by_entry]
                errors[name] = torch.tensor([error for _, error in itertools.chain(*pairs)], dtype=torch.float64)
        return errors


def group_candidates(layers: Sequence[tuple[str, Mapping[OperatorConfig, float]]], budget: Budget) -> list[Candidate]:
    """Return the joint candidates of layers, from the nats of each; the first leaves all unchanged."""
    candidates = [Candidate(None, sum(budget.cost(name, None) for name, _ in layers), 0.0)]
    for config in layers[0][1]:
        if all(config in nats for _, nats in layers):
            cost = sum(budget.cost(name, config) for name, _ in layers)
            if cost < candidates[0].cost:
                candidates.append(Candidate(config, cost, sum(nats[config] for _, nats in layers)))
    return candidates


def fit_layers_(task: Task, layer_plan: CompressPlan, calibration: Calibration) -> None:
    """Put a plan's operators into the model, fitted to their layers under the original's statistics."""

    def fits(statistics: Statistics) -> dict[str, Tensor]:
        fitted = dict[str, nn.Module]()
        for name, config in layer_plan.replaced.items():
            if name in statistics:
                source = task.modules[name]
                exact = linear_of(dense_weight(source).detach().double(), dense_bias(source))
                fitted[name] = config.convert(source).fit_to_calibration_(exact, statistics[name])
        return flat_states(fitted)

    operators = {name: config.to_dict() for name, config in layer_plan.replaced.items()}
    states = calibration.map_layers("fit", operators, fits)
    if layer_plan.replaced:
        replace_with_states_(task.model, plan(task.model, dict(layer_plan.replaced)).replacements, states)
