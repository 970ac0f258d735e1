"""The scripts of the CGT study: what their options set, the paper's settings, and one small run."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import GPT2LMHeadModel

SCRIPTS = Path(__file__).resolve().parents[1] / "results" / "cgt"


def script(name):
    spec = importlib.util.spec_from_file_location(f"cgt_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_arithmetic_of_the_paper():
    """Section 4.2 and Appendix B.2: 4 tasks of 4 examples of 3 digits, real a and b, loss on all, y frozen anywhere."""
    module = script("arithmetic")
    options = module.parse(["run", "--paper", "--column", "aux+reg"])
    task = module.make_task(options, "train", 10)
    assert (task.tasks, task.examples, task.digits, task.integers) == (4, 4, 3, False)
    assert (task.a_range, task.b_range) == ((0, 10), (-10, 10))
    assert (task[0]["labels"] == task[0]["input_ids"]).all()
    objective = module.make_objective(options, task)
    assert (objective.eta, objective.continuity, objective.decorrelation) == (0.5, 0.08, 0.04)
    assert objective.splits is None
    assert not objective.shared_split
    with torch.device("meta"):
        config = module.make_model(options, task, "aux").config
        plain = module.make_model(options, task, "baseline")
    assert isinstance(plain, GPT2LMHeadModel)
    assert (plain.config.n_layer, plain.config.n_embd, plain.config.n_head) == (6, 112, 7)
    assert (config.n_layer, config.n_embd, config.n_head, config.context_layer) == (6, 112, 7, 4)
    assert (config.context_size, config.context_heads, config.rank, config.templates) == (64, 4, 4, 16)
    assert (options.steps, options.batch_size, options.warmup, options.weight_decay) == (400_000, 128, 10_000, 1e-8)
    assert module.parse(["run", "--paper", "--steps", "7"]).steps == 7


@pytest.mark.parametrize("name", ["arithmetic", "regression", "text"])
def test_weights_of_the_regularisers_are_options(name):
    module = script(name)
    given = {
        "arithmetic": ["run", "--column", "reg"],
        "regression": [],
        "text": ["run", "--name", "reg", "--books", "x"],
    }[name]
    for more, wanted in ((["0.02"], (0.02, 0.01)), (["0.02", "--decorrelation", "0.3"], (0.02, 0.3))):
        options = module.parse([*given, "--continuity", *more])
        arguments = (module.make_task(options, "train", 2),) if name == "arithmetic" else ()
        objective = module.make_objective(options, *arguments)
        assert (objective.continuity, objective.decorrelation) == wanted


def test_regression_of_the_paper():
    """Sections 4.1 and 4.3, Appendix D.2; vectors padded with zeros, x and y from the first feature on."""
    module = script("regression")
    options = module.parse(["--paper"])
    train, _ = module.make_tasks(options)
    assert (train.inputs, train.outputs, train.pairs, train.noise, train.layout) == (16, 1, 64, 0.1, "shared")
    config = module.make_config(options, train)
    assert (config.n_layer, config.context_layer, config.n_embd, config.context_size) == (8, 7, 128, 64)
    assert (config.rank, config.templates, config.vector_input) == (4, 8, "padded")
    assert module.make_objective(options).splits == tuple(range(2, 127, 2))
    plain = module.make_baseline(options, train)
    assert (plain.transformer.config.n_layer, plain.transformer.config.n_embd, plain.vector_in) == (8, 128, None)


def test_vae_columns_weigh_the_divergence():
    module = script("arithmetic")
    for column, wanted in (("vae-0.01", 0.01), ("vae-0.3", 0.3), ("vae", 0.7)):
        options = module.parse(["run", "--column", column, "--kl", "0.7", "--kl-reduction", "components"])
        objective = module.make_objective(options, module.make_task(options, "train", 2))
        assert (objective.kl, objective.kl_reduction, objective.continuity) == (wanted, "components", 0.0)


def test_profile_of_a_prior_is_an_option():
    for name in ("arithmetic", "regression"):
        module = script(name)
        given = ["run"] if name == "arithmetic" else []
        options = module.parse([*given, "--profile", "kernel", "--kernel", "estimation"])
        arguments = (module.make_task(options, "train", 2),) if given else ()
        objective = module.make_objective(options, *arguments)
        assert (objective.profile, objective.kernel) == ("kernel", "estimation")


def test_arithmetic_runs_and_collects(tmp_path, monkeypatch):
    module = script("arithmetic")
    monkeypatch.setattr(module, "save_figure", lambda figure, path: None)
    small = "--paper --tasks 2 --digits 1 --layers 2 --context-layer 1 --width 14 --context-size 8 --steps 2 "
    common = [*small.split(), "--batch-size", "4", "--every", "1", "--out", str(tmp_path)]
    module.run(module.parse(["run", "--column", "aux+reg", *common]))
    report = json.loads((tmp_path / "aux+reg-0.json").read_text())["report"]
    assert {"specialized", "specialized_ctx", "probe", "guessing"} <= set(report)
    # A run as version 0.1 wrote it: its probe read the last token, and stands in that column.
    old = {"column": "aux", "parameters": 1, "report": {"dynamic": report["dynamic"], "probe_error": 0.125}}
    (tmp_path / "aux-0.json").write_text(json.dumps(old))
    module.collect(module.parse(["collect", *common]))
    heads, _, *rows, _, note = (tmp_path / "table.md").read_text().splitlines()
    assert note.startswith("–")
    row = next(row for row in rows if row.startswith("| aux |"))
    assert row.split(" | ")[heads.split(" | ").index("last token")] == "0.125"
    assert row.split(" | ")[heads.split(" | ").index("probe error, anywhere")] == "–"


def test_texts_of_the_paper():
    """Section 4.4, Appendices B.2.2 and B.2.3: 512 tokens cut between 256 and 384, w_C = 2 w_D, nu = 0.1."""
    module = script("text")
    given = ["run", "--books", "x", "--paper"]
    options = module.parse(given)
    mixture = module.make_mixture(options, [[1] * 600] * 2)
    assert (mixture.length, mixture.start, mixture.finish, mixture.mixed) == (512, 256, 384, True)
    config = module.make_config(options, Tokenizer())
    assert (config.n_layer, config.context_layer, config.n_embd, config.context_size) == (12, 8, 128, 128)
    assert (config.vocab_size, config.n_positions, config.variational) == (8000, 512, False)
    objective = module.make_objective(options)
    assert (objective.eta, objective.continuity, objective.decorrelation) == (0.5, 0.08, 0.04)
    assert not objective.shared_split
    assert (options.steps, options.batch_size, options.warmup, options.weight_decay) == (400_000, 128, 10_000, 1e-8)
    assert not module.make_mixture(module.parse([*given, "--single"]), [[1] * 600] * 2).mixed
    for name, weight in (("vae-1", 1.0), ("vae-3", 3.0), ("vae-10", 10.0), ("vae", 0.7)):
        options = module.parse([*given, "--name", name, "--kl", "0.7"])
        objective = module.make_objective(options)
        assert (objective.kl, objective.kernel_nu, objective.continuity) == (weight, 0.1, 0.0)
        config = module.make_config(options, Tokenizer())
        assert (config.variational, config.context_norm) == (True, False)


class Tokenizer:
    eos_token_id = 0

    def __len__(self):
        return 8000

    def get_vocab(self):
        return {"one": 1}


def test_regression_runs(tmp_path, monkeypatch):
    module = script("regression")
    monkeypatch.setattr(module, "save_figure", lambda figure, path: None)
    small = "--paper --baseline --layers 2 --context-layer 1 --width 16 --heads 2 --context-size 8 --context-heads 2 "
    small += "--inputs 3 --pairs 6 --steps 2 --batch-size 4 --samples 8 --freeze-after 2 4 --out"
    monkeypatch.setattr(sys, "argv", ["regression.py", *small.split(), str(tmp_path)])
    module.main()
    errors = json.loads((tmp_path / "run.json").read_text())["errors"]
    lengths = {name: len(values) for name, values in errors.items()}
    assert lengths == {"dynamic": 6, "baseline": 6, "frozen_2": 4, "frozen_4": 2}
    assert len((tmp_path / "table.md").read_text().splitlines()) == 4


def test_texts_run_and_are_drawn(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    module = script("text")
    figures = []
    monkeypatch.setattr(module, "save_figure", lambda figure, path: figures.append(path.name))
    letters = "abcdefghijklmnop"
    texts = [(letters[k % 16] + " and " + letters[k % 5] + ", ") * 900 for k in range(8)]
    rows = {"author": ["one", "two"] * 4, "text": texts}
    datasets.Dataset.from_dict(rows).to_parquet(str(tmp_path / "books.parquet"))
    small = (
        "--paper --length 24 --start 8 --finish 16 --vocabulary 300 --layers 2 --context-layer 1 --width 16 --heads 2 "
    )
    small += (
        "--context-size 8 --context-heads 2 --steps 2 --batch-size 4 --characters 1500 --per-author 3 --held-out 2 "
    )
    small += "--samples 8 --excerpts 6"
    common = [*small.split(), "--books", str(tmp_path / "books.parquet"), "--out", str(tmp_path)]
    for name in ("aux+reg", "vae-3"):
        module.run(module.parse(["run", "--name", name, *common]))
    module.figures(module.parse(["figures", *common]))
    assert {"aux+reg", "vae-3"} <= json.loads((tmp_path / "report.json").read_text()).keys()
    assert {"dot-products", "spectra", "vae-3-positions", "vae-3-authors"} <= set(figures)


def test_unlike_sources_run_and_are_held_apart(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = script("sources")
    figures = []
    monkeypatch.setattr(module, "save_figure", lambda figure, path: figures.append(path.name))
    for name, letters in (("digits", "0123456789"), ("letters", "abcdefghij")):
        (tmp_path / f"{name}.txt").write_text(letters * 500)
    small = "--documents 24 --characters 120 --length 112 --layers 2 --context-layer 1 --width 16 --context-size 12"
    sources = [f"--source={name}={tmp_path / name}.txt" for name in ("digits", "letters")]
    common = [
        *small.split(),
        *sources,
        "--steps",
        "2",
        "--batch-size",
        "4",
        "--excerpts",
        "3",
        "--out",
        str(tmp_path / "out"),
    ]
    for name in ("aux", "gpt2-equal"):
        for seed in ("0", "1"):
            module.run(module.parse(["run", "--name", name, "--seed", seed, *common]))
    module.figures(module.parse(["figures", *common]))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["aux"]["seeds"], report["gpt2-equal"]["seeds"]) == (2, 2)
    assert 1 <= report["gpt2-equal"]["parameters"] / report["aux"]["parameters"] < 1.25  # wider by one channel a head
    for kind in ("specialized", "shuffled", "average", "baseline"):
        found = report["aux"]["minus_dynamic"][kind]["5 to 16"]
        assert found["low"] <= found["mean"] <= found["high"]
    assert figures == ["aux-positions"]
    first, second = (tmp_path / "out" / "table.md").read_text().strip().split("\n\n")
    assert first.count("\n") == 4
    assert report["5-grams"]["loss"] < 0.5  # of ten letters in a circle, each says the next
    assert second.count("\n") == 5

    study = {
        "arms": {"gpt2-equal": "a GPT-2", "aux": "CGT", "shuffled": "CGT with another y"},
        "settings": {"steps": 2, "tuning_steps": 1, "sources": [source.partition("=")[2] for source in sources]},
        "grid": {"initializer_range": [0.02, 0.1], "learning_rate": [0.001]},
        "seeds": [0, 1],
    }
    said = dict.fromkeys(("question", "command", "effect_from", "spread_from", "budget", "stopping"), "said")
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**said, "effect": 1.0, "spread": 0.01, "study": study}))
    planned = ["plan", *common[:-1], str(tmp_path / "planned"), "--plan", str(tmp_path / "plan.yaml")]
    taken = module.planned.claimed(tmp_path / "planned" / "aux-1.json")
    until = types.SimpleNamespace(sleep=lambda seconds: taken.__exit__(None, None, None))
    monkeypatch.setattr(module.planned, "time", until)
    assert taken.__enter__()  # by another process, which ends without a result
    module.carry_out(module.parse(planned))
    report = json.loads((tmp_path / "planned" / "report.json").read_text())
    assert (report["aux"]["seeds"], report["gpt2-equal"]["seeds"]) == (2, 2)
    tuned = {
        path.stem: json.loads(path.read_text())["loss"] for path in (tmp_path / "planned" / "tuning").glob("*.json")
    }
    assert set(tuned) == {f"{arm}-{start}-0.001" for arm in ("aux", "gpt2-equal") for start in ("0.02", "0.1")}
    best = min(("0.02", "0.1"), key=lambda start: tuned[f"aux-{start}-0.001"])
    final = json.loads((tmp_path / "planned" / "aux-1.json").read_text())
    assert (final["options"]["initializer_range"], final["options"]["steps"]) == (best, "2")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "planned").rglob("*.json")}
    module.carry_out(module.parse(planned))
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "planned").rglob("*.json")}

    blocks = list(module.blocks_of_texts(module.parse(["figures", *common]), {"a": [b_of(1)] * 3, "b": [b_of(2)] * 2}))
    assert [block[:, 0].tolist() for block in blocks] == [[1, 2] * 3] * 2  # the text before is of the other source


def test_planned_arithmetic_is_tuned_and_held_apart_by_seed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = script("arithmetic")
    monkeypatch.setattr(module, "_BLOCK", 4)
    monkeypatch.setattr(module, "_BLOCKS", 2)
    small = {"width": 12, "context_size": 6, "layers": 2, "context_layer": 1, "examples": 2, "batch_size": 2}
    study = {
        "arms": dict.fromkeys(("baseline-equal", "no-aux", "aux", "aux+reg"), "an arm"),
        "settings": {"options": {**small, "every": 9}, "steps": 1, "tuning_steps": 1},
        "grid": {"initializer_range": [0.05, 0.1], "learning_rate": [0.001]},
        "seeds": [0, 1, 2],
    }
    said = dict.fromkeys(("question", "command", "effect_from", "spread_from", "budget", "stopping"), "said")
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**said, "effect": 1.0, "spread": 0.01, "study": study}))
    module.carry_out(module.parse(["plan", "--plan", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "out")]))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    runs = [json.loads((tmp_path / "out" / f"aux-{seed}.json").read_text()) for seed in range(3)]
    own, other = (np.array([run["answers"][kind] for run in runs]) for kind in ("specialized", "dynamic"))
    found = report["differences"]["aux specialized - aux dynamic"]
    assert own.shape == (3, 2)
    assert found["values"] == pytest.approx((own - other).mean(1).tolist())
    errors = {
        path.stem: json.loads(path.read_text())["loss"] for path in (tmp_path / "out" / "tuning").glob("aux-*.json")
    }
    best = min(("aux-0.05-0.001", "aux-0.1-0.001"), key=errors.__getitem__)
    assert best == f"aux-{report['arms']['aux']['initializer_range']:g}-0.001"
    assert set(report["arms"]["baseline-equal"]["answers"]) == {"dynamic"}


def b_of(value):
    return np.full(200, value)
