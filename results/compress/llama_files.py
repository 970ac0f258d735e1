"""GGUF files of one size, ours and llama.cpp's own, read by llama.cpp: what each loses, and types and rounding apart.

    g++ -O2 -std=c++17 -I LLAMA/include -I LLAMA/ggml/include results/compress/llama_files.cpp -o llama_files \\
        BUILD/src/libllama.a BUILD/ggml/src/libggml{,-cpu,-base}.a -fopenmp -lpthread -ldl
    python results/compress/llama_files.py MODEL --program ./llama_files --calibrate TEXT TEXT --evaluate NAME=TEXT \\
        --types IQ4_XS Q4_0 Q5_0 --ours IQ4_XS Q4_0 Q5_0 --rounding Q4_0 --work runs/llama-files \\
        --out results/compress/judged.jsonl
    python results/compress/llama_files.py table results/compress/judged.jsonl

llama.cpp rounds the model to mixtures of its own, as ``llama-quantize`` does, with an importance matrix of the tokens
that calibrate ours. Ours are what ``relinear compress --for llama.cpp`` makes of the size of each. So that types and
rounding are known apart, llama.cpp rounds the model to the types that ours chose, too, and we to those of llama.cpp.
Files are judged as they are, tokenizer and all, beside the original in float32, by ``llama_files.cpp``, which is built
against libllama. Intervals are of 95 %, Student's t over windows, of differences where two files are compared.
Files that are in the directory already are not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import median

import numpy
import torch
from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
from torch import Tensor, nn

import relinear
from frontier import texts
from relinear.compression import CompressSettings, compress, export_gguf
from relinear.compression.corpus import read_corpus, read_elsewhere
from relinear.compression.inputs import linear_layers
from relinear.data.tokenizers import load_tokenizer
from relinear.system.confidence import half_width
from relinear.system.machine import provenance

#: llama.cpp's numbers of its mixtures
MIXTURES = {
    "F16": 1,
    "Q4_0": 2,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q3_K_M": 12,
    "Q4_K_M": 15,
    "Q5_K_M": 17,
    "IQ4_NL": 25,
    "IQ4_XS": 30,
}
#: mixtures that show how far numbers carry: the original in fewer bits, not for comparison
FLOOR = ("F16", "Q8_0")
#: a type of GGUF -> our operator
OPERATORS = {
    "Q4_0": "quantized:bits=4,group=32,symmetric=true",
    "Q4_1": "quantized:bits=4,group=32",
    "Q5_0": "quantized:bits=5,group=32,symmetric=true",
    "Q5_1": "quantized:bits=5,group=32",
    "Q8_0": "quantized:bits=8,group=32,symmetric=true",
    "IQ4_NL": "quantized:bits=4,group=32,symmetric=true,levels=iq4_nl",
    "Q3_K": "quantized:bits=3,group=16,symmetric=true,levels=k",
    "Q4_K": "quantized:bits=4,group=32,levels=k",
    "Q5_K": "quantized:bits=5,group=32,levels=k",
    "Q6_K": "quantized:bits=6,group=16,symmetric=true,levels=k",
}
TURNS = 7
BY = {
    "llama.cpp": "llama.cpp's types and rounding",
    "types": "our types, llama.cpp's rounding",
    "rounding": "llama.cpp's types, our rounding",
    "relinear": "our types and rounding",
}


@torch.no_grad()
def mean_squares(model: nn.Module, blocks: Tensor) -> dict[str, Tensor]:
    """Mean squares of the inputs of every linear layer, by its name in a GGUF file."""
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    sums: dict[str, Tensor] = {}

    def add(name: str, x: Tensor) -> None:
        sums[name] = sums.get(name, 0) + x.double().square().flatten(0, -2).sum(0)

    for name, layer in linear_layers(model).items():
        key = f"{names.get_name(name)}.weight"
        layer.register_forward_hook(lambda layer, args, output, key=key: add(key, args[0]))
    for ids in blocks.split(1):
        model(input_ids=ids, use_cache=False)
    return {name: (total / blocks.numel()).float() for name, total in sums.items()}


def types_of(path: Path) -> dict[str, tuple[str, int, int]]:
    """Name -> type, its number and the weights of each matrix of a GGUF file."""
    tensors = [tensor for tensor in GGUFReader(path).tensors if len(tensor.shape) > 1]
    return {one.name: (one.tensor_type.name, one.tensor_type.value, one.n_elements) for one in tensors}


def repeated(lines: str) -> float:
    """Share of the 4-grams of continuations that stood in the continuation before."""
    shares = []
    for ids in (line.split() for line in lines.splitlines()):
        runs = list(zip(*(ids[at:] for at in range(4)), strict=False))
        shares.append(1 - len(set(runs)) / len(runs))
    return sum(shares) / len(shares)


def judged(files: dict[str, Path], place: Path, window: int, program: Path, continued: int) -> list[dict]:
    """What llama.cpp finds of each file on the windows in ``place``, by window; the first is the original."""
    said = place.with_suffix(".judged")
    subprocess.run([program, "judge", str(window), place, said, *files.values()], check=True)
    found = numpy.fromfile(said, dtype=numpy.float32).reshape(-1, len(files), window - 1, 3).astype(numpy.float64)
    said.unlink()
    rows = []
    for at, path in enumerate(files.values()):
        loss, divergence, same = found[:, at].transpose(2, 0, 1)
        command = [program, "continue", str(window), place, str(continued), path]
        again = repeated(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        by_window = {"loss": loss.mean(1), "kl": divergence.mean(1), "kl_median": numpy.median(divergence, 1)}
        by_window |= {"kl_99": numpy.quantile(divergence, 0.99, axis=1), "same_token": same.mean(1)}
        rows.append({key: [round(float(one), 6) for one in values] for key, values in by_window.items()})
        rows[-1] |= {"repeated": round(again, 4)}
        print(
            place.stem, list(files)[at], {key: sum(rows[-1][key]) / len(loss) for key in by_window}, again, flush=True
        )
    return rows


def main() -> None:
    """Make files, then judge them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--calibrate", nargs="+", required=True, metavar="TEXT")
    parser.add_argument("--evaluate", nargs="+", required=True, metavar="NAME=TEXT")
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--types", nargs="+", required=True, help="mixtures of llama.cpp")
    parser.add_argument("--ours", nargs="*", default=[], help="those beside which ours of that size are judged")
    parser.add_argument("--rounding", nargs="*", default=[], help="those whose types we round, too")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--continued", type=int, default=24, help="windows whose beginnings are continued")
    parser.add_argument("--work", type=Path, required=True, help="directory of the files that are made")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    settings = CompressSettings(
        reader="llama.cpp", size=1.0, tokens=given.tokens, sequence_length=given.window, evaluate=False
    )
    tokenizer, corpora = load_tokenizer(given.model), {path: texts(path) for path in given.calibrate}
    original, matrix = given.work / "original.gguf", given.work / "matrix"
    if not matrix.exists():
        model = relinear.from_pretrained(given.model, dtype=torch.float32).eval()
        export_gguf(model, original, tokenizer=tokenizer)
        squares = mean_squares(model, read_corpus(corpora, tokenizer, settings, plan_only=False).blocks)
        with matrix.open("wb") as file:
            for name, values in squares.items():
                file.write(f"{name} {len(values)} ".encode() + values.numpy().tobytes())

    def quantize(path: Path, mixture: str, *types: Path) -> Path:
        if not path.exists():
            command = [given.program, "quantize", original, path, str(MIXTURES[mixture]), matrix, *types]
            subprocess.run(command, check=True)
        return path

    def ours(path: Path, size: int, plan: Path | None = None) -> Path:
        if not path.exists():
            model, asked = relinear.from_pretrained(given.model, dtype=torch.float32).eval(), f"{size}B"
            asked_for, work = settings.model_dump() | {"size": asked}, given.work / "relinear"
            compress(model, corpora, tokenizer=tokenizer, settings=asked_for, plan_file=plan, out_dir=work)
            (work / "model.gguf").rename(path)
            print(path, path.stat().st_size, "of", size, flush=True)
        return path

    rows = {("original", "F32"): original}
    for name in dict.fromkeys([*FLOOR, *given.types]):
        rows["llama.cpp", name] = quantize(given.work / f"{name}.gguf", name)
    for name in given.ours:
        path = ours(given.work / f"{name}-ours.gguf", rows["llama.cpp", name].stat().st_size)
        listed = given.work / f"{name}.types"
        listed.write_text("".join(f"{key} {number}\n" for key, (_, number, _) in types_of(path).items()))
        rows["relinear", name] = path
        rows["types", name] = quantize(given.work / f"{name}-types.gguf", "IQ4_NL", listed)
    for name in given.rounding:
        plan = json.loads((given.work / "relinear/plan.json").read_text(encoding="utf-8"))
        types, names = types_of(rows["llama.cpp", name]), get_tensor_name_map(MODEL_ARCH.LLAMA, len(plan["layers"]))
        for key, layer in plan["layers"].items():
            layer["operator"] = OPERATORS[types[f"{names.get_name(key)}.weight"][0]]
        (chosen := given.work / f"{name}.json").write_text(json.dumps(plan), encoding="utf-8")
        size = 2 * rows["llama.cpp", name].stat().st_size
        rows["rounding", name] = ours(given.work / f"{name}-rounding.gguf", size, chosen)
    command = [given.program, "speed", str(TURNS), *rows.values()]
    turns = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    speeds = list(zip(*([float(one) for one in line.split()] for line in turns.splitlines()), strict=True))
    found: dict[str, list[dict]] = {}
    others = {name: texts(path) for name, path in (one.split("=", 1) for one in given.evaluate)}
    evaluated = {"evaluate": True, "evaluation_tokens": given.windows * given.window}
    evaluation = CompressSettings(**(settings.model_dump() | evaluated))
    for text, ids in read_elsewhere(others, tokenizer, evaluation).items():
        place = given.work / f"{text}.ids"
        ids.numpy().astype(numpy.int32).tofile(place)
        files = {" ".join(key): path for key, path in rows.items()}
        found[text] = judged(files, place, given.window, given.program, given.continued)
    folder = Path(given.model)
    known = {"model": folder.parent.name if folder.name == "model" else folder.name}
    known |= {key: getattr(given, key) for key in ("tokens", "window", "windows", "continued")}
    known |= {"calibrated_on": [Path(path).parent.name for path in given.calibrate]}
    with given.out.open("a", encoding="utf-8") as file:
        for at, ((by, mixture), path) in enumerate(rows.items()):
            types = Counter[str]()
            for kind, _, count in types_of(path).values():
                types[kind] += count
            row = known | {"by": by, "at": mixture, "bytes": path.stat().st_size, "types": dict(types)}
            row |= {"tokens_per_second": speeds[at], "texts": {text: values[at] for text, values in found.items()}}
            file.write(json.dumps(row | provenance()) + "\n")


def shown(values: list[float], digits: int = 3, sign: str = "") -> str:
    """Mean and half the interval over windows."""
    return f"{sum(values) / len(values):{sign}.{digits}f} ± {half_width(values) or 0:.{digits}f}"


def minus(ours: list[float], theirs: list[float]) -> list[float]:
    """Paired differences."""
    return [a - b for a, b in zip(ours, theirs, strict=True)]


def table(path: str) -> None:
    """Print what files lose, and ours as shares of llama.cpp's of that size with the difference, paired by window."""
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    for model in dict.fromkeys(row["model"] for row in rows):
        of = {(row["by"], row["at"]): row for row in rows if row["model"] == model}
        base = of.pop(("original", "F32"))["texts"]
        said = (f"{text} {shown(here['loss'])}, {here['repeated']:.0%}" for text, here in base.items())
        print(f"\n{model}, original, nats and repeated 4-grams: {'; '.join(said)}\n")
        print("| size of | text | llama.cpp, nats | KL | ours, nats | KL | types alone, KL | rounding alone, KL |")
        print("| --- " * 8 + "|")
        for (by, at), row in of.items():
            for text, original in base.items() if by == "llama.cpp" else ():
                there, cells = row["texts"][text], [at, text]
                cells += [shown(minus(there["loss"], original["loss"]), 4, "+"), shown(there["kl"], 4)]
                for other in ("relinear", "types", "rounding"):
                    here = of.get((other, at), {}).get("texts", {}).get(text)
                    if other == "relinear":
                        more = f"{shown(minus(here['loss'], original['loss']), 4, '+')}" if here else ""
                        cells.append(more + f" ({shown(minus(here['loss'], there['loss']), 4, '+')})" if here else "")
                    share = sum(here["kl"]) / sum(there["kl"]) if here else 0
                    cells.append(f"{share:.2f} ({shown(minus(here['kl'], there['kl']), 4, '+')})" if here else "")
                print("| " + " | ".join(cells) + " |")
        print(f"\n| size of | file | bytes | tokens/s | KL median, {', '.join(base)} | 99 % | same token | repeated |")
        print("| --- " * 8 + "|")
        for (by, at), row in of.items():
            speeds = zip(row["tokens_per_second"], of["llama.cpp", at]["tokens_per_second"], strict=True)
            ratio, speed = median(a / b for a, b in speeds), median(row["tokens_per_second"])
            cells = [at, BY[by], f"{row['bytes']:,}", f"{speed:.0f}" + ("" if by == "llama.cpp" else f" ({ratio:.2f})")]
            here = row["texts"].values()
            for key, digits in (("kl_median", 4), ("kl_99", 3), ("same_token", 3)):
                cells.append("; ".join(shown(one[key], digits) for one in here))
            print("| " + " | ".join([*cells, "; ".join(f"{one['repeated']:.0%}" for one in here)]) + " |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["table"]:
        table(sys.argv[2])
    else:
        main()
