"""Compressing a pretrained model by the methods of the field and by ours, on the same parts: what each costs in nats.

    python results/compress/methods.py models/smollm2 --calibrate TEXT [TEXT ...] --evaluate NAME=TEXT [...] \\
        --keep 0.8 0.7 --out results/compress/methods.jsonl

Texts are files (txt, or parquet with a column text). Every method sees the same calibration tokens, half of each text
where two are given, and differs in what it is about only:

    random      random subspaces of the inputs of the same ranks: the floor
    plain       truncated SVD of the weight
    scaled      SVD after scaling inputs by their root mean square (ASVD with its exponent at 1)
    whitened    SVD after whitening inputs (SVD-LLM), the same share everywhere
    shared      the same, one basis for q, k, v, gate and up of each two neighbouring layers (Basis Sharing)
    two-sided   whitening of inputs and of output gradients, the same share everywhere
    allocated   the same, sizes chosen over the whole model, layers dense where that is cheaper
    pivoted     the same, and no parameter is spent on what a change of basis can make an identity: our default
    healed      the same, then trained to give the original's logits on --heal-tokens more of the texts, in turns
    int8, int4  round to nearest, per row and group of 64 inputs: not the same bytes, which are stated
    pivoted+int8, pivoted+int4, allocated+int8, allocated+int4: both, the factors rounded like weights

Losses are in nats per token over windows of 1,024, from a text's first token on; intervals of 95 % are Student's t, for
the paired difference to the original over windows; a text that ends in .jsonl is read as LAMBADA's (loss a last word, a
passage for each 100 tokens).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from torch import nn
from torch.utils.data import Dataset

import relinear
from relinear.compression import CompressSettings, compress
from relinear.compression.calibrate import Calibration
from relinear.compression.inputs import by_decoder_layer, linear_layers
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.contract.operator import dense_weight, linear_features
from relinear.data import DataSettings, iter_texts
from relinear.data.tokenizers import load_tokenizer
from relinear.distill.record import token_blocks
from relinear.evaluate import lambada, perplexity
from relinear.functional.low_rank import weighted_spectrum
from relinear.system.confidence import half_width
from relinear.system.machine import describe_machine
from saved_statistics import SavedStatistics

UNIFORM = ("random", "plain", "scaled", "whitened", "shared", "two-sided")
ROUNDED = {"int8": 8, "int4": 4}
#: methods that are settings of ``compress``
COMPRESSED = {
    "allocated": {"candidates": ("low_rank",)},
    "pivoted": {"candidates": ("pivoted_low_rank",)},
    "healed": {"candidates": ("pivoted_low_rank",)},
}
#: those with their factors rounded
BOTH = {f"{name}+{rounded}": (name, bits) for name in ("pivoted", "allocated") for rounded, bits in ROUNDED.items()}
METHODS = (*UNIFORM, *COMPRESSED, *ROUNDED, *BOTH)
#: the kinds of layers that share a basis with the next decoder layer's in Basis Sharing
SHARING = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
WINDOW = 1024
GROUP = 64


def texts(path: str):
    """Documents of a file."""
    return iter_texts(DataSettings(data=path), "all")


def moments_of(method: str, moments: CalibrationStatistics) -> CalibrationStatistics:
    """What a method of equal shares knows of the data."""
    size = len(moments.input_moment)
    if method == "scaled":
        return CalibrationStatistics(moments.input_moment.diagonal().diag())
    if method == "whitened":
        return CalibrationStatistics(moments.input_moment)
    return moments if method == "two-sided" else CalibrationStatistics.identity(size)


@torch.no_grad()
def uniform_(model: nn.Module, names: list[str], calibration: SavedStatistics, method: str, keep: float) -> None:
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
            operator.fit_to_calibration_(source, moments_of(method, calibration.moments(name)))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, operator)


def pairs_of(names: list[str]) -> list[list[str]]:
    """The layers that share a basis: a kind's first with its second, third with fourth; others stand alone."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(name.rpartition(".")[2], []).append(name)
    return [
        of_kind[i : i + size]
        for kind, of_kind in kinds.items()
        for size in (2 if kind in SHARING else 1,)
        for i in range(0, len(of_kind), size)
    ]


@torch.no_grad()
def shared_(model: nn.Module, names: list[str], calibration: SavedStatistics, keep: float) -> None:
    """Basis Sharing: one basis of the inputs for a group of layers, found on their joint inputs.

    The products are put into the layers themselves: the same function, which is what is measured.
    """
    for group in pairs_of(names):
        weights = [dense_weight(model.get_submodule(name)).double() for name in group]
        stacked = torch.cat(weights)
        outputs, inputs = stacked.shape
        rank = max(1, int(keep * inputs * outputs / (inputs + outputs)))
        joint = sum(calibration.moments(name).input_moment for name in group)
        down, up = weighted_spectrum(stacked, joint).factors(stacked, rank)
        parts = (up @ down).split([len(weight) for weight in weights])
        for name, weight in zip(group, parts, strict=True):
            model.get_submodule(name).weight.copy_(weight)


@torch.no_grad()
def round_(model: nn.Module, names: list[str], bits: int) -> None:
    """Symmetric round to nearest, a scale for every row and group of inputs, of all matrices of these layers."""
    for name in names:
        for weight in model.get_submodule(name).parameters():
            if weight.ndim < 2:
                continue
            padded = nn.functional.pad(weight, (0, -weight.shape[1] % GROUP))
            groups = padded.view(weight.shape[0], -1, GROUP)
            scale = (groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)).clamp_min(1e-12)
            weight.copy_(((groups / scale).round() * scale).view_as(padded)[:, : weight.shape[1]])


def windows_of(path: str, tokenizer, tokens: int) -> list:
    """What is evaluated, part by part: windows of token ids, or LAMBADA's passages, 20 at a time."""
    if path.endswith(".jsonl"):
        passages = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        return [passages[i : i + 20] for i in range(0, tokens // 100, 20)]
    return list(token_blocks(list(texts(path)), tokenizer, WINDOW, tokens // WINDOW))


def measured(model: nn.Module, tokenizer, parts: list) -> list[float]:
    """The loss on each part."""
    if isinstance(parts[0], list):
        return [math.log(lambada(model, tokenizer, part).perplexity) for part in parts]
    return [perplexity(model, OneWindow(part)).loss for part in parts]


class OneWindow(Dataset):
    """A dataset of one sample."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids, "labels": self.ids}


def paired(values: list[float], reference: list[float]) -> list[float]:
    """The mean difference and half the width of its interval of 95 %, over parts."""
    differences = [a - b for a, b in zip(values, reference, strict=True)]
    return [round(mean(differences), 4), round(half_width(differences), 4)]


def main() -> None:
    """Measure every method at every budget; rows are appended as they are measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--calibrate", nargs="+", required=True, metavar="TEXT")
    parser.add_argument("--evaluate", nargs="+", required=True, metavar="NAME=TEXT[@TOKENS]")
    parser.add_argument("--keep", nargs="+", type=float, default=[0.8, 0.7])
    parser.add_argument(
        "--methods", nargs="+", default=[*UNIFORM, *(m for m in COMPRESSED if m != "healed"), *ROUNDED, *BOTH]
    )
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--evaluation-tokens", type=int, default=20480)
    parser.add_argument("--heal-tokens", type=int, default=122880, help="that 'healed' trains on")
    parser.add_argument("--heal-rate", type=float, default=3e-5, help="the learning rate's peak in that")
    parser.add_argument("--skip", type=int, default=0, help="blocks of each text to leave out: another calibration")
    parser.add_argument("--state", type=Path, default=Path("runs/compress-methods"))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    tokenizer = load_tokenizer(given.model)
    settings = CompressSettings(tokens=given.tokens, evaluate=False)
    length, parts = settings.sequence_length, len(given.calibrate)
    each = given.tokens // length // parts
    healing = -(-given.heal_tokens // length // parts)
    read = [
        token_blocks(list(texts(t)), tokenizer, length, given.skip + each + healing * ("healed" in given.methods))
        for t in given.calibrate
    ]
    blocks = torch.cat([b[given.skip : given.skip + each] for b in read])
    further = torch.stack([b[given.skip + each :] for b in read], 1).flatten(0, 1)
    evaluated = {name: path for name, _, path in (text.partition("=") for text in given.evaluate)}
    sources = [Path(text).parent.name for text in given.calibrate]
    state = given.state / "-".join([*sources, f"skip-{given.skip}"])

    def fresh() -> nn.Module:
        return relinear.from_pretrained(given.model).eval()

    windows = {}
    for name, where in evaluated.items():
        path, _, tokens = where.partition("@")
        windows[name] = windows_of(path, tokenizer, int(tokens or given.evaluation_tokens))

    def row(method: str, keep: float | None, start: float, model: nn.Module, **more) -> None:
        seconds = time.monotonic() - start
        found = {name: measured(model, tokenizer, text) for name, text in windows.items()}
        line = {"method": method, "keep": keep, "skip": given.skip, "calibrated_on": sources}
        line |= {"seconds": round(seconds, 1), **more}
        line["loss"] = {name: mean(values) for name, values in found.items()}
        if method == "dense":
            dense.update(found)
        else:
            line["windows"] = {name: len(values) for name, values in found.items()}
            line["over_dense"] = {name: paired(values, dense[name]) for name, values in found.items()}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    dense: dict[str, list[float]] = {}
    model = fresh()
    row("dense", None, time.monotonic(), model, machine=describe_machine(), tokens=given.tokens)
    state.mkdir(parents=True, exist_ok=True)
    in_layers = by_decoder_layer(model, linear_layers(model))
    measured = Calibration(model, blocks, in_layers, state / "calibration", settings)
    calibration = SavedStatistics.of(measured, state / "moments")
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
                change = shared_ if method == "shared" else partial(uniform_, method=method)
                change(model, calibration.names, calibration, keep=keep)
                row(method, keep, start, model)
                continue
            base, bits = BOTH.get(method, (method, None))
            chosen = settings.replace(keep=keep, **COMPRESSED[base])
            ids, more = [blocks.flatten()], {}
            if method == "healed":
                healing = {"heal_tokens": given.heal_tokens, "heal_learning_rate": given.heal_rate}
                chosen, ids, more = chosen.replace(**healing), [*ids, further.flatten()], healing
            # healing's tokens make another corpus, of which other excerpts calibrate
            folder = state / f"{method}-{given.heal_tokens}" if method == "healed" else state
            report = compress(model, ids, settings=chosen, out_dir=folder)
            if bits is not None:
                round_(model, calibration.names, bits)
            row(
                method,
                keep,
                start,
                model,
                predicted=report.plan.nats,
                dense=len(calibration.names) - len(report.plan.replaced),
                **({} if bits is None else {"bits": bits + 16 / GROUP}),
                **more,
            )


if __name__ == "__main__":
    main()
