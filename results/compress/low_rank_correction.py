"""Integers plus a low-rank correction (Q + L R), beside integers alone at equal bytes: predicted, no model is run.

    python results/compress/low_rank_correction.py models/smollm2-rotated --calibrate TEXT [TEXT ...] \\
        --out results/compress/low_rank_correction.json

As in CALDERA (arXiv:2405.18886), integers and factors are fitted in turns, here under both moments: the integers to
W - L R as ``compress`` rounds, the factors to W - Q in closed form, then to 8 bits in groups of 64. The error is
0.5 tr(G D A D^T), under the moments of another draw of calibration. Of a few decoder layers every linear layer is
fitted at 2, 3 and 4 bits with ranks 4, 16 and 64. Then bits are chosen for each layer under one price, with integers
alone and with all, at equal bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import relinear
from frontier import texts
from relinear.compression import CompressSettings
from relinear.compression.budget import Candidate, allocate
from relinear.compression.calibrate import Calibration
from relinear.compression.corpus import read_corpus
from relinear.compression.inputs import by_decoder_layer, linear_layers
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.contract.operator import dense_weight, linear_of
from relinear.data.tokenizers import load_tokenizer
from relinear.functional.low_rank import weighted_spectrum
from relinear.system.machine import describe_machine
from saved_statistics import SavedStatistics

LAYERS = (3, 12, 21, 28)
BITS, RANKS, TURNS = (2, 3, 4), (4, 16, 64), 2
BUDGETS = (2.5, 3.0, 3.5, 4.25)
#: bits per weight of scales and zero points, in groups of 64
GRID = 24 / 64


def in_integers(weight: Tensor, bits: int, moments: CalibrationStatistics | None) -> Tensor:
    """The matrix rounded as relinear rounds, to nearest without moments."""
    source = linear_of(weight)
    operator = relinear.Quantized(bits=bits).convert(source)
    fitted = operator.fit_to_linear_(source) if moments is None else operator.fit_to_calibration_(source, moments)
    return fitted.to_dense()


def corrected(weight: Tensor, bits: int, rank: int, moments: CalibrationStatistics) -> Tensor:
    """Q + L R after so many turns, the best on the way."""
    low_rank, best = torch.zeros_like(weight), weight * math.inf
    for _ in range(TURNS):
        integers = in_integers(weight - low_rank, bits, moments)
        rest = weight - integers
        down, up = weighted_spectrum(rest, moments.input_moment, moments.gradient_moment).factors(rest, rank)
        low_rank = in_integers(up.T.float(), 8, None).T @ in_integers(down.float(), 8, None)
        best = min(best, integers + low_rank, key=lambda found: error(weight, found, moments))
    return best


def error(weight: Tensor, instead: Tensor, moments: CalibrationStatistics) -> float:
    """0.5 tr(G D A D^T)."""
    found = float(moments.error(weight - instead)) / 2
    return math.inf if math.isnan(found) else found


@torch.no_grad()
def options(
    layer: nn.Module, moments: CalibrationStatistics, other: CalibrationStatistics
) -> dict[str, tuple[float, float]]:
    """What -> bits per weight, and the predicted nats, under another draw's moments than it is fitted to."""
    weight = dense_weight(layer).detach().float()
    outputs, inputs = weight.shape
    found = {
        f"{bits} bits": (bits + GRID, error(weight, in_integers(weight, bits, moments), other))
        for bits in (2, 3, 4, 5, 6)
    }
    for bits in BITS:
        for rank in RANKS:
            more = rank * (inputs + outputs) * (8 + GRID) / (inputs * outputs)
            fitted = corrected(weight, bits, rank, moments)
            found[f"{bits} bits, rank {rank}"] = bits + GRID + more, error(weight, fitted, other)
    return found


def judged(layers: dict[str, dict[str, tuple[float, float]]], weights: dict[str, int]) -> list[dict]:
    """Predicted nats at every budget, of integers alone and of all, and how many layers take a correction."""
    rows = []
    for budget in BUDGETS:
        row: dict = {"bits": budget}
        for name, kinds in (("integers", (0,)), ("all", (0, 1))):
            candidates = {
                layer: [
                    Candidate(what, bits * weights[layer], nats)
                    for what, (bits, nats) in found.items()
                    if what.count("rank") in kinds
                ]
                for layer, found in layers.items()
            }
            chosen = allocate(candidates, budget * sum(weights.values()), "bits")
            row[name] = sum(one.nats for one in chosen.values())
            row["corrected"] = sum("rank" in str(one.config) for one in chosen.values())
        rows.append(row)
    return rows


def main() -> None:
    """Fit, choose and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--calibrate", nargs="+", required=True, metavar="TEXT")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--state", type=Path, default=Path("runs/compress-frontier"))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    start = time.perf_counter()
    model, tokenizer = relinear.from_pretrained(given.model).eval(), load_tokenizer(given.model)
    corpora = {Path(path).parent.name: texts(path) for path in given.calibrate}
    draws = []
    for seed in (0, 1):
        settings = CompressSettings(tokens=given.tokens, seed=seed, evaluate=False)
        blocks = read_corpus(corpora, tokenizer, settings, plan_only=True).blocks
        state = given.state / Path(given.model).name / f"seed-{seed}"
        state.mkdir(parents=True, exist_ok=True)
        in_layers = by_decoder_layer(model, linear_layers(model))
        calibration = Calibration(model, blocks, in_layers, state / "calibration", settings)
        draws.append(SavedStatistics.of(calibration, state / "moments"))
    calibration, judge = draws
    layers, weights = {}, {}
    for name in calibration.names:
        if int(re.search(r"layers\.(\d+)\.", name)[1]) in LAYERS:
            layer = model.get_submodule(name)
            layers[name], weights[name] = (
                options(layer, calibration.moments(name), judge.moments(name)),
                layer.weight.numel(),
            )
            print(name, {what: f"{bits:.2f}: {nats:.5f}" for what, (bits, nats) in layers[name].items()}, flush=True)
    found = {
        "model": Path(given.model).name,
        "tokens": given.tokens,
        "turns": TURNS,
        "budgets": judged(layers, weights),
    }
    found |= {"layers": layers, "machine": describe_machine(), "seconds": time.perf_counter() - start}
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["budgets"], indent=1))


if __name__ == "__main__":
    main()
