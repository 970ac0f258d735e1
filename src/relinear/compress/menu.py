"""What layers may become: the choices, the plan that is made of them, and how it is carried out.

A menu has ``sizes`` of a shape, a ``check`` against a budget, a ``plan`` under it, and carries the plan out;
``timed`` tells whether a table of speeds knows its choices.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from relinear.compress.allocate import Candidate
from relinear.compress.budget import Budget
from relinear.compress.calibrate import Calibration
from relinear.compress.corrections import MeasuredPoint, choose_points, correct, corrections, measure_points
from relinear.compress.in_order import fit_in_order, fit_without_order
from relinear.compress.neurons import NEURONS, Neurons
from relinear.compress.plan import CompressPlan, check_fittable, layer_candidates, make_plan
from relinear.compress.settings import CompressSettings
from relinear.compress.speed import Shape
from relinear.core.operator import OperatorConfig, linear_features
from relinear.surgery.plan import plan
from relinear.surgery.states import flat_states, place_
from relinear.surgery.summary import module_parameters
from relinear.system.files import read_json, write_json

__all__ = ["OnProgress", "Operators", "Work", "menu_of"]

#: told the phase ("speed", "forward", "backward", "candidates", "points", "frontier", "original", "fit", "heal",
#: "evaluation"), how much of it is done, and how much there is
OnProgress = Callable[[str, int, int], None]

#: windows that single fits are tried on
POINT_WINDOWS = 4


@dataclasses.dataclass(frozen=True)
class Work:
    """What a compression works on.

    modules: the layers that may be replaced, by name; by_layer: the same by decoder layer. folder: of what is kept.
    """

    model: Any
    modules: Mapping[str, nn.Module]
    by_layer: Mapping[int, Mapping[str, nn.Module]]
    settings: CompressSettings
    folder: Path
    on_progress: OnProgress


def menu_of(work: Work) -> NarrowerMlps | Operators:
    """Return the menu that the settings name. Raises ValueError if the model does not have what it works on."""
    return NarrowerMlps(work) if work.settings.menu == (NEURONS,) else Operators(work)


class NarrowerMlps:
    """The one choice of a width for all MLPs, by the budget."""

    timed = False

    def __init__(self, work: Work) -> None:
        self.work = work
        self.neurons = Neurons(work.model, work.modules)
        self.width = self.neurons.width
        self.fitted: Mapping[str, Any] = {}

    def sizes(self, shape: Shape) -> list[OperatorConfig]:
        """Return nothing: no layer becomes an operator."""
        return []

    def check(self, budget: Budget) -> None:
        """Find the width. Raises ValueError if none meets the budget."""
        self.width = self.neurons.fitting_width(budget.limit)

    def read_plan(self, path: str | Path) -> CompressPlan:
        """Raise ValueError: the budget alone decides."""
        raise ValueError("menu: neurons has one width for all layers, by the budget: it takes no plan")

    def plan(
        self, calibration: Calibration, budget: Budget, judging: Tensor
    ) -> tuple[CompressPlan, list[MeasuredPoint]]:
        """Return the plan of this width, fitted; no layer is tried by itself."""
        work = self.work
        self.fitted = self.neurons.fitted(calibration, self.width, partial(work.on_progress, "candidates"))
        others = module_parameters(work.model) - sum(module_parameters(m) for m in work.modules.values())
        costs = {name: 0.5 * error for name, (_, _, error) in self.fitted.items()} if work.settings.fisher else {}
        return self.neurons.plan(self.width, others, costs), []

    def carry_out_(self, whole: CompressPlan, calibration: Calibration, blocks: Tensor) -> None:
        """Put the narrower MLPs in place."""
        self.neurons.apply_(self.fitted)


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
        chosen = choose_points(candidates, work.settings.measured_points)
        points = self._points(chosen, calibration, judging[:POINT_WINDOWS]) if chosen else []
        self.candidates = correct(candidates, corrections(points))
        return make_plan(work.model, work.modules, self.candidates, budget, weighed=work.settings.fisher), points

    def _points(
        self, chosen: list[tuple[str, Candidate]], calibration: Calibration, judging: Tensor
    ) -> list[MeasuredPoint]:
        """The chosen points, measured once a directory."""
        what = [[name, c.config.to_dict(), c.nats] for name, c in chosen if c.config is not None]
        mark = hashlib.sha256(json.dumps(what).encode() + judging.numpy().tobytes()).hexdigest()
        path = self.work.folder / "points.json"
        if path.is_file():
            kept = read_json(path)
            if kept["mark"] == mark:
                return [MeasuredPoint.from_dict(values) for values in kept["points"]]
        told = partial(self.work.on_progress, "points")
        points = measure_points(self.work.model, judging, calibration, chosen, told)
        write_json(path, {"mark": mark, "points": [point.to_dict() for point in points]})
        return points

    def carry_out_(self, whole: CompressPlan, calibration: Calibration, blocks: Tensor) -> None:
        """Fit the planned operators and put them into the model."""
        work, settings, mapping = self.work, self.work.settings, dict(whole.replaced)
        replacements = plan(work.model, mapping).replacements
        if not settings.anchor:
            fitted = fit_without_order(calibration, replacements, work.on_progress)
            place_(work.model, replacements, flat_states(fitted))
            return
        by_name = {replacement.name: replacement for replacement in replacements}
        groups = {
            index: found
            for index, names in work.by_layer.items()
            if (found := [by_name[name] for name in names if name in by_name])
        }
        count = settings.anchor_tokens // settings.sequence_length
        refinement = {k: getattr(settings, k) for k in ("refine_steps", "refine_learning_rate", "seed")}
        kept = self._correctable(calibration, whole) if settings.correct_dense else {}
        what = [{name: config.to_dict() for name, config in mapping.items()}, count, refinement, kept]
        mark = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
        fit_in_order(
            work.model,
            blocks[:count],
            calibration,
            groups,
            work.folder / f"fit-{mark}",
            batch=settings.batch_size,
            kept=kept,
            on_layer=work.on_progress,
            **refinement,
        )

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
