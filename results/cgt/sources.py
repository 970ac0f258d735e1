"""Mixtures of texts of unlike sources: where y helps, by position, beside plain GPT-2s and the y of other texts.

    python results/cgt/sources.py run --name aux --seed 0 --source code=stdlib --source verse=FILE --source ...
    python results/cgt/sources.py figures --source code=stdlib --source verse=FILE --source ...

A source is what ``--data`` of relinear takes. Its texts are bytes in documents of --characters; every eighth is held
out, and all measurements are on these. ``gpt2`` is a plain GPT-2 as wide as the guided models, ``gpt2-equal`` one of
their parameters. Each name and seed is a run; ``figures`` holds them against each other (Figures 5, 6a, 13a and 14 of
the paper), with intervals over seeds and held-out documents.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import relinear
from cgt_study import contexts, plots
from cgt_study.baselines import plain_gpt2
from cgt_study.schedule import add_schedule, fit_settings, parse_options
from relinear.compare.gaps import gap
from relinear.core.modes import evaluating
from relinear.data.corpora import iter_texts
from relinear.data.settings import DataSettings
from relinear.data.tokenizers import encode_documents, load_tokenizer, vocabulary_size
from relinear.evaluate import KneserNey
from relinear.models.cgt.objective import GuidedTraining
from relinear.pages.drawn import save_figure
from relinear.system.files import write_json, write_text
from relinear.system.machine import describe_machine
from relinear.train import fit
from text import NAMES, make_config, make_mixture, make_objective

#: a plain GPT-2 as wide as the guided models, and one of their parameters
GPT2, GPT2_EQUAL = "gpt2", "gpt2-equal"
#: counting, the reference without training
NGRAM = "5-grams"
NAMES_AND_CONTROLS = (*NAMES, GPT2, GPT2_EQUAL)
#: places of the second part: the first four tokens, and on to where the sources have shown themselves anyhow
PLACES = {"1 to 4": slice(0, 4), "5 to 16": slice(4, 16), "17 to 48": slice(16, 48), "after 48": slice(48, None)}
#: what reads the second part, less the model whose y is computed on it
KINDS = {
    "specialized": "frozen",
    "shuffled": "frozen, of another source",
    "average": "moving average",
    "baseline": "none: `gpt2-equal`",
}
#: of the documents of a source, every so many-th is held out
_HELD_OUT = 8


def read_sources(options):
    """(training documents, held-out documents by source), token ids of ``--characters`` bytes each."""
    tokenizer = load_tokenizer("bytes")
    train, held_out = [], {}
    for text in options.source:
        name, _, data = text.partition("=")
        if not data:
            raise ValueError(f"--source {text!r}: write it as NAME=DATA, for instance code=stdlib")
        chunks = []
        for document in iter_texts(DataSettings(data=data, tokenizer="bytes")):
            starts = range(0, len(document) - options.characters + 1, options.characters)
            chunks += [document[start : start + options.characters] for start in starts]
            if len(chunks) >= options.documents:
                break
        ids = list(encode_documents(tokenizer, chunks[: options.documents]))
        held_out[name] = ids[::_HELD_OUT]
        train += [document for number, document in enumerate(ids) if number % _HELD_OUT]
    return tokenizer, train, held_out


def make_model(options, tokenizer):
    torch.manual_seed(options.seed)
    if options.name not in (GPT2, GPT2_EQUAL):
        return relinear.CGTForCausalLM(make_config(options, tokenizer))
    guided = make_config(argparse.Namespace(**vars(options) | {"name": "aux"}), tokenizer)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in relinear.CGTForCausalLM(guided).parameters())
    shared = ("vocab_size", "n_positions", "n_layer", "activation_function", "initializer_range")
    more = {name: getattr(guided, name) for name in shared} | {"bos_token_id": None, "eos_token_id": None}
    wanted = parameters if options.name == GPT2_EQUAL else None
    return plain_gpt2(options.width, options.heads, parameters=wanted, **more)


def run(options):
    torch.set_num_threads(options.threads)
    tokenizer, train, _ = read_sources(options)
    model = make_model(options, tokenizer)
    objective = None if options.name.startswith(GPT2) else make_objective(options)
    settings = fit_settings(options, log_every=20)
    began = time.time()
    trained = model if objective is None else GuidedTraining(model, objective)
    result = fit(trained, make_mixture(options, train), settings)
    name = f"{options.name}-{options.seed}"
    model.save_pretrained(options.out / "models" / name)
    write_json(
        options.out / f"{name}.json",
        {
            "name": options.name,
            "seed": options.seed,
            "curve": result.curve,
            "seconds": round(time.time() - began, 1),
            "parameters": sum(p.numel() for p in model.parameters()),
            "training_tokens_available": int(sum(map(len, train))),
            "objective": None if objective is None else dataclasses.asdict(objective),
            "settings": settings.model_dump(mode="json"),
            "model": model.config.to_diff_dict(),
            "options": {key: str(value) for key, value in vars(options).items()},
            "machine": describe_machine(),
        },
    )
    print(name, result.curve[-1], flush=True)


def blocks_of_texts(options, held_out):
    """Blocks of excerpts (texts, --length), a unit of the bootstrap each: --excerpts of one document of every source.

    Sources come in turn, so that the text before is always of another source.
    """
    generator = np.random.default_rng(0)
    for documents in zip(*held_out.values(), strict=False):
        texts = []
        for document in documents * options.excerpts:
            begin = int(generator.integers(0, len(document) - options.length + 1))
            texts.append(torch.from_numpy(document[begin : begin + options.length].astype(np.int64)))
        yield torch.stack(texts)


@torch.no_grad()
def losses_of(model, ids):
    """Loss at each token but the first, (B, T - 1)."""
    with evaluating(model):
        logits = model(ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].mT.float(), ids[:, 1:], reduction="none").numpy()


def measure(options, model, blocks):
    """(loss of whole texts by block (N,), by kind of y the losses of second parts, (N, places))."""
    whole = np.array([losses_of(model, ids).mean() for ids in blocks])
    cut = options.length // 2
    if not hasattr(model, "context"):
        return whole, {"baseline": np.stack([losses_of(model, ids[:, cut:]).mean(0) for ids in blocks])}
    rows = [contexts.losses_by_position(model, ids, cut, others=ids.roll(1, 0)[:, :cut]) for ids in blocks]
    return whole, {kind: np.stack([row[kind] for row in rows]) for kind in rows[0]}


def count(options, train, blocks, vocabulary):
    """Loss of whole texts by block (N,) of byte 5-grams with Kneser-Ney smoothing, counted in all training texts."""
    length = options.length
    pieces = [d[: len(d) // length * length].reshape(-1, length) for d in train]
    counted = KneserNey(np.concatenate(pieces), vocabulary, 5)
    return np.array([counted.losses(ids.numpy()).mean() for ids in blocks])


def apart(own, reference):
    """Mean, interval and values by seed of own - reference, lists over seeds of arrays by block."""
    found = gap(own, reference)
    return {key: found[key] for key in ("mean", "low", "high", "values")}


def figures(options):
    torch.set_num_threads(options.threads)
    tokenizer, train, held_out = read_sources(options)
    blocks = list(blocks_of_texts(options, held_out))
    classes = np.arange(sum(map(len, blocks))) % len(held_out)
    whole, second, report = {}, {}, {}
    for name in NAMES_AND_CONTROLS:
        folders = sorted((options.out / "models").glob(f"{name}-[0-9]*"))
        for folder in folders:
            kind = AutoModelForCausalLM if name.startswith(GPT2) else relinear.CGTForCausalLM
            model = kind.from_pretrained(folder).eval()
            texts, parts = measure(options, model, blocks)
            whole.setdefault(name, []).append(texts)
            second.setdefault(name, []).append(parts)
            entry = report.setdefault(name, {"parameters": sum(p.numel() for p in model.parameters()), "seeds": 0})
            entry["seeds"] += 1
            if not name.startswith(GPT2):
                vectors = np.concatenate([contexts.document_context(model, ids).numpy() for ids in blocks])
                entry.setdefault("clusters", []).append(contexts.clustering_scores(vectors, classes))
    whole[NGRAM] = [count(options, train, blocks, vocabulary_size(tokenizer))]
    report[NGRAM] = {}
    for name, losses in whole.items():
        report[name]["loss"] = float(np.mean(losses))
        if name != GPT2_EQUAL and GPT2_EQUAL in whole:
            others = whole[GPT2_EQUAL]
            pairs = list(zip(losses * len(others) if name == NGRAM else losses, others, strict=False))
            report[name]["minus_gpt2_equal"] = apart([own for own, _ in pairs], [other for _, other in pairs])
    for name in (name for name in second if not name.startswith(GPT2)):
        seeds = [own | plain for own, plain in zip(second[name], second.get(GPT2_EQUAL, second[name]), strict=False)]
        dynamic = [parts["dynamic"] for parts in seeds]
        report[name]["minus_dynamic"] = {
            kind: {
                place: apart([p[kind][:, at].mean(1) for p in seeds], [d[:, at].mean(1) for d in dynamic])
                for place, at in PLACES.items()
            }
            for kind in KINDS
            if kind in seeds[0]
        }
        curves = {kind: np.mean([parts[kind].mean(0) for parts in seeds], 0) for kind in seeds[0]}
        save_figure(plots.position_figure(curves, width=4), options.out / f"{name}-positions")
    write_json(options.out / "report.json", report)
    write_text(options.out / "table.md", tables(report))
    print(tables(report), json.dumps(report, indent=1))


def tables(report):
    """The report as two tables in markdown: whole texts (Figure 5), and second parts by place (Figures 6a, 13a, 14)."""

    def shown(found):
        if found is None or found["low"] is None:  # one seed
            return "" if found is None else f"{found['mean']:+.4f}"
        return f"{found['mean']:+.4f} ({found['low']:+.4f} to {found['high']:+.4f})"

    lines = [
        "| model | parameters | seeds | loss, nats a byte | minus `gpt2-equal` | nearest neighbour of y (chance) |",
        "|" + " --- |" * 6,
    ]
    for name, entry in report.items():
        parameters, seeds = (f"{entry[key]:,}" if key in entry else "" for key in ("parameters", "seeds"))
        scores = entry.get("clusters", [])
        near = f"{np.mean([s['neighbours'] for s in scores]):.0%} ({scores[0]['chance']:.0%})" if scores else ""
        gained = shown(entry.get("minus_gpt2_equal"))
        lines.append(f"| `{name}` | {parameters} | {seeds} | {entry['loss']:.4f} | {gained} | {near} |")
    lines += ["", "| model | y | " + " | ".join(PLACES) + " |", "|" + " --- |" * (len(PLACES) + 2)]
    for name, entry in report.items():
        for kind, places in entry.get("minus_dynamic", {}).items():
            label, cells = KINDS[kind], " | ".join(shown(places[place]) for place in PLACES)
            lines.append(f"| `{name}` | {label} | {cells} |")
    return "\n".join(lines) + "\n"


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "figures"))
    parser.add_argument("--name", choices=NAMES_AND_CONTROLS, default="aux")
    parser.add_argument("--source", action="append", required=True, metavar="NAME=DATA", help="repeat it")
    parser.add_argument("--out", type=Path, default=Path("results/cgt/sources"))
    parser.add_argument("--characters", type=int, default=2_000, help="of a document")
    parser.add_argument("--documents", type=int, default=500, help="of a source, held-out ones among them")
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--start", type=int, help="first place of the joint; 2 / 5 of the length by default")
    parser.add_argument("--finish", type=int, help="last place of the joint; 7 / 10 of the length by default")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context-layer", type=int, default=3)
    parser.add_argument("--context-size", type=int, default=48)
    parser.add_argument("--context-heads", type=int, default=3)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--templates", type=int, default=16)
    parser.add_argument("--eta", type=float, default=0.5)
    parser.add_argument("--continuity", type=float, default=0.08, help="w_C (0.04 or 0.08 in the paper)")
    parser.add_argument("--initializer-range", type=float, default=0.02)
    add_schedule(parser, steps=1200, batch_size=16, min_lr_ratio=0.1, weight_decay=0.01, beta2=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--excerpts", type=int, default=8, help="of each held-out document, for the measurements")
    # what the script of authors lets its user choose, and this one does not
    parser.set_defaults(single=False, own_splits=True, kl=0.1, kernel_nu=0.1, horizon=None, decorrelation=None)
    return parse_options(parser, {}, arguments)


def main():
    options = parse()
    {"run": run, "figures": figures}[options.what](options)


if __name__ == "__main__":
    main()
