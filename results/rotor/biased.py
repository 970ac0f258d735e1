"""Projections of a layer of SmolLM2-135M replaced by operators whose biases start at the mean, against that mean alone.

    python results/rotor/biased.py --model models/smollm2 --data data

q, k and v of layer 12 one by one, and all three, trained together until the attention gives what it gave. Every method
has its own learning rate for each of the four: the one of the least fit error, on a seed of its own. Losses are over
windows of 256 tokens of WikiText-2 test and of PTB test, half of --eval-tokens each; intervals of 95 % over three
seeds (Student's t) and over windows (bootstrap), paired. Whatever has been measured stays in --state, from which the
same command goes on, several of them at a time, too; the last writes results/rotor/biased.json.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout
from smollm2 import HERE, TUNING_SEED, interleaved
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import relinear
from relinear.compare.gaps import gap
from relinear.data import DataSettings, iter_texts
from relinear.distill.record import record, token_blocks
from relinear.system.files import write_json
from relinear.system.machine import command_line, describe_machine

LAYER, LENGTH = 12, 256
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "(q|k|v)_proj")
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
#: rates that are tried in any case; further ones where the best is at an end
FIRST = (0.01, 0.03, 0.1)
SEEDS = (0, 1, 2)
CONSTANT = "constant"
METHODS = {
    CONSTANT: None,
    "low rank 1": relinear.LowRank(rank=1),
    "low rank 4": relinear.LowRank(rank=4),
    "rotor, double": relinear.Rotor(scale=True),
    "rotor, the authors' network": relinear.Rotor.authors(),
    "block-Hadamard, 64 blocks": relinear.BlockHadamard(blocks=64),
}
FITTED = [method for method in METHODS if method != CONSTANT]


class Work:
    """What is fitted and evaluated, and where it is kept."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.tokenizer = AutoTokenizer.from_pretrained(options.model)
        self.original = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
        self.texts = list(itertools.islice(interleaved(options.data), 12))  # more than enough
        windows = options.eval_tokens // 2 // LENGTH
        self.held_out = {
            name: token_blocks(
                iter_texts(DataSettings(data=str(options.data / name)), "test"), self.tokenizer, LENGTH, windows
            )
            for name in ("wikitext2", "ptb")
        }
        options.state.mkdir(parents=True, exist_ok=True)

    def kept(self, name: str, make) -> dict | None:
        """What ``make`` gives, from disk if it is there; None while another process is at it."""
        file = self.options.state / f"{name}.json"
        if not file.is_file():
            try:
                with FileLock(file.with_suffix(".lock"), timeout=0):
                    if not file.is_file():
                        write_json(file, make())
            except Timeout:
                return None
        return json.loads(file.read_text())

    def constant(self, projection: str) -> nn.Module:
        """The model with the mean output, over the tokens that methods are fitted on, in place of the projection."""
        model = copy.deepcopy(self.original)
        blocks = token_blocks(self.texts, self.tokenizer, LENGTH, self.options.tokens // LENGTH)
        letters = "qkv" if projection.startswith("(") else projection[0]
        names = [f"model.layers.{LAYER}.self_attn.{letter}_proj" for letter in letters]
        modules = {name: model.get_submodule(name) for name in names}
        with record(model, blocks, modules, batch=8, outputs=names) as recording:
            means = {name: recording.inputs(name).double().mean(0) for name in names}
        for name, mean in means.items():
            module = modules[name]
            module.weight.data.zero_()
            module.bias = nn.Parameter(mean.to(module.weight))
        return model

    def fit(self, method: str, projection: str, seed: int, rate: float):
        """The model with fitted operators, and the report."""
        model = copy.deepcopy(self.original)
        settings = {
            "tokens": self.options.tokens,
            "epochs": self.options.epochs,
            "seed": seed,
            "validation_tokens": 2048,
            "learning_rate": rate,
            "bias": True,
            "joint": projection.startswith("("),
        }
        found = relinear.distill_(
            model,
            {projection: METHODS[method]},
            self.texts,
            layers=[LAYER],
            tokenizer=self.tokenizer,
            settings=settings,
        )
        return model, found

    def error(self, report) -> float:
        """The error that a rate is chosen by: of the attention's output where all three were trained together."""
        joint = report.layers[0].joint_error
        return report.layers[0].error if joint is None else joint

    def losses(self, model: nn.Module) -> dict[str, list[float]]:
        """The loss of each window, in nats a token."""
        found = {}
        for name, blocks in self.held_out.items():
            values: list[float] = []
            with torch.inference_mode():
                for ids in blocks.split(8):
                    logits = model(input_ids=ids).logits[:, :-1].float()
                    each = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
                    values += each.mean(1).tolist()
            found[name] = values
        return found

    def rate(self, method: str, projection: str) -> float | None:
        """The best learning rate; None while another process is at one."""
        tried: dict[float, float] = {}
        wanted = set(FIRST)
        while wanted - set(tried):
            for rate in sorted(wanted - set(tried)):
                error = self.kept(
                    f"rate {method} {projection} {rate}",
                    lambda rate=rate: {"error": self.error(self.fit(method, projection, TUNING_SEED, rate)[1])},
                )
                if error is None:
                    return None
                tried[rate] = error["error"]
            best = RATES.index(min(tried, key=tried.__getitem__))
            wanted |= set(RATES[max(0, best - 1) : best + 2])
        return min(tried, key=tried.__getitem__)

    def run(self, method: str, projection: str, seed: int, rate: float) -> dict:
        """One fit, measured."""
        model, report = self.fit(method, projection, seed, rate)
        return {
            "parameters": sum(fit.parameters for fit in report.layers),
            "errors": [fit.error for fit in report.layers],
            "joint_error": report.layers[0].joint_error,
            "losses": self.losses(model),
        }

    def everything(self) -> dict[str, dict] | None:
        """All measurements by name; None where another process is still at some."""
        measured: dict[str, dict | None] = {"original": self.kept("original", lambda: self.losses(self.original))}
        for projection in PROJECTIONS:
            measured[f"{CONSTANT} {projection}"] = self.kept(
                f"{CONSTANT} {projection}", lambda projection=projection: self.losses(self.constant(projection))
            )
            for method in FITTED:
                rate = self.rate(method, projection)
                for seed in SEEDS:
                    name = f"{method} {projection} {seed}"
                    measured[name] = rate and self.kept(
                        name, lambda m=method, p=projection, s=seed, r=rate: self.run(m, p, s, r) | {"rate": r}
                    )
        return None if None in measured.values() else measured


def summary(measured: dict[str, dict]) -> list[dict]:
    """A row for every method and projection: gaps to the original, to the constant and to rank 1."""
    rows = []
    for projection, method in itertools.product(PROJECTIONS, METHODS):
        fits = [measured[f"{method} {projection} {seed}"] for seed in SEEDS] if method != CONSTANT else []
        row = {"projection": projection, "method": method}
        if fits:
            row |= {key: fits[0][key] for key in ("parameters", "rate")}
            row["errors"] = np.mean([fit["errors"] for fit in fits], 0).tolist()
            if fits[0]["joint_error"] is not None:
                row["joint_error"] = float(np.mean([fit["joint_error"] for fit in fits]))
        for text in ("wikitext2", "ptb"):

            def of(name: str, text: str = text, projection: str = projection) -> list[np.ndarray]:
                if name == "original":
                    return [np.array(measured["original"][text])] * len(SEEDS)
                if name == CONSTANT:
                    return [np.array(measured[f"{CONSTANT} {projection}"][text])] * len(SEEDS)
                return [np.array(measured[f"{name} {projection} {seed}"]["losses"][text]) for seed in SEEDS]

            references = [name for name in ("original", CONSTANT, "low rank 1") if name != method]
            row[text] = {name: gap(of(method), of(name)) for name in references}
        rows.append(row)
    return rows


def main() -> None:
    """Measure what is missing; sum up when nothing is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--eval-tokens", type=int, default=51200)
    parser.add_argument("--state", type=Path, default=Path("runs/rotor-biased"))
    options = parser.parse_args()
    relinear.tune_allocator()
    measured = Work(options).everything()
    if measured is None:
        print("another process is at the rest: the same command sums up once it has ended")
        return
    original = {text: float(np.mean(losses)) for text, losses in measured["original"].items()}
    given = {key: getattr(options, key) for key in ("tokens", "epochs", "eval_tokens")}
    head = {"command": command_line(), "machine": describe_machine(), "layer": LAYER, "original": original} | given
    write_json(HERE / "biased.json", head | {"rows": summary(measured)})


if __name__ == "__main__":
    main()
