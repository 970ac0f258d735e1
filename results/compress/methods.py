"""Compressing a pretrained model by the methods of the field and by ours, on the same parts: what each costs in nats.

    python results/compress/methods.py models/smollm2 --calibrate TEXT [TEXT ...] --evaluate NAME=TEXT [...] \\
        --keep 0.8 0.7 --out results/compress/methods.jsonl

Texts are files (txt, or parquet with a column text). Every method sees the same calibration tokens, half of each text
where two are given, and differs in what it is about only:

    random      random subspaces of the inputs of the same ranks: the floor
    plain       truncated SVD of the weight
    scaled      SVD after scaling inputs by their root mean square (ASVD with its exponent at 1)
    whitened    SVD after whitening inputs (SVD-LLM), the same share everywhere
    two-sided   whitening of inputs and of output gradients, the same share everywhere
    allocated   the same, sizes chosen over the whole model, layers dense where that is cheaper
    in-order    the same sizes, fitted from the first layer to the last on what the compressed model feeds them
    int8, int4  round to nearest, per row and group of 64 inputs: not the same bytes, which are stated
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

import relinear
from relinear.compress import CompressSettings, compress
from relinear.compress.calibrate import Calibration
from relinear.core.moments import Moments
from relinear.core.operator import dense_weight, linear_features
from relinear.data import DataSettings, iter_texts
from relinear.data.tokenizers import load_tokenizer
from relinear.distill.record import token_blocks
from relinear.evaluate import perplexity
from relinear.system.machine import describe_machine

UNIFORM = ("random", "plain", "scaled", "whitened", "two-sided")
ROUNDED = {"int8": 8, "int4": 4}
GROUP = 64


def texts(path: str):
    """Documents of a file."""
    return iter_texts(DataSettings(data=path), "all")


def moments_of(method: str, moments: Moments) -> Moments:
    """What a method of equal shares knows of the data."""
    size = len(moments.inputs)
    if method == "scaled":
        return Moments(moments.inputs.diagonal().diag())
    if method == "whitened":
        return Moments(moments.inputs)
    return moments if method == "two-sided" else Moments.identity(size)


@torch.no_grad()
def uniform_(model: nn.Module, names: list[str], calibration: Calibration, method: str, keep: float) -> None:
    """Every layer by a low-rank one of ``keep`` of its parameters."""
    for name in names:
        source = model.get_submodule(name)
        inputs, outputs = linear_features(source)
        rank = max(1, int(keep * inputs * outputs / (inputs + outputs)))
        operator = relinear.LowRank(rank=rank).convert(source)
        if method == "random":
            basis = torch.linalg.qr(torch.randn(inputs, rank, dtype=torch.float64)).Q
            operator.set_factors_(basis.T, dense_weight(source).double() @ basis)
            operator.copy_bias_(source)
        else:
            operator.from_moments(source, moments_of(method, calibration.moments(name)))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, operator)


@torch.no_grad()
def round_(model: nn.Module, names: list[str], bits: int) -> None:
    """Symmetric round to nearest, a scale for every row and group of inputs."""
    for name in names:
        weight = model.get_submodule(name).weight
        groups = weight.view(weight.shape[0], -1, GROUP)
        scale = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
        weight.copy_(((groups / scale).round() * scale).view_as(weight))


def main() -> None:
    """Measure every method at every budget; rows are appended as they are measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--calibrate", nargs="+", required=True, metavar="TEXT")
    parser.add_argument("--evaluate", nargs="+", required=True, metavar="NAME=TEXT")
    parser.add_argument("--keep", nargs="+", type=float, default=[0.8, 0.7])
    parser.add_argument("--methods", nargs="+", default=[*UNIFORM, "allocated", "in-order", *ROUNDED])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--evaluation-tokens", type=int, default=20480)
    parser.add_argument("--skip", type=int, default=0, help="documents of each text to leave out: another calibration")
    parser.add_argument("--state", type=Path, default=Path("runs/compress-methods"))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    tokenizer = load_tokenizer(given.model)
    settings = CompressSettings(tokens=given.tokens)
    each = given.tokens // settings.sequence_length // len(given.calibrate)
    blocks = torch.cat(
        [token_blocks(list(texts(t))[given.skip :], tokenizer, settings.sequence_length, each) for t in given.calibrate]
    )
    evaluated = {name: path for name, _, path in (text.partition("=") for text in given.evaluate)}
    state = given.state / f"skip-{given.skip}"

    def fresh() -> nn.Module:
        return relinear.from_pretrained(given.model).eval()

    def losses(model: nn.Module) -> dict[str, float]:
        return {
            name: perplexity(
                model, texts(path), tokenizer, sequence_length=1024, max_tokens=given.evaluation_tokens
            ).loss
            for name, path in evaluated.items()
        }

    def row(method: str, keep: float | None, start: float, model: nn.Module, **more) -> None:
        found = losses(model)
        line = {
            "method": method,
            "keep": keep,
            "skip": given.skip,
            "loss": found,
            "over_dense": {name: found[name] - dense[name] for name in found},
            "seconds": round(time.monotonic() - start, 1),
            **more,
        }
        given.out.parent.mkdir(parents=True, exist_ok=True)
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    model = fresh()
    dense = losses(model)
    row("dense", None, time.monotonic(), model, machine=describe_machine(), tokens=given.tokens)
    compress(model, [blocks.flatten()], settings=settings, out_dir=state, plan_only=True)
    calibration = Calibration(state / "calibration")
    for method in given.methods:
        start = time.monotonic()
        if method in ROUNDED:
            model = fresh()
            round_(model, calibration.names, ROUNDED[method])
            row(method, None, start, model, bits=ROUNDED[method] + 16 / GROUP)
            continue
        for keep in given.keep:
            start, model = time.monotonic(), fresh()
            torch.manual_seed(0)
            if method in UNIFORM:
                uniform_(model, calibration.names, calibration, method, keep)
                row(method, keep, start, model)
                continue
            chosen = settings.updated(keep=keep, anchor=method == "in-order")
            report = compress(model, [blocks.flatten()], settings=chosen, out_dir=state)
            row(
                method,
                keep,
                start,
                model,
                predicted=report.plan.nats,
                dense=len(calibration.names) - len(report.plan.replaced),
            )


if __name__ == "__main__":
    main()
