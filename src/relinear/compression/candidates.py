"""What layers may become: candidates, the plan that is chosen among them, fits, and the loss at other budgets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from relinear.compression.budget import (
    Budget,
    Candidate,
    allocate,
    best_uniform,
    round_to_half_,
    saved_bytes,
    size_of,
    stored_bytes,
)
from relinear.compression.calibrate import Calibration
from relinear.compression.corpus import Corpus
from relinear.compression.evaluation import read
from relinear.compression.plan import CompressPlan, LayerPlan, check_fittable
from relinear.compression.task import Task
from relinear.contract.operator import OperatorConfig, dense_bias, dense_weight, linear_features, linear_of
from relinear.surgery.plan import plan
from relinear.surgery.states import flat_states, place_

#: budgets that are predicted, from the smallest to the whole; predicted nats near which one is measured
BUDGETS, MEASURED_NEAR = 32, (0.01, 0.03, 0.1, 0.2, 0.4)


class SearchSpace:
    """Operators of the setting ``candidates``, each at every size that it has, for each layer apart.

    candidates: those of the last plan, by layer.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.candidates: Mapping[str, list[Candidate]] = {}
        self.entries = tuple(OperatorConfig.read(text) for text in task.settings.candidates)

    def sizes(self, shape: tuple[int, int]) -> list[OperatorConfig]:
        """Return the sizes of all operators for a layer of (in_features, out_features)."""
        return [config for entry in self.entries for config in entry.sizes(*shape)]

    def check(self, budget: Budget) -> None:
        """Raise ValueError if an operator fits no layer, cannot be fitted or counted, or no choice meets the budget."""
        modules, settings = self.task.modules, self.task.settings
        for entry in self.entries:
            fitting = [module for module in modules.values() if entry.sizes(*linear_features(module))]
            if not fitting:
                shapes = ", ".join(str(s) for s in sorted({linear_features(m) for m in modules.values()})[:5])
                raise ValueError(f"candidates: {entry} fits none of the layers; their (in, out) sizes are {shapes}")
            smallest = min(fitting, key=lambda module: module.weight.numel())
            operator = check_fittable(entry.sizes(*linear_features(smallest))[0], smallest, "candidates")
            integers = any(buffer.dtype == torch.uint8 for buffer in operator.buffers())
            if settings.by_bytes and not integers:
                raise ValueError(
                    f"candidates: {entry} stores no integers, which a budget of bytes is met by: give "
                    "candidates=quantized, or keep with budget_of=layers"
                )
            if integers and not settings.by_bytes:
                raise ValueError(
                    f"candidates: {entry} stores integers, which a count of {budget.unit} leaves out: give bits or "
                    "budget_of=bytes"
                )
        budget.check(modules, self.entries, uniform=not settings.fisher)

    def load_plan(self, path: str | Path) -> CompressPlan:
        """Return a plan from a file. Raises ValueError if it is none for this model and these layers."""
        loaded = CompressPlan.load(path, self.task.model)
        unknown = sorted(set(loaded.replaced) - set(self.task.modules))
        if unknown:
            raise ValueError(f"{path} replaces {unknown[0]}, which targets= and exclude= leave alone")
        return loaded

    def plan(self, calibration: Calibration, budget: Budget) -> CompressPlan:
        """Return the best plan under the budget. Raises ValueError if it cannot be met."""
        task, found = self.task, dict[str, list[Candidate]]()
        for done, (name, module) in enumerate(task.modules.items(), start=1):
            found[name] = layer_candidates(module, name, calibration, self.entries, budget)
            task.on_progress("candidates", done, len(task.modules))
        self.candidates = found
        return make_plan(task, found, budget)

    def frontier(self, budget: Budget, calibration: Calibration, corpus: Corpus) -> list[dict[str, Any]]:
        """Return a row for each budget, as JSON values: bytes, bits a weight, nats; the model is left as it was.

        Where ``evaluate`` is off every budget is predicted and none measured.

        Args:
            budget: in whose unit plans are made.
            calibration: for the fits. corpus: whose windows evaluate those budgets that are measured.
        """
        task, candidates = self.task, self.candidates
        least = sum(min(c.cost for c in options) for options in candidates.values())
        limits = [least * (budget.whole / least) ** (at / BUDGETS) for at in range(BUDGETS + 1)]
        rows: dict[float, tuple[dict[str, Any], CompressPlan]] = {}
        before = stored_bytes(task.model)
        for limit in limits:
            whole = make_plan(task, candidates, dataclasses.replace(budget, limit=limit))
            row = self._row(whole, before)
            rows.setdefault(row["bytes"], (row, whole))
        lossy = [row for row, _ in rows.values() if row["predicted"] > 0 and task.settings.evaluate]
        near = {min(lossy, key=lambda row: abs(row["predicted"] / n - 1))["bytes"] for n in MEASURED_NEAR if lossy}
        texts = {"": corpus.evaluation, **corpus.elsewhere}
        original = {name: read(task.model, blocks) for name, blocks in texts.items() if near}
        for done, at in enumerate(sorted(near, reverse=True), start=1):
            row, whole = rows[at]
            copied = task.on_a_copy()
            copied.round_tables_()
            replace_layers_(copied, whole, calibration)
            if task.settings.by_bytes:
                round_to_half_(copied.model)
            found = {name: read(copied.model, blocks).against(original[name]) for name, blocks in texts.items()}
            row |= {"measured": found.pop(""), "elsewhere": found}
            task.on_progress("frontier", done, len(near))
        return [row for row, _ in rows.values()]

    def _row(self, whole: CompressPlan, before: int) -> dict[str, Any]:
        """A budget's row; ``before``: bytes of the whole original."""
        modules, replaced = self.task.modules, whole.replaced
        remaining = before - saved_bytes(modules, replaced) - self.task.bytes_of_tables
        after = sum(size_of(module, replaced.get(name)).stored for name, module in modules.items())
        weights = sum(inputs * outputs for inputs, outputs in map(linear_features, modules.values()))
        return {
            "bytes": remaining,
            "share_of_bytes": remaining / before,
            "bits": 8 * after / weights,
            "share_of_parameters": whole.parameters / whole.parameters_before,
            "predicted": whole.nats,
        }


def layer_candidates(
    module: Any, name: str, calibration: Calibration, entries: tuple[OperatorConfig, ...], budget: Budget
) -> list[Candidate]:
    """Return what the linear layer ``module`` could become, at what cost in the budget's unit; itself among it.

    The nats are the second-order estimate 0.5 tr(G (W - W') A (W - W')^T) of the loss's increase per token.
    """
    sizes = linear_features(module)
    dense = Candidate(None, budget.cost(name, None), 0.0)
    if not calibration.knows(name, module):
        return [dense]  # an expert that hardly saw a token: its moments say nothing
    found = [dense]
    for entry in entries:
        for config, error in calibration.candidate_errors(entry, name, module) if entry.sizes(*sizes) else ():
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


def make_plan(task: Task, candidates: Mapping[str, list[Candidate]], budget: Budget) -> CompressPlan:
    """Return the best plan under the budget.

    Where no moments of gradients were measured (``fisher``), nats do not compare across layers, and every layer keeps
    the same share.

    Raises:
        ValueError: if the budget cannot be met.
    """
    weighed = task.settings.fisher
    if weighed:
        chosen = allocate(candidates, budget.limit, budget.unit)
    else:
        chosen = best_uniform(candidates, budget.limit / budget.whole)
    layers = {}
    for name, choice in chosen.items():
        layers[name] = LayerPlan.of(task.modules[name], choice.config, choice.nats if weighed else None)
    return CompressPlan.of(task.model, layers)


def replace_layers_(task: Task, whole: CompressPlan, calibration: Calibration) -> None:
    """Fit every planned operator to its layer under the original's moments, then put all of them into the model."""
    replacements = {r.name: r for r in plan(task.model, dict(whole.replaced)).replacements}
    fitted = {}
    for done, (name, replacement) in enumerate(replacements.items(), start=1):
        source = replacement.target.module
        exact = linear_of(dense_weight(source).detach().double(), dense_bias(source))
        fitted[name] = replacement.config.convert(source).fit_to_calibration(exact, calibration.moments(name))
        task.on_progress("fit", done, len(replacements))
    place_(task.model, replacements.values(), flat_states(fitted))
