"""``replicate``: every cell of a paper's file means something, budgets scale what they say, and it ends in a page."""

import contextlib
import json
import math

import pytest
import yaml

import relinear
from conftest import make_tiny_gpt2
from relinear.compare import papers as room
from relinear.compare.executors import InlineExecutor
from relinear.compare.papers import PAPERS, read_paper
from relinear.compare.replicate import ANALYZED, MEASURES, replicate_section, replication, training_tokens
from relinear.compare.replicate_fits import data_settings, prose
from relinear.data import DataSettings, iter_texts
from relinear.data.tokenizers import byte_tokenizer
from relinear_cli.main import main

NAMES = sorted(path.stem for path in PAPERS.glob("*.yaml"))
COMPARED = [name for name in NAMES if read_paper(name).fits is None]


@pytest.mark.parametrize("name", NAMES)
def test_a_papers_file_names_what_exists(name):
    paper, experiment = read_paper(name), replication(name)
    if paper.fits is None:
        entries, measures = experiment.recipe.entries, {*MEASURES, *ANALYZED}
    else:
        entries = ["original", *paper.fits.methods]
        measures = {f"{what}:{which}" for what in ("1", "2", "parameters", "error") for which in paper.fits.projections}
    shown: set[str | None] = set()
    for table in paper.tables:
        for row in table.rows.values():
            assert len(row.paper.split()) == len(table.paper), row
            shown |= {row.entry, *(table.ours.values() if row.measure else ())}
            assert ({row.measure} if row.measure else set(table.ours.values())) <= measures
    assert {each for claim in paper.claims for each in (claim.measure, claim.than)} - {""} <= set(measures)
    named = {each for claim in paper.claims for each in (claim.entry, claim.against)}
    assert named | set(paper.analyze) <= set(entries)
    assert shown - {None} == set(entries)  # nothing is trained for no cell


@pytest.mark.parametrize("name", COMPARED)
def test_a_share_scales_tokens_warm_up_and_evaluations(name):
    whole, tenth = replication(name, budget="paper"), replication(name, budget=0.1, model="paper", data="paper")
    assert whole.recipe.train == whole.whole.train.replace(save_model=False)
    assert whole.request.model == whole.request.data == "paper"
    assert training_tokens(tenth.recipe) == pytest.approx(training_tokens(whole.whole) / 10, rel=0.01)
    first = next(iter(whole.recipe.entries))
    before, after = whole.recipe.settings_of(first), tenth.recipe.settings_of(first)
    assert after.warmup == pytest.approx(before.warmup / 10, abs=1)
    assert after.eval_every < before.eval_every
    assert replication(name).recipe.train.data.data == (
        "stdlib" if name != "cgt" else read_paper(name).small["train.data"]["data"]
    )
    assert replication(name, seeds=[3, 4]).recipe.seeds == (3, 4)
    ours = replication(name).recipe
    short = ours.settings_of(first)
    evaluated = math.ceil(short.steps / short.eval_every) * short.data.max_validation_tokens
    assert evaluated <= max(training_tokens(ours) / 2, short.data.max_validation_tokens)


@pytest.mark.parametrize("budget", ["0", "-1", "2", "all", "nan"])
def test_a_budget_is_a_share(budget):
    with pytest.raises(ValueError, match="hdpl: budget must be"):
        replication("hdpl", budget=budget)


def test_of_the_hub_no_more_is_read_than_the_recipe_says(tmp_path):
    whole = replication("transponder").whole.train.data
    other = replication("transponder", data="allenai/c4:en").recipe.train.data
    assert (other.max_documents, other.validation_fraction) == (whole.max_documents, whole.validation_fraction)
    assert replication("transponder", data=str(tmp_path)).recipe.train.data.max_documents is None
    assert data_settings(read_paper("rotor").fits.second).max_documents == 50_000
    assert data_settings(str(tmp_path)).max_documents is data_settings("stdlib").max_documents is None


def test_the_second_text_is_not_in_the_first():
    first = "".join(iter_texts(DataSettings(data="stdlib"), "all"))
    lines = [line.strip() for line in prose().splitlines() if len(line) > 60 and line.count("'") == 0][:200]
    assert len(prose()) > 100_000
    assert sum(line in first for line in lines) < 0.05 * len(lines)


def test_a_text_in_place_of_a_task_has_its_tokenizer_and_a_length_that_the_sizes_read():
    with pytest.raises(ValueError, match="length"):
        replication("cgt", data="cgt-arithmetic:tasks=1,examples=5,digits=1").requirements()
    for text in ("stdlib", "cgt-mixture:of=stdlib"):
        for model, length in {"paper": 240, "small": 54}.items():
            data = replication("cgt", data=text, model=model).recipe.train.data
            assert (data.sequence_length, data.tokenizer) == (length, "bytes")
    assert replication("cgt", data="cgt-arithmetic:tasks=1,examples=6,digits=1").recipe.train.data.sequence_length == 54


@pytest.mark.parametrize("fused", [True, False])
def test_models_that_a_method_does_not_fit_are_refused_before_anything_is_timed(fused, tmp_path, monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = make_tiny_gpt2() if fused else relinear.from_preset("tiny", **sizes, num_key_value_heads=1)
    relinear.save_pretrained(model, tmp_path / "model", tokenizer=byte_tokenizer())
    monkeypatch.setattr("relinear.compare.replicate_fits.fit_and_evaluate", None)
    with pytest.raises(ValueError, match="q_proj" if fused else "q_proj.*at most 32"):
        replication("rotor", model=str(tmp_path / "model")).requirements()


def test_rotors_are_not_fitted_to_a_preset():
    with pytest.raises(ValueError, match="unknown model 'tiny'"):
        replication("rotor", model="tiny").requirements()


def test_an_unknown_paper_is_named():
    with pytest.raises(ValueError, match="no paper 'hpdl'; did you mean 'hdpl'"):
        replication("hpdl")


@pytest.fixture
def smallest(tmp_path, monkeypatch):
    """HDPL's file with sizes that train in a moment, and a text."""
    values = yaml.safe_load((PAPERS / "hdpl.yaml").read_text())
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    values["small"] |= {"train.model_overrides": sizes | {"num_key_value_heads": 2}, "entries.hybrid.operator.rank": 4}
    values["tables"][0]["ours"]["added"] = "added_parameters"
    values["small"] |= {"train.data.tokenizer": "bytes", "train.data.sequence_length": 32, "speed.seconds": 0}
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "hdpl.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "text.txt").write_text("Once upon a time there were three words and a full stop. " * 2000)
    monkeypatch.setattr(room, "PAPERS", tmp_path / "papers")
    monkeypatch.setattr("relinear.compare.run.runs_at_once", lambda recipe: 0)
    monkeypatch.chdir(tmp_path)


def test_it_ends_in_a_page_and_goes_on(smallest, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("relinear.compare.report.save_panels", lambda panels, stem: None)
    arguments = ["replicate", "hdpl", "--budget", "0.000003", "--data", "text.txt", "--seeds", "0"]
    assert main([*arguments, "--dry-run"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["runs", "parameters", "tokens", "time", "disk"]
    assert lines[0].split(None, 1)[1].startswith("2 entries on 1 seed: 2")
    assert "tune" not in lines[0]
    assert not (tmp_path / "runs").exists()
    assert main(arguments) == 0
    page = (tmp_path / "runs" / "hdpl" / "report.html").read_text()
    for said in (
        "Loss of hybrid minus that of baseline: -0.037 nats per token in the paper",
        "256.02",
        "here: Min Val Loss",
        "fineweb-edu",
    ):
        assert said in page
    assert "Analysis: latents" in page
    results = json.loads((tmp_path / "runs" / "hdpl" / "comparison" / "results.json").read_text())
    assert main(arguments) == 0  # nothing is trained again
    assert json.loads((tmp_path / "runs" / "hdpl" / "comparison" / "results.json").read_text()) == results
    capfd.readouterr()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "report.html").write_text("of another program")
    foreign = [*arguments, "--out", "foreign"]
    for wrong, said in (([*arguments[:-1], "1"], "other settings"), (foreign, "has report.html, and no record")):
        for more in ([], ["--dry-run"]):
            assert main([*wrong, *more]) == 2
            printed = capfd.readouterr()
            assert said in printed.err
            assert not printed.out  # nothing is estimated first
    results["diverged"] = [{"name": "baseline", "text": "training diverged"}]
    results["entries"] = [entry | {"gap": None} for entry in results["entries"] if entry["name"] != "baseline"]
    (tmp_path / "runs" / "hdpl" / "comparison" / "results.json").write_text(json.dumps(results))
    table = next(block for block in replicate_section(tmp_path / "runs" / "hdpl").blocks if hasattr(block, "rows"))
    added = [row.cells[-1] for row in table.rows]
    assert [cell.text for cell in added] == ["diverged", "–"]  # to add to, there is nothing


def test_fits_to_a_decoder_end_in_a_page(tmp_path, monkeypatch, capfd):
    values = yaml.safe_load((PAPERS / "rotor.yaml").read_text())
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    values["fits"]["decoder"] |= {"model_overrides": sizes | {"num_key_value_heads": 2}}
    values["fits"]["methods"] = {name: values["fits"]["methods"][name] for name in ("lr1", "rotor")}
    values["fits"]["projections"] = {"Q": ["q_proj"], "QV": ["q_proj", "v_proj"]}
    values["fits"]["settings"] = {"epochs": 1}
    values["claims"] = [{"entry": "rotor", "against": "lr1", "paper": [2.721, 3.700]}]
    values["tables"] = [
        {"title": "Both", "head": "Method", "paper": ["Q"], "ours": {"Q": "1:Q", "QV": "2:QV", "Error": "error:Q"}}
        | {"rows": {"none": {"entry": "original", "paper": "2.575"}, "rotor": {"entry": "rotor", "paper": "2.629"}}}
    ]
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "rotor.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "text").mkdir()
    for split in ("train", "validation"):  # a text that brings its splits
        said = f"Once upon a time there were three words of {split} and a full stop. "
        (tmp_path / "text" / f"{split}.txt").write_text(said * 400)
    monkeypatch.setattr(room, "PAPERS", tmp_path / "papers")
    monkeypatch.setattr(
        "relinear.compare.replicate_fits.executor_at", lambda *_: contextlib.nullcontext(InlineExecutor())
    )
    monkeypatch.chdir(tmp_path)
    for wrong, said in ((["--seeds", "0,0"], "values come twice"), (["--evaluate-on", "nothing.txt"], "nothing.txt")):
        assert main(["replicate", "rotor", "--data", "text", "--budget", "0.001", *wrong]) == 2
        assert said in capfd.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert main(["replicate", "rotor", "--data", "text", "--budget", "0.001", "--seeds", "0,1"]) == 0
    page = (tmp_path / "runs" / "rotor" / "report.html").read_text()
    for said in (
        "Loss of rotor minus that of lr1: -0.979 nats per token in the paper",
        "tiny, trained here",
        "PyTorch&#39;s documentation",
        "with --budget paper",
        "128 tokens of text, 0.2 % of those with --budget paper",
        "compare the gaps, not the values",
    ):
        assert said in page
    assert "These fits are bad" not in page
    fits = tmp_path / "runs" / "rotor" / "fits"
    assert len(list(fits.glob("*.json"))) == 1 + 2 * 2 * 2
    assert json.loads((fits / "rotor-QV-seed-1.json").read_text()).keys() == {"parameters", "error", "losses"}
    assert "8 fits of 2 methods to 2 sets of projections" in capfd.readouterr().out
    values = json.loads((fits / "rotor-QV-seed-1.json").read_text())
    values["losses"][1] += 2
    (fits / "rotor-QV-seed-1.json").write_text(json.dumps(values))
    scale = replicate_section(tmp_path / "runs" / "rotor").blocks[1].text
    assert "These fits are bad, more than 1 nat above the original: rotor in QV." in scale


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_each_ends_in_a_page_at_its_own_budget(name, tmp_path):
    assert main(["replicate", name, "--out", str(tmp_path / name)]) == 0
    assert "What differs from the paper" in (tmp_path / name / "report.html").read_text()
