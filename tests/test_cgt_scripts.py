"""The scripts of the CGT study: what their options set, the paper's settings, and one small run."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
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
    heads, _, *rows = (tmp_path / "table.md").read_text().splitlines()
    row = next(row for row in rows if row.startswith("| aux |"))
    assert row.split(" | ")[heads.split(" | ").index("last token")] == "0.125"
    assert row.split(" | ")[heads.split(" | ").index("probe error, anywhere")] == "–"
