"""Rounding and ranks at equal bytes: what a pretrained model loses by each, and what it then writes.

    python results/compress/frontier.py models/smollm2 --calibrate TEXT [TEXT ...] --evaluate NAME=TEXT [...] \\
        --out results/compress/frontier.jsonl

Texts are files (txt, in documents where it has headings as WikiText has, or parquet). All rows see the same calibration
and are judged on the same windows, spread over each text. Integers have a zero point for each group, of 64 inputs or as
many as a row says ("@48"); scales and zero points are counted.

    nearest     every layer rounded to nearest, on grids that are clipped to the least squared error
    minmax, absmax, hqq, awq    to nearest as others do it, in rivals.py
    llama.cpp   what llama.cpp's own programs made of the model: a type, "llama.cpp:Q4_K_M"; by llama_quants.py
    caldera     integers of E8 plus a low-rank correction in four bits, by caldera.py: "caldera:2.5" is two bits for the
                integers and a half for the correction
    gptq        GPTQ: every layer rounded under the second moment of its inputs in the original, all to the same bits
    gptq-order  the same from the first decoder layer to the last, on the inputs that the rounded model has
    uniform-order  as gptq-order, each layer rounded as uniform rounds it
    uniform     our rounding, under the moments of inputs and output gradients, all layers to the same bits
    bits        bits (or ranks) chosen for each layer by 0.5 tr(G D A D^T) under one price: ``compress --bits``
    bits-order  the same bits, of integers alone, rounded as gptq-order rounds
    integers    the same from bits alone, without ranks
    heal        as bits, then scales are trained towards the original's logits: bits and tokens, "heal:3.5@65536"
    keep        ``compress --keep``: pivoted low rank
    embedding   embedding and head alone in so many bits, symmetric, as ``compress`` stores them beside such layers
    everything  all linear layers and the embedding in so many bits, to nearest, as README.md's example has it

Losses are in nats per token; intervals of 95 % are Student's t, paired over windows.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

import relinear
from caldera import FACTOR_BITS, caldera
from relinear.compression import CompressSettings, compress
from relinear.compression.budget import stored_bytes
from relinear.compression.calibrate import Calibration
from relinear.compression.corpus import read_corpus, read_elsewhere
from relinear.compression.evaluation import Predictions, evaluate
from relinear.compression.inputs import by_decoder_layer, linear_layers
from relinear.compression.layerwise import LayerByLayer
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.contract.operator import Operator, dense_weight, linear_features
from relinear.data import DataSettings, iter_texts
from relinear.data.tokenizers import load_tokenizer
from relinear.evaluate import lambada
from relinear.functional.rounding import Grid, gptq, round_to_nearest
from relinear.hf.half_precision import round_to_half_
from relinear.surgery.summary import module_parameters
from relinear.system.machine import describe_machine
from rivals import GRIDS, clipped, scale_inputs_, take_gguf_
from saved_statistics import SavedStatistics

#: methods that have embedding and head in integers, too
ENDS = ("embedding", "everything")
#: rows that need no moments, or whose command finds its own
ALONE = ("llama.cpp", "bits", "integers", "keep")
ROWS = ("bits:4.25", "gptq:4@96", "uniform:4@96", "nearest:4@96", "bits:3.5", "gptq:3@48", "gptq-order:4@96")


def texts(path: str) -> list[str]:
    """Documents of a file."""
    found = list(iter_texts(DataSettings(data=path), "all"))
    return [part for text in found for part in re.split(r"(?m)^(?= = [^=].* = $)", text) if part.strip()]


@torch.no_grad()
def rounded(
    source: nn.Module, config: relinear.Quantized, moments: CalibrationStatistics | None, own: bool
) -> nn.Module:
    """A layer of ``config``: to nearest, by GPTQ under the moments of inputs alone, or as relinear rounds."""
    operator = config.convert(source)
    if moments is None:
        return operator.fit_to_linear_(source)
    if own:
        return operator.fit_to_calibration_(source, moments)
    weight = dense_weight(source).detach().float()
    grid = config.grid(weight, moments)
    return taken(operator, source, grid, gptq(weight, grid, config.group, moments.input_moment))


@torch.no_grad()
def on_grid(source: nn.Module, config: relinear.Quantized, grid: Grid) -> nn.Module:
    """A layer of ``config``, to nearest on ``grid``."""
    weight = dense_weight(source).detach()
    return taken(config.convert(source), source, grid, round_to_nearest(weight, grid, config.group))


def taken(operator: Operator, source: nn.Module, grid: Grid, codes: Tensor) -> nn.Module:
    """The operator with these codes on this grid, and the source's bias."""
    operator._store_(grid, codes)
    operator.copy_bias_(source)
    return operator


def put_(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Replace a layer by its name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


def round_(model: nn.Module, calibration: SavedStatistics, config: relinear.Quantized, method: str) -> None:
    """Every layer to the same bits, under what the original feeds it."""
    for name in calibration.names:
        moments = None if method == "nearest" else calibration.moments(name)
        put_(model, name, rounded(model.get_submodule(name), config, moments, method == "uniform"))


@torch.no_grad()
def correct_(model: nn.Module, calibration: SavedStatistics, bits: float) -> dict[str, float]:
    """Every layer by CALDERA, of so many bits per weight; the sizes that this takes, which the matrices do not show."""
    torch.manual_seed(0)
    whole, stored, weights = int(bits), 0.0, 0
    for name in calibration.names:
        layer = model.get_submodule(name)
        outputs, inputs = layer.weight.shape
        rank = int((bits - whole) * inputs * outputs / FACTOR_BITS / (inputs + outputs))
        layer.weight.copy_(caldera(layer.weight, calibration.moments(name).input_moment, whole, rank))
        weights += inputs * outputs
        stored += whole * inputs * outputs + FACTOR_BITS * rank * (inputs + outputs)
    return {"bits": stored / weights, "bytes": stored_bytes(model) - 2 * weights + stored / 8}


@torch.no_grad()
def round_in_order_(
    model: nn.Module,
    configs: Mapping[str, relinear.Quantized],
    blocks: Tensor,
    calibration: SavedStatistics | None = None,
) -> None:
    """Decoder layer by decoder layer, under what the model feeds each whose earlier layers are rounded.

    By GPTQ, or, under a calibration's moments of output gradients, as relinear rounds.
    """
    layers = LayerByLayer(model)
    states = [layers.embed(ids) for ids in blocks.split(4)]
    for index, layer in enumerate(layers.layers):
        inside = {id(module) for module in layer.modules()}
        own = {name: module for name in configs if id(module := model.get_submodule(name)) in inside}
        seen = dict.fromkeys(own, 0.0)

        def watch(name: str, module: nn.Module, seen=seen):
            def add(_, given) -> None:
                rows = given[0].flatten(0, -2)
                seen[name] = seen[name] + (rows.T @ rows).double()

            return module.register_forward_pre_hook(add)

        handles = [watch(name, module) for name, module in own.items()]
        for state in states:
            layers.layer(index, state)
        for handle in handles:
            handle.remove()
        for name, module in own.items():
            outputs = None if calibration is None else calibration.moments(name).gradient_moment
            moments = CalibrationStatistics(seen[name] / blocks.numel(), outputs)
            put_(model, name, rounded(module, configs[name], moments, calibration is not None))
        states = [layers.layer(index, state) for state in states]


def sizes(model: nn.Module, names: list[str]) -> dict[str, float]:
    """Bits per weight of the layers, and bytes of the model, both at no more than half precision."""
    layers = [model.get_submodule(name) for name in names]
    weights = sum(inputs * outputs for inputs, outputs in map(linear_features, layers))
    return {"bits": 8 * sum(map(stored_bytes, layers)) / weights, "bytes": stored_bytes(model)}


def main() -> None:
    """Measure every row; rows are appended as they are measured, and those that are there are left out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--calibrate", nargs="+", required=True, metavar="TEXT")
    parser.add_argument("--evaluate", nargs="+", required=True, metavar="NAME=TEXT")
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="METHOD:NUMBER")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0, help="of the excerpts that calibrate")
    parser.add_argument("--windows", type=int, default=30)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--passages", type=int, default=50, help="continued greedily to see repetition")
    parser.add_argument("--lambada", type=Path, help="file of passages, of which 500 are judged by their last words")
    parser.add_argument("--gguf", type=Path, metavar="DIR", help="llama_quants.py's files, for rows of llama.cpp")
    parser.add_argument("--state", type=Path, default=Path("runs/compress-frontier"))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    tokenizer = load_tokenizer(given.model)
    judging = CompressSettings(sequence_length=given.window, evaluation_tokens=given.windows * given.window)
    named = {name: texts(path) for name, _, path in (text.partition("=") for text in given.evaluate)}
    windows = read_elsewhere(named, tokenizer, judging)
    corpora = {Path(path).parent.name: texts(path) for path in given.calibrate}
    state = given.state / Path(given.model).name / f"seed-{given.seed}"
    base = {"tokens": given.tokens, "seed": given.seed, "evaluate": False, "self_sampled": False}
    layers_alone = {"tokenizer": tokenizer, "exclude": ("embed_tokens", "lm_head")}  # rows count neither

    def seen(model: nn.Module) -> tuple[dict[str, Predictions], dict[str, float | None]]:
        first, *others = windows
        found = evaluate(model, windows[first], elsewhere={n: windows[n] for n in others}, passages=given.passages)
        words = (
            {}
            if given.lambada is None
            else {"lambada": lambada(model, tokenizer, given.lambada, max_examples=500).accuracy}
        )
        return {first: found.predictions, **found.elsewhere}, {"repeated": found.repeated, **words}

    def write(values: dict) -> None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        print(json.dumps(values), flush=True)

    def fresh() -> nn.Module:
        return relinear.from_pretrained(given.model).eval()

    model, settings = fresh(), CompressSettings(**base)
    corpus = read_corpus(corpora, tokenizer, settings, plan_only=True)
    blocks = corpus.blocks
    state.mkdir(parents=True, exist_ok=True)
    layers = linear_layers(model)
    unseen = all(row.partition(":")[0] in (*GRIDS, *ENDS, *ALONE) for row in given.rows)
    calibration = None
    if not unseen:
        in_layers, folder = by_decoder_layer(model, layers), state / "calibration"
        measured = Calibration(model, blocks, in_layers, folder, settings, corpus.kinds)
        calibration = SavedStatistics.of(measured, state / "moments")
    names = list(layers)
    written = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    about = {"model": Path(given.model).name, "seed": given.seed}
    done = {row["row"] for row in written if about.items() <= row.items()}
    about |= {"windows": given.windows, "window": given.window, "tokens": given.tokens}
    kept = state / f"original-{'-'.join(windows)}-{given.windows}x{given.window}.pt"
    if "original" in done and kept.is_file():
        original = {name: Predictions(*tensors) for name, tensors in torch.load(kept).items()}
    else:
        original, written_text = seen(model)
        torch.save({name: (reading.losses, reading.likeliest) for name, reading in original.items()}, kept)
    if "original" not in done:
        losses = {name: reading.loss for name, reading in original.items()}
        first = {"row": "original", **about, **sizes(model, names), "parameters": module_parameters(model)}
        first |= {"loss": losses, **written_text}
        write(first | {"calibrated_on": list(corpora), "machine": describe_machine()})
    for row in given.rows:
        if row in done:
            continue
        method, _, number = row.partition(":")
        start, model, predicted, file = time.monotonic(), fresh(), None, {}
        if method in ("nearest", "gptq", "gptq-order", "uniform", "uniform-order", "awq", *GRIDS):
            bits, _, group = number.partition("@")
            config = relinear.Quantized(bits=int(bits), group=int(group or 64), symmetric=method == "absmax")
            if method in ("gptq-order", "uniform-order"):
                weighed = calibration if method == "uniform-order" else None
                round_in_order_(model, dict.fromkeys(names, config), blocks, weighed)
            elif method == "awq" or method in GRIDS:
                weights = scale_inputs_(model, calibration, config, blocks) if method == "awq" else {}
                for name, layer in [(name, model.get_submodule(name)) for name in names]:
                    weight = dense_weight(layer).detach()
                    grid = clipped(weight, config, weights[name]) if weights else GRIDS[method](weight, config)
                    put_(model, name, on_grid(layer, config, grid))
            else:
                round_(model, calibration, config, method)
            round_to_half_(model)
        elif method in ENDS:
            config = relinear.Quantized(bits=int(number), symmetric=method == "embedding")
            first, last = model.get_input_embeddings(), model.get_output_embeddings()
            ends = [first] if last.weight is first.weight else [first, last]  # a tied head stays tied
            found = [name for name, module in model.named_modules() if module in ends]
            found += ["all-linear"] if method == "everything" else []
            relinear.replace_(model, dict.fromkeys(found, config), init="from_weight")
            round_to_half_(model)
        elif method == "caldera":
            round_to_half_(model)
            file = correct_(model, calibration, float(number))
        elif method == "llama.cpp":
            round_to_half_(model)
            file = take_gguf_(model, names, given.gguf / f"{number}.gguf")
        elif method == "bits-order":
            settings = base | {"bits": float(number), "candidates": ("quantized",)}
            plan = compress(model, corpora, **layers_alone, settings=settings, plan_only=True, out_dir=state).plan
            predicted = plan.nats
            round_in_order_(model, plan.replaced, blocks)
            round_to_half_(model)
        else:
            size, _, healed = number.partition("@")
            budget = {"keep": float(size)} if method == "keep" else {"bits": float(size)}
            budget |= {"heal_tokens": int(healed)} if healed else {}
            settings = base | budget
            settings |= {"candidates": ("quantized",)} if method == "integers" else {}
            predicted = compress(model, corpora, **layers_alone, settings=settings, out_dir=state).plan.nats
        seconds = time.monotonic() - start
        found, again = seen(model)
        values = {"row": row, **about, **sizes(model, names), "seconds": round(seconds, 1), "predicted": predicted}
        values |= file | {"losses": {name: [round(x, 4) for x in found[name].losses.tolist()] for name in windows}}
        write(values | again | {"against": {name: found[name].compared_with(original[name]) for name in windows}})


if __name__ == "__main__":
    main()
