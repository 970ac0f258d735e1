"""Rounding and ranks at equal bytes: what a pretrained model loses by each, and what it then writes.

    python results/compress/frontier.py models/smollm2 --calibrate TEXT [TEXT ...] --evaluate NAME=TEXT [...] \\
        --out results/compress/frontier.jsonl

Texts are files (txt, or parquet with a column text). All rows see the same calibration and are judged on the same
windows, spread over each text. Integers are in groups of 64 with a zero point; scales and zero points are counted.

    nearest     every layer rounded to nearest, on grids that are clipped to the least squared error
    gptq        every layer rounded under the second moment of its inputs, all to the same bits
    bits        bits (or ranks) chosen for each layer by 0.5 tr(G D A D^T) under one price: ``compress --bits``
    integers    the same from bits alone, without ranks
    in-order    as bits, fitted from the first layer to the last on what the compressed model feeds them
    keep        ``compress --keep``: pivoted low rank

Losses are in nats a token; intervals of 95 % are Student's t, paired over windows.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from torch import nn

import relinear
from relinear.compress import CompressSettings, compress
from relinear.compress.beside import Reading, observe
from relinear.compress.budget import stored_bytes
from relinear.compress.calibrate import Calibration
from relinear.compress.corpus import read_elsewhere
from relinear.compress.half import round_to_half_
from relinear.core.operator import linear_features
from relinear.data import DataSettings, iter_texts
from relinear.data.tokenizers import load_tokenizer
from relinear.surgery.summary import module_parameters
from relinear.system.machine import describe_machine

ROWS = ("nearest:4", "gptq:4", "bits:4.25", "bits:3.5", "bits:3.0", "keep:0.8", "in-order:4.25", "nearest:3", "gptq:3")


def texts(path: str):
    """Documents of a file."""
    return iter_texts(DataSettings(data=path), "all")


def rounded_(model: nn.Module, names: list[str], bits: int, calibration: Calibration | None) -> None:
    """Every layer to the same bits: to nearest, or under the moments of its inputs."""
    for name in names:
        source = model.get_submodule(name)
        operator = relinear.Quantized(bits=bits).convert(source)
        if calibration is None:
            operator.from_linear(source)
        else:
            operator.from_moments(source, calibration.moments(name))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, operator)


def sizes(model: nn.Module, names: list[str]) -> dict[str, float]:
    """Bits a weight of the layers, and bytes of the model, both at no more than half precision."""
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
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--state", type=Path, default=Path("runs/compress-frontier"))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    tokenizer = load_tokenizer(given.model)
    judging = CompressSettings(sequence_length=given.window, evaluation_tokens=given.windows * given.window)
    named = {name: texts(path) for name, _, path in (text.partition("=") for text in given.evaluate)}
    windows = read_elsewhere(named, tokenizer, judging)
    corpora = {Path(path).parent.name: list(texts(path)) for path in given.calibrate}
    state = given.state / f"seed-{given.seed}"
    base = {"tokens": given.tokens, "seed": given.seed, "evaluate": False}

    def seen(model: nn.Module) -> tuple[dict[str, Reading], float | None]:
        first, *others = windows
        found = observe(model, windows[first], tokenizer, elsewhere={n: windows[n] for n in others}, passages=50)
        return {first: found.reading, **found.elsewhere}, found.repeated

    def write(values: dict) -> None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        print(json.dumps(values), flush=True)

    def fresh() -> nn.Module:
        return relinear.from_pretrained(given.model).eval()

    model = fresh()
    compress(model, corpora, tokenizer=tokenizer, settings=base | {"bits": 4.25}, plan_only=True, out_dir=state)
    calibration = Calibration(state / "calibration")
    names = calibration.names
    original, repeated = seen(model)
    written = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    done = {(row["row"], row["seed"]) for row in written}
    about = {"seed": given.seed, "windows": given.windows, "window": given.window, "tokens": given.tokens}
    if ("original", given.seed) not in done:
        losses = {name: reading.loss for name, reading in original.items()}
        first = {"row": "original", **about, **sizes(model, names), "parameters": module_parameters(model)}
        first |= {"loss": losses, "repeated": repeated}
        write(first | {"calibrated_on": list(corpora), "machine": describe_machine()})
    for row in given.rows:
        if (row, given.seed) in done:
            continue
        method, _, number = row.partition(":")
        start, model, predicted = time.monotonic(), fresh(), None
        if method in ("nearest", "gptq"):
            rounded_(model, names, int(number), calibration if method == "gptq" else None)
            round_to_half_(model)
        else:
            budget = {"keep": float(number), "allow_slower": True} if method == "keep" else {"bits": float(number)}
            settings = base | budget | {"anchor": method == "in-order"}
            settings |= {"menu": ("quantized",)} if method == "integers" else {}
            predicted = compress(model, corpora, tokenizer=tokenizer, settings=settings, out_dir=state).plan.nats
        seconds = time.monotonic() - start
        found, again = seen(model)
        values = {"row": row, **about, **sizes(model, names), "seconds": round(seconds, 1), "predicted": predicted}
        write(values | {"repeated": again, "against": {name: found[name].against(original[name]) for name in windows}})


if __name__ == "__main__":
    main()
