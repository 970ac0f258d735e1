"""Why choosing bits by layer gains what it gains: predictions from what ``compress`` has kept, no model is run.

    python results/compress/allocation.py models/smollm2=runs/compress-frontier/smollm2/seed-0/moments \\
        --out results/compress/allocation.json

Rounding a layer to b bits costs about c 4^-b nats, c its sensitivity. One number of bits for all costs the sum; bits
that follow the sensitivities cost at best their geometric mean over weights in place of the arithmetic one (the
"bound" of whole layers). With G's diagonal the same is said of rows of a layer, which have one number of bits today.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path

import relinear
from relinear.compression.budget import Candidate, allocate
from relinear.contract.operator import linear_features
from saved_statistics import SavedStatistics

BUDGETS = (4.375, 4.25, 3.5, 3.0)


def geometric(values) -> float:
    """The geometric mean of positive numbers over their mean."""
    values = values.double().clamp_min(1e-30)
    return float(values.log().mean().exp() / values.mean())


def figures(model, calibration: SavedStatistics) -> dict:
    """Predicted nats of one number of bits for all, of bits by layer at each budget, and the bounds."""
    entry = relinear.Quantized()
    weights, costs, rows, options = {}, {}, {}, {}
    for name in calibration.names:
        layer = model.get_submodule(name)
        weights[name] = math.prod(linear_features(layer))
        curve = {config.bits: error / 2 for config, error in calibration.candidate_errors(entry, name, layer)}
        costs[name] = curve
        options[name] = [Candidate(entry.replace(bits=b), (b + 24 / 64) * weights[name], e) for b, e in curve.items()]
        rows[name] = geometric(calibration.moments(name).gradient_moment.diagonal())
    whole = sum(weights.values())

    def bound(share) -> float:
        logs = (weights[n] / whole * math.log(costs[n][4] * share(n) / weights[n]) for n in weights)
        return whole * math.exp(sum(logs))

    uniform = {bits: sum(curve[bits] for curve in costs.values()) for bits in costs[name]}
    by_layer, bits_of = {}, {}
    for budget in BUDGETS:
        chosen = allocate(options, budget * whole, "bits")
        by_layer[budget] = sum(c.nats for c in chosen.values())
        kinds = defaultdict(list)
        for name, candidate in chosen.items():
            kinds[name.rpartition(".")[2]].append(candidate.config.bits)
        bits_of[budget] = {kind: round(sum(bits) / len(bits), 2) for kind, bits in kinds.items()}
    kinds = defaultdict(float)
    for name, curve in costs.items():
        kinds[name.rpartition(".")[2]] += curve[4]
    return {
        "uniform": {f"{bits + 24 / 64:g}": round(nats, 4) for bits, nats in uniform.items()},
        "by_layer": {f"{budget:g}": round(nats, 4) for budget, nats in by_layer.items()},
        "bits": {f"{budget:g}": bits for budget, bits in bits_of.items()},
        "four_bits_by_type": {kind: round(nats, 4) for kind, nats in kinds.items()},
        "bound_of_layers": round(bound(lambda n: 1.0) / uniform[4], 3),
        "bound_of_layers_and_rows": round(bound(rows.get) / uniform[4], 3),
        "most_sensitive_layer": round(max(curve[4] for curve in costs.values()) / uniform[4], 3),
    }


def main() -> None:
    """Write the figures of every model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL=CALIBRATION")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    for text in given.models:
        where, _, folder = text.partition("=")
        found[Path(where).name] = figures(relinear.from_pretrained(where), SavedStatistics(folder))
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
