"""One projection of one layer of SmolLM2-135M replaced by each operator: fit errors, perplexities, LAMBADA.

    python results/rotor/smollm2.py --model models/smollm2 --data data --tune
    python results/rotor/smollm2.py --model models/smollm2 --data data --layers 12

The first finds every method's learning rate: the one of the least fit error on q of layer 12, with a seed of its own.
Rows go to smollm2.jsonl in --out as they are measured (a row that is there is not measured again), the table to
smollm2.md and the screen; those of --tune to smollm2_rates.jsonl. Without rates in --out, those of results/rotor hold.
--data is a folder with books/, wikitext2/, ptb/ and lambada/.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import relinear
from relinear.data import DataSettings, iter_texts
from relinear.system.machine import describe_machine

HERE = Path(__file__).resolve().parent
RATES_FILE = "smollm2_rates.jsonl"
RATES = (0.01, 0.03, 0.1, 0.3)
TUNING_SEED = 1000
METHODS = {
    "low rank 1": relinear.LowRank(rank=1),
    "rotor, double": relinear.Rotor(scale=True),
    "block-Hadamard, 64 blocks": relinear.BlockHadamard(blocks=64),
    "low rank 4": relinear.LowRank(rank=4),
    "rotor, single": relinear.Rotor(rotors="single", scale=True),
    "Lemma-1 terms, depth 0, 3 terms": relinear.Rotor(depth=0, terms="multivector"),
    "HDPL, rank 8, 8 blocks": relinear.HDPL(rank=8, blocks=8),
}


def interleaved(data: Path):
    """WikiText-2 validation first, then books: so that both are in the tokens that are read."""
    wiki = iter_texts(DataSettings(data=str(data / "wikitext2")), "validation")
    books = iter_texts(DataSettings(data=str(data / "books")), "train")
    head = list(itertools.islice(wiki, 400))
    for book in itertools.islice(books, 40):
        yield from head[:100]
        head = head[100:]
        yield book[:20000]


def evaluate(model, tokenizer, data: Path, tokens: int, examples: int) -> dict:
    """Log-perplexity of the first tokens of two test sets at context 256, and LAMBADA accuracy."""
    result = {}
    for name, folder in (("wikitext2", "wikitext2"), ("ptb", "ptb")):
        text = iter_texts(DataSettings(data=str(data / folder)), "test")
        found = relinear.perplexity(model, text, tokenizer, sequence_length=256, max_tokens=tokens, batch_size=8)
        result[name] = found.loss
    file = next((data / "lambada").glob("*.jsonl"))
    result["lambada"] = relinear.evaluate.lambada(model, tokenizer, file, max_examples=examples, batch_size=16).accuracy
    return result


def read_rows(file: Path) -> list[dict]:
    """Lines of JSON; none where there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def append_row(file: Path, row: dict) -> None:
    """One more line, also on the screen."""
    with file.open("a") as lines:
        lines.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def fit(original, config, projection: str, layers: list[int], texts: list[str], tokenizer, **settings):
    """A copy of the model with a projection of some layers replaced, and the report of its distillation."""
    model = copy.deepcopy(original)
    settings = {"validation_tokens": 2048} | settings
    report = relinear.distill_(
        model, {projection: config}, texts, layers=layers, tokenizer=tokenizer, settings=settings
    )
    return model, report


def tune(fitted, file: Path) -> None:
    """The fit error of every method at every rate, on q of layer 12."""
    done = {(row["method"], row["learning_rate"]) for row in read_rows(file)}
    for method, rate in itertools.product(METHODS, RATES):
        if (method, rate) not in done:
            _, report = fitted(method, "q_proj", [12], TUNING_SEED, rate)
            append_row(file, {"method": method, "learning_rate": rate, "error": report.layers[0].error})


def table(rows: list[dict]) -> str:
    """Markdown."""
    lines = [
        "| projection | layers | method | seed | parameters | fit error | WikiText-2 | PTB | LAMBADA |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        error = "" if r["error"] is None else f"{r['error']:.3f}"
        figures = f"{r['wikitext2']:.4f} | {r['ptb']:.4f} | {r['lambada']:.3f}"
        head = f"{r['projection']} | {r['layers']} | {r['method']} | {r['seed']} | {r['parameters']:,}"
        lines.append(f"| {head} | {error} | {figures} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--layers", default="12", help="such as 12 or 11,12,13: replaced together")
    parser.add_argument("--projections", default="q_proj,k_proj,v_proj")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--eval-tokens", type=int, default=4096)
    parser.add_argument("--lambada", type=int, default=40)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tune", action="store_true", help="find the learning rates, and nothing else")
    parser.add_argument("--out", type=Path, default=Path("runs/rotor"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    relinear.system.allocator.tune_allocator()
    tokenizer = AutoTokenizer.from_pretrained(options.model)

    original = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()

    texts = list(itertools.islice(interleaved(options.data), 12))  # more than enough for the tokens that are recorded

    def fitted(method: str, projection: str, layers: list[int], seed: int, rate: float):
        settings = {"tokens": options.tokens, "epochs": options.epochs, "seed": seed, "learning_rate": rate}
        return fit(original, METHODS[method], projection, layers, texts, tokenizer, **settings)

    if options.tune:
        tune(fitted, options.out / RATES_FILE)
        return
    tried = read_rows(options.out / RATES_FILE) or read_rows(HERE / RATES_FILE)
    errors = {(row["error"], row["method"], row["learning_rate"]) for row in tried}
    rates = {method: rate for _, method, rate in sorted(errors, reverse=True)}
    missing = [method for method in METHODS if method not in rates]
    if missing:
        parser.error(f"no learning rate for {', '.join(missing)}: run with --tune first")
    log = options.out / "smollm2.jsonl"
    rows = read_rows(log)
    key = ("projection", "layers", "method", "seed")
    done = {tuple(row[k] for k in key) for row in rows}

    def add(row: dict) -> None:
        rows.append(row)
        append_row(log, row)

    def judged(model) -> dict:
        return evaluate(model, tokenizer, options.data, options.eval_tokens, options.lambada)

    budget = {name: getattr(options, name) for name in ("tokens", "epochs", "eval_tokens", "dtype")}
    budget["lambada_examples"] = options.lambada
    if ("none", "none", "original", 0) not in done:
        head = {"projection": "none", "layers": "none", "method": "original", "seed": 0}
        add(head | {"parameters": 0, "error": None} | judged(original) | budget | {"machine": describe_machine()})
    layers = [int(part) for part in options.layers.split(",")]
    combinations = itertools.product(map(int, options.seeds.split(",")), METHODS, options.projections.split(","))
    for seed, method, projection in combinations:
        head = {"projection": projection, "layers": options.layers, "method": method, "seed": seed}
        if tuple(head[k] for k in key) in done:
            continue
        started = time.perf_counter()
        model, report = fitted(method, projection, layers, seed, rates[method])
        found = {
            "parameters": sum(fit.parameters for fit in report.layers),
            "error": sum(fit.error for fit in report.layers) / len(report.layers),
            "fit_seconds": time.perf_counter() - started,
            "learning_rate": rates[method],
        }
        add(head | found | judged(model) | budget)
    (options.out / "smollm2.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
