"""What layers may become: the choices, the plan that is made of them, and how it is carried out.

A menu has ``sizes`` of a shape, a ``check`` against a budget, a ``plan`` under it, and carries the plan out;
``timed`` tells whether a table of speeds knows its choices.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from relinear.compress.beside import read
from relinear.compress.budget import Budget, Candidate, round_to_half_, saved_bytes, size_of, stored_bytes
from relinear.compress.calibrate import Calibration
from relinear.compress.corpus import Corpus
from relinear.compress.in_order import InOrder, fit_without_order
from relinear.compress.neurons import NEURONS, Neurons
from relinear.compress.plan import CompressPlan, MeasuredPoint, check_fittable, corrected, layer_candidates, make_plan
from relinear.compress.speed import Shape, SpeedTable, planned_speed
from relinear.compress.work import Work
from relinear.core.operator import OperatorConfig, linear_features
from relinear.distill.record import fingerprint_of
from relinear.surgery.plan import plan
from relinear.surgery.states import flat_states, place_

#: budgets that are predicted, from the smallest to the whole; predicted nats near which one is measured
BUDGETS, MEASURED_NEAR = 32, (0.01, 0.03, 0.1, 0.2, 0.4)


def menu_of(work: Work) -> Neurons | Operators:
    """Return the menu that the settings name. Raises ValueError if the model does not have what it works on."""
    return Neurons(work) if work.settings.menu == (NEURONS,) else Operators(work)


class Operators:
    """Operators of the menu, each at every size that it has, for each layer by itself.

    candidates: those of the last plan, by layer.
    """

    timed = True

    def __init__(self, work: Work) -> None:
        self.work = work
        self.candidates: Mapping[str, list[Candidate]] = {}
        self.entries = tuple(OperatorConfig.read(text) for text in work.settings.menu)

    def sizes(self, shape: Shape) -> list[OperatorConfig]:
        """Return the sizes of all entries."""
        return [config for entry in self.entries for config in entry.sizes(*shape)]

    def check(self, budget: Budget) -> None:
        """Raise ValueError if an entry fits no layer or cannot be fitted, or no choice meets the budget."""
        modules = self.work.modules
        for entry in self.entries:
            fitting = [module for module in modules.values() if entry.sizes(*linear_features(module))]
            if not fitting:
                shapes = ", ".join(str(s) for s in sorted({linear_features(m) for m in modules.values()})[:5])
                raise ValueError(f"menu: {entry} fits none of the layers; their (in, out) sizes are {shapes}")
            smallest = min(fitting, key=lambda module: module.weight.numel())
            check_fittable(entry.sizes(*linear_features(smallest))[0], smallest, "menu")
        budget.check(modules, self.entries, uniform=not self.work.settings.fisher)

    def read_plan(self, path: str | Path) -> CompressPlan:
        """Return a plan from a file. Raises ValueError if it is none for this model and these layers."""
        found = CompressPlan.load(path, self.work.model)
        strange = sorted(set(found.replaced) - set(self.work.modules))
        if strange:
            raise ValueError(f"{path} replaces {strange[0]}, which targets= and exclude= leave alone")
        return found

    def plan(
        self, calibration: Calibration, budget: Budget, judging: Tensor
    ) -> tuple[CompressPlan, list[MeasuredPoint]]:
        """Return the best plan under the budget, with what single layers were found to cost."""
        work, candidates = self.work, dict[str, list[Candidate]]()
        for done, (name, module) in enumerate(work.modules.items(), start=1):
            candidates[name] = layer_candidates(module, name, calibration, self.entries, budget)
            work.on_progress("candidates", done, len(work.modules))
        self.candidates, points = corrected(work, candidates, calibration, judging)
        return make_plan(work, self.candidates, budget), points

    def carry_out_(self, whole: CompressPlan, calibration: Calibration, blocks: Tensor) -> None:
        """Fit the planned operators and put them into the model."""
        work, settings = self.work, self.work.settings
        replacements = {r.name: r for r in plan(work.model, dict(whole.replaced)).replacements}
        if not settings.anchor:
            fitted = fit_without_order(work, calibration, replacements)
            place_(work.model, replacements.values(), flat_states(fitted))
            return
        count = settings.anchor_tokens // settings.sequence_length
        refinement = {k: getattr(settings, k) for k in ("refine_steps", "refine_learning_rate", "seed")}
        kept = self._correctable(calibration, whole) if settings.correct_dense else {}
        what = [{name: config.to_dict() for name, config in whole.replaced.items()}, count, refinement, kept]
        folder = work.folder / f"fit-{fingerprint_of(what, [])[:16]}"
        InOrder(work, calibration, replacements, kept, folder).run(blocks[:count])

    def _correctable(self, calibration: Calibration, whole: CompressPlan) -> dict[int, list[str]]:
        """The layers that stay dense and may take other weights: theirs alone, with inputs that are known."""
        uses = Counter(id(p) for _, p in self.work.model.named_parameters(remove_duplicate=False))
        return {
            index: [
                name
                for name, module in modules.items()
                if name not in whole.replaced
                and calibration.knows(name, module)
                and all(uses[id(p)] == 1 for p in module.parameters())
            ]
            for index, modules in self.work.by_layer.items()
        }

    def frontier(
        self, budget: Budget, calibration: Calibration, corpus: Corpus, table: SpeedTable
    ) -> list[dict[str, Any]]:
        """Return a row for each budget, as JSON values: bytes, bits a weight, speed, nats; the model is left as it was.

        Args:
            budget: in whose unit plans are made.
            calibration: for the fits. corpus: whose windows judge those budgets that are measured.
            table: of speeds.
        """
        work, candidates = self.work, self.candidates
        least = sum(min(c.cost for c in options) for options in candidates.values())
        limits = [least * (budget.whole / least) ** (at / BUDGETS) for at in range(BUDGETS + 1)]
        rows: dict[float, tuple[dict[str, Any], CompressPlan]] = {}
        before = stored_bytes(work.model)
        for limit in limits:
            whole = make_plan(work, candidates, dataclasses.replace(budget, limit=limit))
            row = self._row(whole, table, before)
            rows.setdefault(row["bytes"], (row, whole))
        lossy = [row for row, _ in rows.values() if row["predicted"] > 0]
        near = {min(lossy, key=lambda row: abs(row["predicted"] / n - 1))["bytes"] for n in MEASURED_NEAR if lossy}
        texts = {"": corpus.judging, **corpus.elsewhere}
        original = {name: read(work.model, blocks) for name, blocks in texts.items()}
        for done, at in enumerate(sorted(near, reverse=True), start=1):
            row, whole = rows[at]
            copied = work.on_a_copy()
            copied.round_tables_()
            Operators(copied).carry_out_(whole, calibration, corpus.blocks)
            if work.settings.by_bytes:
                round_to_half_(copied.model)
            found = {name: read(copied.model, blocks).against(original[name]) for name, blocks in texts.items()}
            row |= {"measured": found.pop(""), "elsewhere": found}
            work.on_progress("frontier", done, len(near))
        return [row for row, _ in rows.values()]

    def _row(self, whole: CompressPlan, table: SpeedTable, before: int) -> dict[str, Any]:
        """A budget's row; ``before``: bytes of the whole original."""
        modules, replaced = self.work.modules, whole.replaced
        left = before - saved_bytes(modules, replaced) - self.work.bytes_of_tables
        after = sum(size_of(module, replaced.get(name)).stored for name, module in modules.items())
        weights = sum(inputs * outputs for inputs, outputs in map(linear_features, modules.values()))
        return {
            "bytes": left,
            "share_of_bytes": left / before,
            "bits": 8 * after / weights,
            "share_of_parameters": whole.parameters / whole.parameters_before,
            "speed": planned_speed(table, modules, replaced, {}).ratio,
            "predicted": whole.nats,
        }
