"""Comparisons at one size of the file: what is stored is what is judged, of the size that was asked."""

import sys

import numpy as np
import pytest
import torch

import relinear
from compare_helpers import VOCABULARY, WIDTH, small
from relinear.compare.figures import tuning
from relinear.compare.match import measure_size, plan_comparison, resize_entry
from relinear.compare.report import write_report
from relinear.compare.run import compare
from relinear.compare.settings import CompareSettings
from relinear.contract import config as registry
from relinear.data import prepare_data
from relinear.surgery.packed import packed_bytes
from relinear.system.files import read_json
from relinear.training import TrainSettings, train
from relinear.training.run import build_model
from relinear_cli.main import main

PLUGIN = '''
"""An operator of another package: two thin products, in one stack of matrices."""
from typing import ClassVar
import torch
from torch import nn
from relinear import Operator, OperatorConfig, register


class PairsLinear(Operator):
    def create(self, **kw):
        self.down = nn.Parameter(torch.empty(2, self.config.rank, self.in_features, **kw))
        self.up = nn.Parameter(torch.empty(2, self.out_features, self.config.rank, **kw))

    def reset_parameters(self):
        for part in (self.down, self.up):
            nn.init.normal_(part, std=0.1)

    def forward(self, x):
        return sum(x @ down.T @ up.T for down, up in zip(self.down, self.up))

    def flops_per_token(self):
        return 4 * self.config.rank * (self.in_features + self.out_features)


@register
class Pairs(OperatorConfig):
    """Two thin products."""

    kind = "outside_pairs"
    module_class = PairsLinear
    rank: int = 3
'''


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    (tmp_path / "outside_pairs.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("outside_pairs")
    yield
    registry._REGISTRY["operator"].pop("outside_pairs")
    sys.modules.pop("outside_pairs")


def in_bytes(text, to, **changes):
    """Entries with matrices and without, in files of so many bytes, with two seeds of a few steps."""
    entries = {"dense": "dense", "rotor": {"operator": "rotor", "target": ["q_proj"]}}
    recipe = small(text, entries=entries, match={"by": "bytes", "to": to, "bits": [3, 8]}, ngram=None)
    return recipe | {"train": recipe["train"] | {"save_model": False}} | changes


def test_a_run_is_judged_as_its_model_was_stored(text, tmp_path) -> None:
    settings = TrainSettings.load(small(text)["train"] | {"bits": 3})
    mine = tmp_path / "run" / "model" / "mine.txt"

    def meanwhile(_) -> None:
        mine.parent.mkdir(exist_ok=True)
        mine.touch()

    result = train(settings, tmp_path / "run", on_progress=meanwhile)
    assert not mine.exists()  # but kept, under another name
    assert len([*tmp_path.glob("run/model.*/mine.txt")]) == 1
    assert result.stored["bits"] == 3
    assert result.stored["bytes"] == (tmp_path / "run" / "model" / "model.safetensors").stat().st_size
    stored = relinear.from_pretrained(tmp_path / "run" / "model")
    blocks = prepare_data(settings.data).validation
    again = relinear.perplexity(stored, blocks, batch_size=settings.batch_size).loss
    assert result.validation_loss == pytest.approx(again, abs=1e-5)
    assert np.load(tmp_path / "run" / "block_losses.npy").mean() == pytest.approx(again, abs=1e-5)
    assert result.stored["loss_before"] == result.curve[-1]["validation_loss"] != result.validation_loss
    assert train(settings, tmp_path / "run") == result  # read back


def test_entries_and_a_plug_in_are_stored_at_the_size_that_is_asked(text, plugin, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("relinear.training.run._SAMPLES", 2)
    recipe = in_bytes(text, "30KB", seeds=[0])
    recipe["entries"] = {"dense": "dense", "pairs": "outside_pairs"}
    results = compare(recipe, tmp_path / "out", workers=0)
    assert [entry["name"] for entry in results["entries"]] == ["dense", "pairs"]
    for entry in results["entries"]:
        for run in entry["runs"]:
            assert run["stored"]["bytes"] == pytest.approx(30_000, rel=0.02)
            assert run["stored"]["bits"] == entry["settings"]["bits"] == entry["tuning"]["bits"]
            assert run["stored"]["bytes"] == round(30_000 * (1 + entry["size_mismatch"]))
        assert "full_length" not in entry["tuning"]  # rates are not tuned unless that is asked
        trials = {trial["bits"]: trial["validation_loss"] for trial in entry["tuning"]["trials"]}
        assert min(trials, key=trials.get) == entry["tuning"]["bits"]
        assert entry["tuning"]["bits_edge"] == (entry["tuning"]["bits"] == 3)
        folder = tmp_path / "out" / "runs" / entry["name"] / "seed-0"
        assert read_json(folder / "run.json")["model"]["parameters"] == entry["parameters"]
        assert float(np.load(folder / "block_losses.npy").mean()) == pytest.approx(entry["runs"][0]["validation_loss"])
    assert "30,000 bytes, within 2.0%" in results["match"]["text"]
    page = write_report(tmp_path / "out").read_text()
    assert "before storing" in page
    assert compare(recipe, tmp_path / "out", workers=0) == results


@pytest.mark.slow
def test_several_sizes_are_a_comparison_each_and_two_figures(text, tmp_path) -> None:
    recipe = in_bytes(text, ["30KB", 20_000])
    recipe["entries"] = {"dense": "dense", "low_rank": "low_rank:rank=4"}
    tune = {"learning_rates": [0.001, 0.01], "fraction": 0.5, "extensions": 0}
    results = compare(recipe | {"tune": tune, "reference": "dense"}, tmp_path, workers=0)
    assert [size["bytes"] for size in results["sizes"]] == [20_000, 30_000]
    for size in results["sizes"]:
        alone = read_json(tmp_path / size["folder"] / "results.json")
        for entry, whole in zip(size["entries"], alone["entries"], strict=True):
            assert entry["validation_loss"] == whole["validation_loss"]
            assert entry["bits"] in (3, 8)
            assert {(t["bits"], t["learning_rate"]) for t in entry["tuning"]["trials"]} >= {(3, 0.001), (8, 0.01)}
            assert whole["runs"][0]["stored"]["bytes"] == pytest.approx(size["bytes"], rel=0.02)
    page = write_report(tmp_path).read_text()
    assert "Loss by bytes" in page
    assert (tmp_path / "plots" / "sizes.svg").is_file()


@pytest.mark.parametrize("tied", [False, True])
def test_the_size_that_is_planned_is_that_of_the_file(tied, tmp_path) -> None:
    overrides = WIDTH | {"tie_word_embeddings": tied}
    settings = TrainSettings(model_overrides=overrides, operators={"q_proj": "hdpl:rank=4,blocks=8"}, bits=6)
    model, size = build_model(settings, VOCABULARY), measure_size(settings, VOCABULARY)
    relinear.save_pretrained(model, tmp_path, bits=6)
    assert size.bytes == (tmp_path / "model.safetensors").stat().st_size
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_operators_may_be_sized_in_place_of_widths() -> None:
    settings = TrainSettings(model_overrides=WIDTH, operators={"all-linear": "low_rank:rank=4"}, bits=8)
    wanted = {"by": "bytes", "target": 40_000, "tolerance": 0.02, "name": "low_rank"}
    planned = resize_entry(settings, VOCABULARY, resizing="operator", **wanted)
    assert planned.settings.model_overrides == settings.model_overrides
    assert planned.size.bytes == pytest.approx(40_000, rel=0.02)
    assert planned.settings.operators["all-linear"]["rank"] > 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"match": "bytes"}, "match by bytes takes the size of the file: --size 500KB"),
        ({"match": {"by": "bytes", "to": "dense"}}, "match by bytes takes the size of the file"),
        ({"match": {"by": "parameters", "to": ["1KB", "2KB"]}}, "sizes of the file are for match by bytes"),
        ({"match": {"by": "bytes", "to": "1KB", "bits": [1, 4]}}, "bits"),
        ({"match": {"by": "bytes", "to": ["1KB", 0]}}, "match.to: 0 is not a size of a file; write 500KB"),
        ({"match": {"by": "bytes", "to": []}}, "match by bytes takes the size of the file"),
        ({"entries": {"dense": {"resize": "fixed"}}}, "entries.dense has resize: fixed, and match by bytes"),
        ({"entries": {"dense": {"set": {"bits": 4}}}}, "entries.dense has bits: 4, and match by bytes chooses"),
        ({"budgets": [256, 512], "reference": "dense"}, "several widths or sizes, not both"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(text, changes, said) -> None:
    recipe = in_bytes(text, "30KB") | changes
    if "budgets" in changes:
        recipe["train"].pop("steps")
    with pytest.raises(ValueError, match=said):
        CompareSettings.load(recipe)


@pytest.mark.parametrize(("size", "in_full"), [(500, "500"), ("1000GB", "1,000,000,000,000")])
def test_a_size_that_no_width_reaches_is_refused_before_anything_is_written(size, in_full, text, tmp_path) -> None:
    said = rf"dense: no model width gives {in_full} bytes within 2\.0%; the nearest has .*, or give another --size$"
    with pytest.raises(ValueError, match=said):
        compare(in_bytes(text, size), tmp_path / "out", workers=0)
    assert not (tmp_path / "out").exists()


def test_a_model_far_too_large_for_memory_has_a_size() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2**20, 2**20, bias=False, device="meta"))
    assert packed_bytes(model, 4) == 2**40 // 2 + 3 * 2**34


def test_the_command_line_reads_sizes(text, tmp_path, capsys) -> None:
    command = ["compare", "--recipe", "quick", "--match", "bytes", "--size", "20KB,30XB", "--out", str(tmp_path)]
    assert main(command) == 2
    assert "'30XB' is not a size of a file; write 500KB or 1.5MB" in capsys.readouterr().err
    assert main(["compare", "--recipe", "quick", "--size", "20KB", "--out", str(tmp_path / "out")]) == 2
    assert "--size is of the stored model: add --match bytes" in capsys.readouterr().err
    for size, expected in (("1.5MB", 1_500_000), ("20KiB", 20_480), (["30000", "20kB"], (20_000, 30_000))):
        assert CompareSettings.load(in_bytes(text, size)).match.to == expected
    assert [p.name for p in plan_comparison(CompareSettings.load(in_bytes(text, "30KB")), VOCABULARY)] == [
        "dense",
        "rotor",
    ]


def test_rates_are_drawn_where_several_were_tried_and_at_the_bits_that_won() -> None:
    trials = [{"learning_rate": 0.003, "validation_loss": 3.0, "bits": bits} for bits in (3, 4)]
    entry = {"name": "dense", "learning_rate": 0.003, "tuning": {"trials": trials, "bits": 3}}
    assert tuning([entry], {"dense": "#000000"}) == []
    trials += [{"learning_rate": 0.006, "validation_loss": 3.1, "bits": bits} for bits in (3, 4)]
    (panel,) = tuning([entry], {"dense": "#000000"})
    assert list(panel.shown[0].x) == [0.003, 0.006]
