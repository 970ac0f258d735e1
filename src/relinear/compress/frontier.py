"""What every budget would cost: predicted at many, measured at a few, from one calibration."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from relinear.compress.allocate import Candidate
from relinear.compress.beside import read
from relinear.compress.budget import Budget, layer_bytes, saved_bytes, stored_bytes
from relinear.compress.calibrate import Calibration
from relinear.compress.corpus import Corpus
from relinear.compress.half import round_to_half_
from relinear.compress.menu import Operators
from relinear.compress.plan import CompressPlan, make_plan
from relinear.compress.speed import SpeedTable, planned_speed
from relinear.core.operator import linear_features

__all__ = ["frontier"]

#: budgets that are predicted, from the smallest to the whole; predicted nats near which one is measured
BUDGETS, MEASURED_NEAR = 32, (0.01, 0.03, 0.1, 0.2, 0.4)


def frontier(
    menu: Operators,
    candidates: Mapping[str, list[Candidate]],
    budget: Budget,
    calibration: Calibration,
    corpus: Corpus,
    table: SpeedTable | None,
    on_point: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    """Return a row for each budget, as JSON values: bytes, bits a weight, speed, nats; the model is left as it was.

    Args:
        menu: of what layers may become. candidates: of each layer.
        budget: in whose unit plans are made.
        calibration: for the fits. corpus: whose windows judge those budgets that are measured.
        table: of speeds; None leaves them out.
        on_point: told how many budgets were measured, and how many there are.
    """
    work = menu.work
    least = sum(min(c.cost for c in options) for options in candidates.values())
    limits = [least * (budget.whole / least) ** (at / BUDGETS) for at in range(BUDGETS + 1)]
    rows: dict[float, tuple[dict[str, Any], CompressPlan]] = {}
    before = stored_bytes(work.model)
    for limit in limits:
        whole = make_plan(work.model, work.modules, candidates, dataclasses.replace(budget, limit=limit), weighed=True)
        row = _row(menu, whole, table, before)
        rows.setdefault(row["bytes"], (row, whole))
    lossy = [pair for pair in rows.values() if pair[0]["predicted"] > 0]
    near = {min(lossy, key=lambda p: abs(p[0]["predicted"] / nats - 1))[0]["bytes"] for nats in MEASURED_NEAR if lossy}
    texts = {"": corpus.judging, **corpus.elsewhere}
    original = {name: read(work.model, blocks) for name, blocks in texts.items()}
    for done, at in enumerate(sorted(near, reverse=True), start=1):
        row, whole = rows[at]
        model = copy.deepcopy(work.model)
        modules = {name: model.get_submodule(name) for name in work.modules}
        by_layer = {index: {name: modules[name] for name in names} for index, names in work.by_layer.items()}
        copied = dataclasses.replace(work, model=model, modules=modules, by_layer=by_layer)
        Operators(copied).carry_out_(whole, calibration, corpus.blocks)
        if work.settings.by_bytes:
            round_to_half_(model)
        found = {name: read(model, blocks).against(original[name]) for name, blocks in texts.items()}
        row |= {"measured": found.pop(""), "elsewhere": found}
        on_point(done, len(near))
    return [row for row, _ in rows.values()]


def _row(menu: Operators, whole: CompressPlan, table: SpeedTable | None, before: int) -> dict[str, Any]:
    """A budget's row; ``before``: bytes of the whole original."""
    modules, replaced = menu.work.modules, whole.replaced
    left = before - saved_bytes(modules, replaced)
    after = sum(layer_bytes(module, replaced.get(name)) for name, module in modules.items())
    weights = sum(inputs * outputs for inputs, outputs in map(linear_features, modules.values()))
    return {
        "bytes": left,
        "share_of_bytes": left / before,
        "bits": 8 * after / weights,
        "share_of_parameters": whole.parameters / whole.parameters_before,
        "speed": None if table is None else planned_speed(table, modules, replaced, {}).ratio,
        "predicted": whole.nats,
    }
