"""Mixtures of two texts: what y knows about a text, where knowing the first part helps, and whether authors cluster.

    python results/cgt/text.py run --name aux+reg --books BOOKS --out results/cgt/text
    python results/cgt/text.py figures --books BOOKS --out results/cgt/text

BOOKS is a parquet file with the columns ``author`` and ``text``. Of each author with at least --per-author books, the
last --held-out ones are kept out of training; all measurements are on them. ``--paper`` starts from the paper's sizes,
joints, weights and schedule (Section 4.4, Appendix B.2), and the other options change that.
"""

import argparse
import collections
import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import torch

import relinear
from cgt_study import contexts, plots
from cgt_study.schedule import add_schedule, fit_settings, parse_options
from cgt_study.tasks import TextMixture
from relinear.data.tokenizers import load_tokenizer, train_bpe, vocabulary_size
from relinear.models.cgt.objective import CGTObjective, GuidedTraining
from relinear.pages.matplotlib_figures import save_figure
from relinear.system.files import write_json, write_text
from relinear.system.machine import describe_machine
from relinear.train import fit

#: which terms of the loss a model has; those of the VAE form with beta_y in their name are Figures 18 to 20
NAMES = {
    "no-aux": (),
    "reg": ("regularisers",),
    "aux": ("auxiliary",),
    "aux+reg": ("auxiliary", "regularisers"),
    "vae": ("auxiliary", "kl"),
    "vae-1": ("auxiliary", "kl"),
    "vae-3": ("auxiliary", "kl"),
    "vae-10": ("auxiliary", "kl"),
}
#: what ``--paper`` sets; w_C as in Appendix B.2.2 (Section 4.4 has half of it), heads, rank and templates are not given
PAPER_SETTINGS = {
    "vocabulary": 8000,
    "length": 512,
    "start": 256,
    "finish": 384,
    "layers": 12,
    "width": 128,
    "heads": 8,
    "context_layer": 8,
    "context_size": 128,
    "context_heads": 8,
    "own_splits": True,
}


def make_objective(options):
    terms = NAMES[options.name]
    weights = {}
    if "regularisers" in terms:
        half = options.continuity / 2
        weights["continuity"] = options.continuity
        weights["decorrelation"] = half if options.decorrelation is None else options.decorrelation
    if "kl" in terms:
        weights["kl"] = float(options.name.partition("-")[2] or options.kl)
    return CGTObjective(
        eta=options.eta if "auxiliary" in terms else 1.0,
        shared_split=not options.own_splits,
        horizon=options.horizon,
        kernel_nu=options.kernel_nu,
        **weights,
    )


def read_books(options):
    """(training texts, held-out texts by author), each text the first --characters after its front matter."""
    from datasets import load_dataset

    books = load_dataset("parquet", data_files=str(options.books), split="train")
    by_author = collections.defaultdict(list)
    for author, text in zip(books["author"], books["text"]):
        if len(text) > 4000 + options.characters:
            by_author[author].append(text[4000 : 4000 + options.characters])
    train, held_out = [], {}
    for author, texts in sorted(by_author.items()):
        keep = options.held_out if len(texts) >= options.per_author else 0
        train += texts[: len(texts) - keep]
        if keep:
            held_out[author] = texts[len(texts) - keep :]
    return train, held_out


def prepare(options):
    train, held_out = read_books(options)
    folder = options.out / "models" / "tokenizer"
    if not folder.is_dir():
        train_bpe(train, options.vocabulary, sum(map(len, train))).save_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))

    def encode(texts):
        return [np.asarray(ids, dtype=np.int64) for ids in tokenizer(texts)["input_ids"]]

    return tokenizer, encode(train), {author: encode(texts) for author, texts in held_out.items()}


def make_mixture(options, documents):
    return TextMixture(
        documents,
        length=options.length,
        start=2 * options.length // 5 if options.start is None else options.start,
        finish=7 * options.length // 10 if options.finish is None else options.finish,
        mixed=not options.single,
        size=options.steps * options.batch_size,
        seed=options.seed,
    )


def make_config(options, tokenizer):
    variational = "kl" in NAMES[options.name]
    return relinear.CGTConfig(
        vocab_size=vocabulary_size(tokenizer),
        n_positions=options.length,
        n_embd=options.width,
        n_head=options.heads,
        n_layer=options.layers,
        context_layer=options.context_layer,
        context_size=options.context_size,
        context_heads=options.context_heads,
        rank=options.rank,
        templates=options.templates,
        initializer_range=options.initializer_range,
        variational=variational,
        context_norm=not variational,
        activation_function="gelu_pytorch_tanh",
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )


def run(options):
    torch.set_num_threads(options.threads)
    tokenizer, train, _ = prepare(options)
    mixture = make_mixture(options, train)
    torch.manual_seed(options.seed)
    config = make_config(options, tokenizer)
    model = relinear.CGTForCausalLM(config)
    objective = make_objective(options)
    settings = fit_settings(options, log_every=20)
    began = time.time()
    result = fit(GuidedTraining(model, objective), mixture, settings)
    model.save_pretrained(options.out / "models" / options.name)
    write_json(
        options.out / f"{options.name}.json",
        {
            "name": options.name,
            "curve": result.curve,
            "seconds": round(time.time() - began, 1),
            "parameters": sum(p.numel() for p in model.parameters()),
            "training_tokens_available": int(sum(map(len, train))),
            "objective": dataclasses.asdict(objective),
            "settings": settings.model_dump(mode="json"),
            "model": config.to_diff_dict(),
            "options": {key: str(value) for key, value in vars(options).items()},
            "machine": describe_machine(),
        },
    )
    print(options.name, result.curve[-1], flush=True)


def excerpts(documents, length, count, seed):
    """``count`` excerpts of ``length`` tokens, (count, length), drawn from the documents in turn."""
    generator = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        document = documents[number % len(documents)]
        begin = int(generator.integers(0, len(document) - length + 1))
        rows.append(torch.from_numpy(document[begin : begin + length]))
    return torch.stack(rows)


def figures(options):
    torch.set_num_threads(options.threads)
    tokenizer, _, held_out = prepare(options)
    authors = list(held_out)
    documents = [document for texts in held_out.values() for document in texts]
    names = [name for name in NAMES if (options.out / "models" / name).is_dir()]
    models = {name: relinear.CGTForCausalLM.from_pretrained(options.out / "models" / name).eval() for name in names}
    joined = TextMixture(documents, length=options.length, start=options.length // 2, finish=options.length // 2)
    text, cut, sources = joined.sample(3)
    per_author = options.excerpts
    reading = {a: excerpts(texts, options.length, per_author, 1) for a, texts in held_out.items()}
    classes = np.repeat(np.arange(len(authors)), per_author)
    report, maps, spectra = {}, {}, {}
    for name, model in models.items():
        ids = excerpts(documents, options.length, options.samples, 0)
        losses = contexts.losses_by_position(model, ids, options.length // 3)
        vectors = np.concatenate([contexts.document_context(model, reading[a]).numpy() for a in authors])
        y = model.context(text[None])[0].numpy()
        maps[name] = contexts.dot_products(model.context(text[None]))
        spectra[name] = contexts.spectrum(model.context(ids))
        centres = torch.from_numpy(vectors).view(len(authors), per_author, -1).mean(1)
        shifts = contexts.token_shifts(model, reading[authors[0]][:8], centres[0], centres[-1], 15)
        report[name] = {
            "loss": {key: float(values.mean()) for key, values in losses.items()},
            "first_16": {key: float(values[:16].mean()) for key, values in losses.items()},
            "clusters": contexts.clustering_scores(vectors, classes),
            "rising_tokens": {
                "from": authors[0],
                "to": authors[-1],
                "tokens": [[tokenizer.decode([token]), round(value, 3)] for token, value in shifts],
            },
        }
        save_figure(plots.position_figure(losses), options.out / f"{name}-positions")
        save_figure(plots.context_figure(y, [cut]), options.out / f"{name}-context")
        scores = report[name]["clusters"]
        title = f"{name}: y of held-out excerpts, silhouette {scores['silhouette']:.2f}, nearest neighbour of the same "
        title += f"author {scores['neighbours']:.0%} (chance {scores['chance']:.0%})"
        points = contexts.embed_2d(vectors)
        save_figure(plots.clusters_figure(points, classes, authors, title), options.out / f"{name}-authors")
    save_figure(plots.dot_product_figure(maps, [cut]), options.out / "dot-products")
    save_figure(plots.spectrum_figure(spectra), options.out / "spectra")
    write_json(options.out / "report.json", report | {"joined_documents": list(sources), "joined_at": cut})
    lines = [
        "| model | dynamic | frozen | moving average | silhouette | nearest neighbour (chance) |",
        "|" + " --- |" * 6,
    ]
    for name in names:
        loss, scores = report[name]["loss"], report[name]["clusters"]
        lines.append(
            f"| {name} | {loss['dynamic']:.3f} | {loss['specialized']:.3f} | {loss['average']:.3f} | "
            f"{scores['silhouette']:.3f} | {scores['neighbours']:.1%} ({scores['chance']:.1%}) |"
        )
    write_text(options.out / "table.md", "\n".join(lines) + "\n")
    print("\n".join(lines), json.dumps(report, indent=1))


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "run", "figures"))
    parser.add_argument("--name", choices=list(NAMES), default="aux+reg")
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/cgt/text"))
    parser.add_argument("--characters", type=int, default=40_000, help="of each book")
    parser.add_argument("--per-author", type=int, default=6)
    parser.add_argument("--held-out", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--length", type=int, default=160)
    parser.add_argument("--start", type=int, help="first place of the joint; 2 / 5 of the length by default")
    parser.add_argument("--finish", type=int, help="last place of the joint; 7 / 10 of the length by default")
    parser.add_argument("--single", action="store_true", help="single excerpts in place of mixtures (Figure 15)")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context-layer", type=int, default=4)
    parser.add_argument("--context-size", type=int, default=48)
    parser.add_argument("--context-heads", type=int, default=3)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--templates", type=int, default=16)
    parser.add_argument("--eta", type=float, default=0.5)
    parser.add_argument("--continuity", type=float, default=0.08, help="w_C (0.04 or 0.08 in the paper)")
    parser.add_argument("--decorrelation", type=float, help="w_D; half of w_C by default, as in the paper")
    parser.add_argument("--kl", type=float, default=0.1, help="beta_y, of the name vae")
    parser.add_argument("--kernel-nu", type=float, default=0.1, help="nu of the prior of y (0.1 on texts in the paper)")
    parser.add_argument("--horizon", type=int, help="Delta of the auxiliary loss")
    parser.add_argument("--own-splits", action="store_true", help="y frozen at another place in each sequence")
    parser.add_argument("--initializer-range", type=float, default=0.02)
    add_schedule(parser, steps=700, batch_size=16, min_lr_ratio=0.1, weight_decay=0.01, beta2=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument("--excerpts", type=int, default=24, help="of each author, for the clusters")
    return parse_options(parser, PAPER_SETTINGS, arguments)


def main():
    options = parse()
    if options.what == "prepare":
        _, train, held_out = prepare(options)
        print(sum(map(len, train)), "training tokens;", {a: len(t) for a, t in held_out.items()}, "held out")
    else:
        {"run": run, "figures": figures}[options.what](options)


if __name__ == "__main__":
    main()
