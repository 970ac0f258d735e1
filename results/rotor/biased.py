"""Projections of a layer of SmolLM2-135M replaced by operators whose biases start at the mean, against that mean alone.

    python results/rotor/biased.py --model models/smollm2 --data data
    python results/rotor/biased.py --model models/smollm2 --data data --fresh

q, k and v of layer 12 one by one, and all three, trained together until the attention gives what it gave. Every method
has its own learning rate for each of the four: the one of the least fit error, on a seed of its own. Losses are over
windows of 256 tokens of WikiText-2 test and of PTB test, half of --eval-tokens each; intervals of 95 % over three
seeds (Student's t), paired, widened by the error of the windows. What has been measured stays in --state, where the
same command goes on; several of them at a time share the work, write biased.json there in the end and print its gaps.
With --fresh low rank starts from fresh matrices, as in the authors' code, and is held against rotors in q, k and v; the
record is fresh.json.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import StackDataset, Subset
from transformers import AutoModelForCausalLM, AutoTokenizer

import relinear
from relinear.compare.gaps import gap
from relinear.data import DataSettings, iter_texts
from relinear.distill.record import record, token_blocks
from relinear.system.files import read_json, write_json
from relinear.system.machine import command_line, describe_machine
from smollm2 import METHODS as WITHOUT_BIAS
from smollm2 import TUNING_SEED, fit, interleaved

LAYER, LENGTH = 12, 256
_PLACE = f"model.layers.{LAYER}.self_attn.{{}}_proj"
TOGETHER = "q, k and v"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", TOGETHER)
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
#: rates that are tried in any case; further ones where the best is at an end
FIRST = (0.01, 0.03, 0.1)
SEEDS = (0, 1, 2)
CONSTANT = "constant"
FITTED = {
    name: WITHOUT_BIAS[name] for name in ("low rank 1", "low rank 4", "rotor, double", "block-Hadamard, 64 blocks")
} | {"rotor, the authors' network": relinear.Rotor.authors()}

#: what starts from fresh matrices, where the others start from the best fit of the weight
FRESH = {f"{name}, fresh": WITHOUT_BIAS[name] for name in ("low rank 1", "low rank 4")}
#: methods that the paper holds rotors against
REFERENCES = ("low rank 1", "low rank 4", "block-Hadamard, 64 blocks", *FRESH)


class Work:
    """What is fitted and evaluated, and where it is kept."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.methods = {"rotor, double": FITTED["rotor, double"]} | FRESH if options.fresh else FITTED
        self.projections = PROJECTIONS[:3] if options.fresh else PROJECTIONS
        self.tokenizer = AutoTokenizer.from_pretrained(options.model)
        self.original = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
        self.texts = list(itertools.islice(interleaved(options.data), 12))  # more than enough
        self.held_out = {}
        for name in ("wikitext2", "ptb"):
            text = iter_texts(DataSettings(data=str(options.data / name)), "test")
            blocks = token_blocks(text, self.tokenizer, LENGTH, options.eval_tokens // 2 // LENGTH)
            self.held_out[name] = StackDataset(input_ids=blocks, labels=blocks)

    def file(self, name: str) -> Path:
        """Where a measurement is kept."""
        return self.options.state / f"{name}.json"

    def measured(self, name: str) -> dict | None:
        """A measurement, if it has been made."""
        return read_json(self.file(name)) if self.file(name).is_file() else None

    def constant(self, projection: str) -> dict:
        """Losses with the mean output, over the tokens that methods are fitted on, in place of the projection."""
        model = copy.deepcopy(self.original)
        blocks = token_blocks(self.texts, self.tokenizer, LENGTH, self.options.tokens // LENGTH)
        letters = "qkv" if projection == TOGETHER else projection[0]
        modules = {name: model.get_submodule(name) for name in map(_PLACE.format, letters)}
        with record(model, blocks, modules, batch=8, outputs=modules) as recording:
            means = {name: recording.values(name).double().mean(0) for name in modules}
        for name, module in modules.items():
            module.weight.data.zero_()
            module.bias = nn.Parameter(means[name].to(module.weight))
        return self.losses(model)

    def losses(self, model: nn.Module) -> dict[str, list[float]]:
        """The loss of each window, in nats per token."""
        return {
            name: [relinear.perplexity(model, Subset(windows, [i])).loss for i in range(len(windows))]
            for name, windows in self.held_out.items()
        }

    def fit(self, method: str, projection: str, seed: int, rate: float):
        """The model with fitted operators, and the report."""
        given = {key: getattr(self.options, key) for key in ("tokens", "epochs")}
        asked = {"seed": seed, "learning_rate": rate, "bias": True, "joint": projection == TOGETHER}
        asked |= {"init": "fresh"} if method in FRESH else {}
        pattern = r".*\.[qkv]_proj" if projection == TOGETHER else projection
        return fit(self.original, self.methods[method], pattern, [LAYER], self.texts, self.tokenizer, **given, **asked)

    def error(self, method: str, projection: str, rate: float) -> dict:
        """What a rate is chosen by: of the attention's output where all three were trained together."""
        found = self.fit(method, projection, TUNING_SEED, rate)[1].layers[0]
        return {"error": found.error if found.joint_error is None else found.joint_error}

    def run(self, method: str, projection: str, seed: int, rate: float) -> dict:
        """One fit, measured."""
        model, report = self.fit(method, projection, seed, rate)
        return {
            "rate": rate,
            "parameters": sum(found.parameters for found in report.layers),
            "errors": [found.error for found in report.layers],
            "joint_error": report.layers[0].joint_error,
            "losses": self.losses(model),
        }

    def waiting(self) -> list[tuple[str, Callable[[], dict]]]:
        """The measurements that are missing and could be made now."""
        pieces = [("original", partial(self.losses, self.original))]
        pieces += [(f"{CONSTANT} {p}", partial(self.constant, p)) for p in self.projections]
        for projection, method in itertools.product(self.projections, self.methods):
            names = {rate: f"rate {method} {projection} {rate}" for rate in RATES}
            tried = {rate: found["error"] for rate in RATES if (found := self.measured(names[rate]))}
            missing = [rate for rate in FIRST if rate not in tried]
            if not missing:
                best = min(tried, key=tried.__getitem__)
                at = RATES.index(best)
                missing = [rate for rate in RATES[max(0, at - 1) : at + 2] if rate not in tried]
            if missing:
                pieces += [(names[rate], partial(self.error, method, projection, rate)) for rate in missing]
                continue
            for seed in SEEDS:
                run = partial(self.run, method, projection, seed, best)
                pieces.append((f"{method} {projection} {seed}", run))
        return [(name, measure) for name, measure in pieces if not self.file(name).is_file()]


def summary(measured: Callable[[str], dict], projections: Sequence[str], methods: Sequence[str]) -> list[dict]:
    """A row for every method and projection: gaps to the original, to the constant and to other methods."""
    rows = []
    for projection, method in itertools.product(projections, (CONSTANT, *methods)):
        if not _ended(measured, method, projection):
            continue
        row = {"projection": projection, "method": method}
        if method != CONSTANT:
            fits = [measured(f"{method} {projection} {seed}") for seed in SEEDS]
            row |= {key: fits[0][key] for key in ("parameters", "rate")}
            row["edge"] = row["rate"] in (RATES[0], RATES[-1])
            row["errors"] = np.mean([found["errors"] for found in fits], 0).tolist()
            if projection == TOGETHER:
                row["joint_error"] = float(np.mean([found["joint_error"] for found in fits]))
        references = ["original", *(n for n in (CONSTANT, *REFERENCES) if _ended(measured, n, projection))]
        references = [name for name in references if name != method]
        of = {name: _losses(measured, name, projection) for name in (method, *references)}
        for text in ("wikitext2", "ptb"):
            values = {name: [np.array(losses[text]) for losses in seeds] for name, seeds in of.items()}
            row[text] = {name: gap(values[method], values[name]) for name in references}
        rows.append(row)
    return rows


def _ended(measured: Callable[[str], dict | None], method: str, projection: str) -> bool:
    """Whether all its runs are there."""
    names = [f"{method} {projection}"] if method == CONSTANT else [f"{method} {projection} {seed}" for seed in SEEDS]
    return all(measured(name) for name in names)


def _losses(measured: Callable[[str], dict], name: str, projection: str) -> list[dict]:
    """Of each seed; what has no seed is the same for all."""
    if name not in ("original", CONSTANT):
        return [measured(f"{name} {projection} {seed}")["losses"] for seed in SEEDS]
    return [measured(name if name == "original" else f"{name} {projection}")] * len(SEEDS)


def main() -> None:
    """Measure what is missing, with whoever else does; then sum up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--eval-tokens", type=int, default=51200)
    parser.add_argument("--fresh", action="store_true", help="rotors and low rank from fresh matrices, in q, k and v")
    parser.add_argument("--so-far", action="store_true", help="measure nothing; sum up what has all its seeds")
    parser.add_argument("--state", type=Path, default=Path("runs/rotor-biased"))
    options = parser.parse_args()
    relinear.system.allocator.tune_allocator()
    given = {key: getattr(options, key) for key in ("model", "tokens", "epochs", "eval_tokens")}
    begun = options.state / "options.json"
    if begun.is_file() and read_json(begun) != given:
        raise SystemExit(f"{options.state} has measurements with {read_json(begun)}; give these, or another --state")
    write_json(begun, given)
    work = Work(options)
    if not options.so_far:
        while waiting := work.waiting():
            name, measure = waiting[0]
            write_json(work.file(name), measure())
    original = {text: float(np.mean(losses)) for text, losses in work.measured("original").items()}
    head = {
        "command": f"python results/rotor/{command_line()}",
        "machine": describe_machine(),
        "layer": LAYER,
        "original": original,
    } | given
    rows = summary(work.measured, work.projections, list(work.methods))
    write_json(options.state / ("fresh.json" if options.fresh else "biased.json"), head | {"rows": rows})
    for row in rows:
        gaps = {
            text: {name: round(found["mean"], 4) for name, found in row[text].items()} for text in ("wikitext2", "ptb")
        }
        print(row["projection"], row["method"], gaps, sep="  ")


if __name__ == "__main__":
    main()
