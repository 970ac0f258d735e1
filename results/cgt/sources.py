"""Mixtures of texts of unlike sources: where y helps, by position, beside plain GPT-2s and the y of other texts.

    python results/cgt/sources.py run --name aux --seed 0 --source code=stdlib --source verse=FILE --source ...
    python results/cgt/sources.py figures --source code=stdlib --source verse=FILE --source ...
    python results/cgt/sources.py plan --out results/cgt/sources-planned

A source is what ``--data`` of relinear takes. Its texts are bytes in documents of --characters; every eighth is held
out, and all measurements are on these. ``gpt2`` is a plain GPT-2 as wide as the guided models, ``gpt2-equal`` one of
their parameters. Each name and seed is a run; ``figures`` holds them against each other (Figures 5, 6a, 13a and 14 of
the paper), with intervals over seeds and held-out documents.

``plan`` carries out ``results/plans/cgt.yaml``: every arm is tuned over its grid, judged on other documents than the
final ones, then trained with each seed. It may be started several times at once and again: each process takes runs
that are not there yet.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import torch

import relinear
from cgt_study import contexts, planned, plots
from cgt_study.baselines import plain_gpt2
from cgt_study.schedule import add_schedule, fit_settings, parse_options
from relinear.compare.gaps import gap
from relinear.compare.settings import read_plan
from relinear.contract.modes import evaluating
from relinear.data.corpora import iter_texts
from relinear.data.settings import DataSettings
from relinear.data.tokenizers import encode_documents, load_tokenizer, vocabulary_size
from relinear.evaluate import KneserNey
from relinear.models.cgt.objective import GuidedTraining
from relinear.pages.matplotlib_figures import save_figure
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
#: of the documents of a source, every so many-th is held out; for tuning those halfway between, too
_HELD_OUT = 8
_PLAN = Path(__file__).resolve().parents[1] / "plans" / "cgt.yaml"
#: the arm of a plan that is measured on the models of others
_SHUFFLED = "shuffled"


def read_sources(options, tuning=False):
    """(training documents, held-out documents by source), token ids of ``--characters`` bytes each."""
    tokenizer = load_tokenizer("bytes")
    judged = _HELD_OUT // 2 if tuning else 0
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
        held_out[name] = ids[judged::_HELD_OUT]
        train += [document for number, document in enumerate(ids) if number % _HELD_OUT not in (0, judged)]
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


def run(options, path=None, tuning=False):
    """Train and measure a model; its record is ``path``, which for ``tuning`` has the loss of whole texts alone."""
    torch.set_num_threads(options.threads)
    tokenizer, train, held_out = read_sources(options, tuning)
    model = make_model(options, tokenizer)
    objective = None if options.name.startswith(GPT2) else make_objective(options)
    settings = fit_settings(options, log_every=20)
    began = time.time()
    result = fit(
        model if objective is None else GuidedTraining(model, objective), make_mixture(options, train), settings
    )
    record = {
        "name": options.name,
        "seed": options.seed,
        "curve": result.curve,
        "seconds": round(time.time() - began, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_tokens_available": int(sum(map(len, train))),
        "objective": None if objective is None else dataclasses.asdict(objective),
        "settings": settings.model_dump(mode="json"),
        "model": model.config.to_diff_dict(),
        "options": {key: str(value) for key, value in vars(options).items() if key != "plan"},
        "machine": describe_machine(),
    }
    model = model.cpu().eval()
    blocks = list(blocks_of_texts(options, held_out))
    if tuning:
        record["loss"] = float(np.mean([losses_of(model, ids).mean() for ids in blocks[:: options.every]]))
    else:
        record["measured"] = measure(options, model, blocks, len(held_out))
    write_json(path or options.out / f"{options.name}-{options.seed}.json", record)
    print(options.name, options.seed, result.curve[-1], record.get("loss", ""), flush=True)


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


def measure(options, model, blocks, sources):
    """Losses of whole texts by block, of second parts by kind of y, place and block; what y tells apart.

    Of a model without y the second part is read as it is.
    """
    found = {"whole": [float(losses_of(model, ids).mean()) for ids in blocks]}
    cut = options.length // 2
    if hasattr(model, "context"):
        rows = [contexts.losses_by_position(model, ids, cut, others=ids.roll(1, 0)[:, :cut]) for ids in blocks]
        vectors = np.concatenate([contexts.document_context(model, ids).numpy() for ids in blocks])
        found["clusters"] = contexts.clustering_scores(vectors, np.arange(len(vectors)) % sources)
    else:
        rows = [{"baseline": losses_of(model, ids[:, cut:]).mean(0)} for ids in blocks]
    found["second"] = {
        kind: {place: [float(row[kind][at].mean()) for row in rows] for place, at in PLACES.items()} for kind in rows[0]
    }
    found["curves"] = {kind: np.mean([row[kind] for row in rows], 0).round(5).tolist() for kind in rows[0]}
    return found


def count(options, train, blocks, vocabulary):
    """Loss of whole texts by block (N,) of byte 5-grams with Kneser-Ney smoothing, counted in all training texts."""
    length = options.length
    pieces = [d[: len(d) // length * length].reshape(-1, length) for d in train]
    counted = KneserNey(np.concatenate(pieces), vocabulary, 5)
    return np.array([counted.losses(ids.numpy()).mean() for ids in blocks])


def apart(own, reference):
    """Mean, interval and values by seed of own - reference, lists over seeds of arrays by block."""
    found = gap(own, reference)
    return {key: found[key] for key in ("mean", "low", "high", "values", "standard_error")}


def figures(options):
    torch.set_num_threads(options.threads)
    tokenizer, train, held_out = read_sources(options)
    whole, second, report = {}, {}, {}
    for name in NAMES_AND_CONTROLS:
        records = [json.loads(path.read_text()) for path in sorted(options.out.glob(f"{name}-[0-9]*.json"))]
        records = [record for record in records if "measured" in record]
        if not records:
            continue
        seen = [record["measured"] for record in records]
        whole[name] = [np.array(one["whole"]) for one in seen]
        second[name] = [one["second"] for one in seen]
        report[name] = {"parameters": records[0]["parameters"], "seeds": len(records)}
        if not name.startswith(GPT2):
            report[name]["clusters"] = [one["clusters"] for one in seen]
            curves = {kind: np.mean([one["curves"][kind] for one in seen], 0) for kind in seen[0]["curves"]}
            save_figure(plots.position_figure(curves, width=4), options.out / f"{name}-positions")
    blocks = list(blocks_of_texts(options, held_out))
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
        report[name]["minus_dynamic"] = {
            kind: {
                place: apart([np.array(p[kind][place]) for p in seeds], [np.array(p["dynamic"][place]) for p in seeds])
                for place in PLACES
            }
            for kind in KINDS
            if kind in seeds[0]
        }
    write_json(options.out / "report.json", report)
    write_text(options.out / "table.md", tables(report))
    print(tables(report), json.dumps(report, indent=1))


def carry_out(options):
    """Run what is left of a plan; the last process draws the figures."""
    study = read_plan(options.plan).study
    options = argparse.Namespace(**vars(options) | {"source": study.settings["sources"]})
    planned.carry_out(
        study,
        [arm for arm in study.arms if arm != _SHUFFLED],
        options.out,
        lambda given, path, tuning: run(argparse.Namespace(**vars(options) | given), path, tuning),
        lambda: figures(options),
    )


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
    parser.add_argument("what", choices=("run", "figures", "plan"))
    parser.add_argument("--name", choices=NAMES_AND_CONTROLS, default="aux")
    parser.add_argument("--source", action="append", default=[], metavar="NAME=DATA", help="repeat it")
    parser.add_argument("--plan", type=Path, default=_PLAN, help="what ``plan`` carries out")
    parser.add_argument("--out", type=Path, default=Path("runs/cgt/sources"))
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
    parser.add_argument("--every", type=int, default=4, help="block of excerpts that tuning is judged on")
    # what the script of authors lets its user choose, and this one does not
    parser.set_defaults(single=False, own_splits=True, kl=0.1, kernel_nu=0.1, horizon=None, decorrelation=None)
    return parse_options(parser, {}, arguments)


def main():
    options = parse()
    {"run": run, "figures": figures, "plan": carry_out}[options.what](options)


if __name__ == "__main__":
    main()
