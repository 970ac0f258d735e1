"""Would another rule of choosing bits hold better on text of another kind? Gemma's layers under moments of four kinds.

    python results/compress/kinds.py models/gemma --calibrate TEXT --far NAME=TEXT [NAME=TEXT ...] --every 4 \\
        --work runs/kinds --out results/compress/kinds.json

Half of the calibration is the text, half the model's own, as in ``compress``. Of one decoder layer in so many a few
rows of every layer are rounded by GPTQ at each size; their error is taken under the moments of each kind apart,
0.5 tr(G D A D^T) with the diagonal of G. A plan of 4.25 bits is made by each rule, and the errors of its sizes are
summed. No loss is measured.

    now         error under the mean of the kinds, and under each kind for a fit to the others: ``compress``
    worst       the larger of the errors of the two kinds, for a fit to the other
    diagonal    mean squares of the inputs alone, as llama.cpp's importance matrix
    least 4     as now, no layer below four bits
    own NAME    the errors of NAME itself, which no rule can know
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

import relinear
from frontier import texts
from relinear.compression import CompressSettings
from relinear.compression.budget import Candidate, allocate
from relinear.compression.calibrate import Calibration
from relinear.compression.corpus import read_corpus, read_elsewhere, with_sampled_text
from relinear.compression.inputs import by_decoder_layer, linear_layers
from relinear.compression.storage import load_tensors, save_tensors
from relinear.contract.operator import dense_weight
from relinear.data.tokenizers import load_tokenizer
from relinear.functional.rounding import cross_validated_shrinkage, expected_error, gptq, nearest_grid, shrunk
from relinear.system.machine import describe_machine

SIZES = [relinear.Quantized(bits=bits, group=group) for group in (64, 256) for bits in (2, 3, 4, 5, 6, 8)]
BITS, ROWS = 4.25, 48


def measure(model, blocks: dict[str, Tensor], settings: CompressSettings, work: Path) -> None:
    """Write A and G of every layer under each kind of text."""
    by_layer = by_decoder_layer(model, linear_layers(model, exclude="embed_tokens"))
    for kind, ids in blocks.items():
        calibration = Calibration(model, ids, by_layer, work / f"calibration-{kind}", settings)

        def keep(statistics, kind=kind) -> dict:
            for name, known in statistics.items():
                tensors = {"A": known.input_moment.float(), "G": known.gradient_moment.float()}
                save_tensors(work / kind / f"{name}.safetensors", tensors)
            return {}

        (work / kind).mkdir(parents=True, exist_ok=True)
        calibration.map_layers("candidates", "keep", keep)
        calibration.release()


def errors(weight: Tensor, inputs: dict[str, Tensor], outputs: dict[str, Tensor], near: list[str]) -> dict:
    """Predictions of the rules for every size of a layer, and its errors under each kind."""
    pooled = sum(inputs[kind] for kind in near) / len(near)
    share, left = cross_validated_shrinkage(tuple(inputs[kind].double() for kind in near))
    mean = sum(outputs[kind] for kind in near) / len(near)
    crosses = {}
    for known, kind in (near, near[::-1]):
        order = inputs[known].diagonal().argsort()
        root, lower = (
            torch.linalg.cholesky(shrunk(inputs[one].double()[order][:, order], *how)).float()
            for one, how in ((kind, (0, 1e-5)), (known, (share,)))
        )
        transfer = torch.linalg.solve_triangular(lower, root, upper=False) * lower.diagonal()[:, None]
        crosses[kind] = torch.empty_like(pooled[0]).index_copy_(0, order, transfer.square().sum(1))
    rows = torch.linspace(0, len(weight) - 1, min(ROWS, len(weight))).long()
    found = {}
    for config in SIZES:
        grid = nearest_grid(weight[rows], config.bits, config.group, False, pooled.diagonal())

        def expected(of_inputs: Tensor, of_rows: Tensor, grid=grid, config=config) -> float:
            return 0.5 * float(expected_error(weight, rows, grid, config.group, of_inputs.float(), of_rows))

        codes = gptq(weight[rows], grid, config.group, shrunk(pooled, share))
        missed = grid.values(codes, config.group) - weight[rows]
        own = {}
        for kind, moment in inputs.items():
            by_row, weights = ((missed @ moment) * missed).sum(1), outputs[kind]
            own[kind] = 0.5 * float(
                (by_row * weights[rows]).sum() / weights[rows].sum().clamp_min(1e-30) * weights.sum()
            )
        worst = max(expected(left_of, outputs[kind]) for kind, left_of in crosses.items())
        found[config] = {"now": expected(left, mean), "worst": worst, "diagonal": expected(pooled.diagonal(), mean)}
        found[config] |= {f"own {kind}": error for kind, error in own.items()}
    return found


def planned(table: dict, weights: dict[str, int], price: str, least: int, kinds: list[str]) -> dict:
    """Errors by kind of the plan that a rule makes, and how many layers have how many bits."""
    options = {
        name: [
            Candidate(config, weights[name] * (config.bits + 24 / config.group), found[price])
            for config, found in sizes.items()
            if config.bits >= least
        ]
        for name, sizes in table.items()
    }
    chosen = allocate(options, BITS * sum(weights.values()), "bits")
    nats = {kind: sum(table[name][c.config][f"own {kind}"] for name, c in chosen.items()) for kind in kinds}
    return {"nats": nats, "bits": dict(sorted(Counter(c.config.bits for c in chosen.values()).items()))}


def main() -> None:
    """Measure what is not there yet, and write the rules' errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--calibrate", required=True, metavar="TEXT")
    parser.add_argument("--far", nargs="+", required=True, metavar="NAME=TEXT")
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    tokenizer, model = load_tokenizer(given.model), relinear.from_pretrained(given.model, dtype=torch.float32).eval()
    settings = CompressSettings(tokens=8192, sequence_length=256, evaluation_tokens=6144)
    far = read_elsewhere({n: texts(p) for n, p in (one.split("=", 1) for one in given.far)}, tokenizer, settings)
    corpus = read_corpus({"given": texts(given.calibrate)}, tokenizer, settings, False)
    given.work.mkdir(parents=True, exist_ok=True)
    mixed = with_sampled_text(corpus, model, given.work, 0).blocks
    blocks = {"given": mixed[::2], "sampled": mixed[1::2]} | {name: ids[::2] for name, ids in far.items()}
    measure(model, blocks, settings, given.work)
    table, weights, kinds = {}, {}, list(blocks)
    for name, layer in linear_layers(model, exclude="embed_tokens").items():
        if int(name.split("layers.")[1].split(".")[0]) % given.every:
            continue
        moments = {kind: load_tensors(given.work / kind / f"{name}.safetensors") for kind in kinds}
        inputs = {kind: one["A"] for kind, one in moments.items()}
        outputs = {kind: one["G"].diagonal() for kind, one in moments.items()}
        table[name] = errors(dense_weight(layer).detach().float(), inputs, outputs, ["given", "sampled"])
        weights[name] = layer.weight.numel()
    rules = {"now": ("now", 2), "worst": ("worst", 2), "diagonal": ("diagonal", 2), "least 4": ("now", 4)}
    rules |= {f"own {kind}": (f"own {kind}", 2) for kind in kinds}
    rows = {rule: planned(table, weights, *how, kinds) for rule, how in rules.items()}
    record = {"model": Path(given.model).name, "names": sorted(table), "rules": rows, "machine": describe_machine()}
    given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
