"""The comparison: matching, tuning, resuming, what it writes."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import relinear
from compare_helpers import VOCABULARY, WIDTH, losses, made, small, trials_in
from conftest import mostly_slow
from relinear.compare import engine
from relinear.compare.engine import run_search
from relinear.compare.gaps import gap, interval, replicates, too_small
from relinear.compare.match import measure_size, plan_comparison, resize_entry
from relinear.compare.recipe import change_recipe
from relinear.compare.report import write_report
from relinear.compare.requirements import compare_requirements
from relinear.compare.results import gap_notes, match_result
from relinear.compare.run import compare
from relinear.compare.scaling import crossing, fit_power_law
from relinear.compare.series import recipes_of_series
from relinear.compare.settings import CompareSettings, TuneSettings
from relinear.compare.tune import check_neighbors, grid_search
from relinear.data import prepare_data
from relinear.evaluate import KneserNey
from relinear.system.lock import LOCK
from relinear.training.run import build_model
from relinear.training.settings import TrainSettings
from relinear.training.trainer import SteadySampler
from relinear_cli.main import main
from relinear_cli.terminal import print_results

# Sizes


def test_sizes_are_those_of_the_model_that_is_trained():
    settings = TrainSettings(model_overrides=WIDTH, operators={"all-linear": "low_rank:rank=4"})
    size = measure_size(settings, VOCABULARY)
    model = build_model(settings, VOCABULARY)
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert size.flops == relinear.summary(model).flops_per_token


@pytest.mark.parametrize(
    ("written", "by", "factor"),
    [
        ("low_rank:rank=8", "parameters", 0.8),
        ("monarch:blocks=8,rank=8", "flops", 1.3),
        ("hdpl:blocks=8,rank=8", "parameters", 0.8),
    ],
)
def test_matching_finds_the_nearest_size(written, by, factor):
    settings = TrainSettings(model_overrides={"num_hidden_layers": 1}, operators={"all-linear": written})
    target = round(factor * measure_size(settings, VOCABULARY).of(by))
    planned = resize_entry(settings, VOCABULARY, by=by, target=target, resizing="operator", tolerance=0.05, name="x")
    found, size = planned.settings, planned.size
    assert size == measure_size(found, VOCABULARY)
    # No other rank comes nearer.
    (operator,) = found.operators.values()
    for other in (operator["rank"] - 1, operator["rank"] + 1):
        if other >= 1:
            changed = found.replace(operators={"all-linear": operator | {"rank": other}})
            assert abs(measure_size(changed, VOCABULARY).of(by) - target) >= abs(size.of(by) - target)


@pytest.mark.parametrize("model", ["tiny", "gpt2-ccl-64"])
def test_matching_by_width(model):
    settings = TrainSettings(model=model, data={"sequence_length": 32})
    target = round(0.6 * measure_size(settings, VOCABULARY).parameters)
    planned = resize_entry(
        settings, VOCABULARY, by="parameters", target=target, resizing="width", tolerance=0.1, name="dense"
    )
    count = planned.size.parameters
    assert count == sum(p.numel() for p in build_model(planned.settings, VOCABULARY).parameters())
    assert count == pytest.approx(target, rel=0.1)


def test_a_match_out_of_reach_says_how_near_it_came():
    settings = TrainSettings(operators={"all-linear": "low_rank:rank=4"})
    with pytest.raises(ValueError, match=r"low: no operator size gives 10 parameters within 2.0%; the nearest has"):
        resize_entry(settings, VOCABULARY, by="parameters", target=10, resizing="operator", tolerance=0.02, name="low")


def test_a_match_that_was_just_missed_names_the_tolerance_that_does():
    settings = TrainSettings(operators={"all-linear": "low_rank:rank=4"})
    target = round(1.027 * measure_size(settings, VOCABULARY).parameters)
    arguments = {"by": "parameters", "target": target, "resizing": "operator", "name": "low"}
    with pytest.raises(ValueError, match=r"Set match\.tolerance=0\.03, match\.to=low") as refused:
        resize_entry(settings, VOCABULARY, **arguments, tolerance=0.001)
    assert "(-2.6%)" in str(refused.value)
    planned = resize_entry(settings, VOCABULARY, **arguments, tolerance=0.03)
    assert planned.size == measure_size(settings, VOCABULARY)


def test_a_match_out_of_reach_is_refused_before_any_text_is_read(text, tmp_path, monkeypatch):
    monkeypatch.setattr("relinear.compare.run.prepare_data", lambda *given, **more: pytest.fail("text was read"))
    recipe = small(text, match={"by": "parameters", "to": 10**9})
    recipe["train"]["data"] |= {"tokenizer": "bpe:300"}
    with pytest.raises(ValueError, match="gives 1,000,000,000 parameters"):
        compare(recipe, tmp_path / "out", workers=0)
    assert not (tmp_path / "out").exists()


def test_all_entries_are_matched_to_the_first_with_operators(text):
    recipe = CompareSettings.load(small(text))
    planned = plan_comparison(recipe, VOCABULARY)
    dense, low_rank, hdpl = planned
    assert dense.size_mismatch is None
    assert low_rank.size_mismatch == 0
    assert abs(hdpl.size_mismatch) <= 0.02
    assert abs(hdpl.size.parameters / low_rank.size.parameters - 1) <= 0.02
    assert match_result(recipe, planned)["text"].endswith("the size of low_rank, within 2.0%. Not matched: dense.")


def test_entries_may_differ_in_any_setting():
    recipe = CompareSettings.load(
        {
            "entries": {
                "a": {"operator": "low_rank:rank=4", "target": "q_proj", "set": {"weight_decay": 0.0, "data.seed": 0}},
                "b": {"operators": {"q_proj": "low_rank:rank=2", "lm_head": None}, "learning_rate": 0.5},
            },
            "tokens": 100_000,
            "train": {"batch_size": 4, "data": {"sequence_length": 100}},
        }
    )
    a, b = recipe.settings_of("a"), recipe.settings_of("b")
    assert list(a.operators) == ["q_proj"]
    assert (a.weight_decay, b.weight_decay) == (0.0, 0.1)
    assert (a.steps, b.learning_rate) == (250, 0.5)
    assert b.operators["lm_head"] is None


@pytest.mark.parametrize("word", ["dense", "Dense", " NONE "])
def test_an_entry_may_replace_nothing(word):
    recipe = CompareSettings.load({"entries": {"a": word, "b": {"operator": word}}, "tokens": 100_000})
    assert [entry.operator for entry in recipe.entries.values()] == [None, None]
    assert not any(recipe.settings_of(name).operator_configs for name in "ab")


# Tuning


def by_rate(settings, folder, evaluate):
    trials = trials_in(folder, lambda rate, _: evaluate(rate))
    return run_search(grid_search(settings, trials), made), trials.rows()


def test_tuning_finds_the_minimum_and_grows_the_grid(tmp_path):
    tried = []

    def evaluate(rate):
        tried.append(rate)
        return None if rate > 0.5 else (math.log10(rate) + 1.3) ** 2

    tune = TuneSettings(learning_rates=(1e-3, 2e-3, 4e-3), extensions=4)
    found, _ = by_rate(tune, tmp_path, evaluate)
    assert tried == [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2]
    assert found.rate == 6.4e-2
    assert found.edge  # the grid has grown as often as it may
    found, _ = by_rate(tune.replace(extensions=6), tmp_path, evaluate)
    assert tried[7:] == [0.128]  # what has ended is not run again
    assert found.rate == 6.4e-2
    assert not found.edge


def test_tuning_goes_on_after_a_kill(tmp_path):
    def killed(rate):
        if rate > 1:
            raise SystemExit
        return rate

    tune = TuneSettings(learning_rates=(1.0, 2.0), extensions=0)
    with pytest.raises(SystemExit):
        by_rate(tune, tmp_path, killed)
    found, trials = by_rate(tune, tmp_path, lambda rate: 1 / rate)
    assert found.rate == 1.0 or found.rate == 2.0
    assert [t["validation_loss"] for t in trials] == [1.0, 0.5]


def test_divergence_everywhere_is_an_infinite_loss(tmp_path):
    assert by_rate(TuneSettings(), tmp_path, lambda rate: None)[0].loss == math.inf


def test_rate_and_initialisation_are_found_one_after_the_other(tmp_path):
    tried = []

    def evaluate(rate, spread):
        tried.append((rate, spread))
        if rate > 0.1:
            return None
        # the best rate depends on the initialisation: 4e-3 at 0.02, 2e-3 at 0.1
        best = 4e-3 * (0.02 / spread) ** (math.log(2) / math.log(5))
        return math.log(rate / best) ** 2 + math.log(spread / 0.1) ** 2

    settings = TuneSettings(learning_rates=(1e-3, 2e-3, 4e-3, 8e-3), initializer_range=(0.02, 0.05, 0.1), extensions=2)
    trials = trials_in(tmp_path, evaluate)
    found = run_search(grid_search(settings, trials, 0.02), made)
    assert (found.rate, found.initializer_range, found.loss) == (2e-3, 0.1, pytest.approx(0))
    assert tried[:4] == [(1e-3, 0.02), (2e-3, 0.02), (4e-3, 0.02), (8e-3, 0.02)]
    assert tried[4:7] == [(4e-3, 0.05), (4e-3, 0.1), (4e-3, 0.2)]  # the grid grew once
    assert tried[7:10] == [(2e-3, 0.1), (8e-3, 0.1), (1e-3, 0.1)]  # downhill, and a look at the other side
    assert {spread for _, spread in tried[10:]} in ({0.05}, {0.2})  # the second best start has a rate of its own, too
    assert len(trials.rows()) == len(tried) == len(set(tried))
    assert {(t["learning_rate"], t["initializer_range"]) for t in trials.rows()} == set(tried)
    assert (found.edge, found.initializer_edge) == (False, False)
    before = len(tried)
    again = trials_in(tmp_path, evaluate)
    assert run_search(grid_search(settings, again, 0.02), made) == found
    assert again.rows() == trials.rows()
    assert len(tried) == before


def test_a_start_that_is_second_at_the_first_rate_may_win_at_its_own(tmp_path):
    def evaluate(rate, spread):
        best, floor = {0.02: (4e-3, 9.0), 0.05: (4e-3, 1.0), 0.1: (1e-3, 0.5)}[spread]
        return floor + math.log(rate / best) ** 2 / 3

    settings = TuneSettings(learning_rates=(1e-3, 2e-3, 4e-3, 8e-3), initializer_range=(0.02, 0.05, 0.1), extensions=2)
    found = run_search(grid_search(settings, trials_in(tmp_path, evaluate), 0.05), made)
    assert evaluate(4e-3, 0.1) > evaluate(4e-3, 0.05)  # at the rate that was found at 0.05 it is behind
    assert (found.rate, found.initializer_range) == (1e-3, 0.1)
    assert not found.edge


@pytest.mark.parametrize(
    ("start", "best", "moves", "ends", "edge", "tried"),
    [
        (2e-3, 2e-3, 2, 2e-3, False, [2e-3, 1e-3, 4e-3]),
        (4e-3, 4e-3, 2, 4e-3, False, [4e-3, 2e-3, 8e-3]),  # beyond the end of the grid too
        (4e-3, 1e-3, 2, 1e-3, False, [4e-3, 2e-3, 8e-3, 1e-3, 5e-4]),
        (4e-3, 1e-3, 1, 1e-3, True, [4e-3, 2e-3, 8e-3, 1e-3]),
        (4e-3, 5e-4, 0, 2e-3, True, [4e-3, 2e-3, 8e-3]),
        (3e-3, 3e-3, 2, 3e-3, False, [3e-3, 2e-3, 4e-3]),  # a rate that is not of the grid
        (4.1e-3, 4e-3, 2, 4.1e-3, False, [4.1e-3, 2e-3, 8.41e-3]),  # and one too near to it
    ],
)
def test_the_chosen_rate_is_held_against_its_neighbours(tmp_path, start, best, moves, ends, edge, tried):
    seen = []

    def evaluate(rate, _):
        seen.append(rate)
        return abs(math.log(rate / best))

    settings = TuneSettings(learning_rates=(1e-3, 2e-3, 4e-3), extensions=moves)
    found = run_search(check_neighbors(settings, trials_in(tmp_path, evaluate), start), made)
    assert seen == tried
    assert (found.rate, found.edge) == (ends, edge)


# Gaps


def test_a_gap_has_its_mean_and_the_interval_of_its_spread():
    generator = np.random.default_rng(0)
    shared = generator.normal(5, 1, 1000)  # how hard a block is: the same for both, and no part of the gap
    reference = [shared + generator.normal(0, 0.1, 1000) for _ in range(3)]
    own = [losses - 0.05 + generator.normal(0, 0.1, 1000) for losses in reference]
    found = gap(own, reference)
    assert found["mean"] == pytest.approx(-0.05, abs=0.01)
    assert found["low"] < found["mean"] < found["high"]
    assert found["standard_error"] == pytest.approx(0.1 / math.sqrt(3 * 1000), rel=0.15)
    assert found["values"] == pytest.approx([float((a - b).mean()) for a, b in zip(own, reference, strict=True)])
    assert gap(own, reference) == found
    assert too_small({"near": found | {"mean": 0.001}, "far": found}) == ["near"]


@pytest.mark.parametrize(("error", "warned"), [(0.024, False), (0.026, True)])
def test_an_evaluation_too_small_is_said_to_be(text, error, warned):
    recipe = CompareSettings.load(small(text, reference="dense"))
    found = {"mean": -0.1, "low": -0.2, "high": 0.0, "values": [-0.1], "standard_error": error, "blocks": 9}
    notes = gap_notes(recipe, [{"name": "dense", "gap": None}, {"name": "hdpl", "gap": found}])
    said = [note for note in notes if note.startswith("The evaluation is too small for these gaps: hdpl (-0.1000")]
    assert bool(said) == warned


@pytest.mark.parametrize("seeds", mostly_slow([2, 3, 8], 3))
def test_intervals_hold_the_truth_as_often_as_they_say(seeds):
    hits = 0
    for trial in range(200):
        generator = np.random.default_rng(trial)
        of_seeds, of_blocks = generator.normal(0, 0.05, (seeds, 1)), generator.normal(0, 0.2, 40)
        low, high = interval(replicates(0.3 + of_seeds + of_blocks, 1000, seed=trial))
        hits += low < 0.3 < high
    assert 181 <= hits <= 199  # 95 % of 200, and three standard deviations to either side


def test_intervals_over_seeds_alone_are_those_of_student():
    values = np.asarray([[0.1], [0.4], [0.2]])
    low, high = interval(replicates(values, 200_000))
    half = 4.303 * values.std(ddof=1) / math.sqrt(3)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.02)


@pytest.mark.parametrize("blocks", [256, 384, 1003])
def test_what_is_the_same_in_every_block_has_no_spread(blocks):
    found = gap([np.full(blocks, 1.9)] * 2, [np.full(blocks, 2.0)] * 2)
    assert (found["low"], found["high"]) == pytest.approx((-0.1, -0.1))
    assert found["standard_error"] == pytest.approx(0, abs=1e-12)


def test_blocks_of_any_number_keep_the_mean():
    losses = np.random.default_rng(0).normal(size=(2, 1003))
    assert replicates(losses, 4000).mean() == pytest.approx(losses.mean(), abs=0.01)


def test_gaps_of_runs_without_blocks_are_over_seeds_alone():
    found = gap([np.asarray([1.0]), np.ones(4)], [np.full(4, 2.0), np.full(4, 2.5)])
    assert (found["mean"], found["values"], found["standard_error"]) == (-1.25, [-1.0, -1.5], None)
    assert found["low"] < -1.25 < found["high"]
    alone = gap([np.asarray([1.0])], [np.asarray([2.0])])
    assert (alone["mean"], alone["low"], alone["high"]) == (-1.0, None, None)


# Whole comparisons


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A comparison with tuning and speeds, in this process."""
    out = tmp_path_factory.mktemp("finished") / "out"
    tune = {"learning_rates": [1e-3, 4e-3], "fraction": 0.5, "extensions": 0, "check_full_length": False}
    entries = {"dense": "dense", "low_rank": "low_rank:rank=4"}
    recipe = small(text, entries=entries, tune=tune, speed={"seconds": 0.01, "rounds": 3})
    events = []
    results = compare(recipe, out, workers=0, on_progress=events.append)
    return out, recipe, results, events


def test_results_hold_what_was_asked(finished):
    out, _recipe, results, events = finished
    assert json.loads((out / "results.json").read_text()) == json.loads(json.dumps(results))
    assert [entry["name"] for entry in results["entries"]] == ["dense", "low_rank"]
    for entry in results["entries"]:
        assert [run["seed"] for run in entry["runs"]] == [0, 1]
        values = [run["validation_loss"] for run in entry["runs"]]
        assert entry["validation_loss"]["mean"] == pytest.approx(sum(values) / 2)
        assert entry["validation_loss"]["std"] == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2))
        assert values[0] != values[1]
        assert [point["step"] for point in entry["runs"][0]["curve"] if "validation_loss" in point] == [0, 2, 4]
        assert entry["learning_rate"] in (1e-3, 4e-3)
        assert entry["tuning"]["edge"]
        assert len(entry["tuning"]["trials"]) == 2
        model = relinear.from_pretrained(out / "runs" / entry["name"] / "seed-0" / "model")
        assert entry["flops_per_token"] == relinear.summary(model).flops_per_token
    assert results["entries"][0]["speed"]["train_ratio"] == 1
    assert any("edge of the grid" in note for note in results["notes"])
    assert {event.stage for event in events} >= {"match", "tune", "train", "speed"}  # and "data", unless it is cached


def test_every_run_leaves_the_losses_of_its_blocks(finished):
    out, _recipe, results, _ = finished
    for entry in results["entries"]:
        for run in entry["runs"]:
            blocks = np.load(out / "runs" / entry["name"] / f"seed-{run['seed']}" / "block_losses.npy")
            assert blocks.shape == (10,)
            assert blocks.mean() == pytest.approx(run["validation_loss"], rel=1e-5)


def test_the_ngram_line_counts_what_the_first_seed_saw(finished, text):
    out, recipe, results, _ = finished
    counted = results["ngram"]
    assert (counted["order"], counted["tokens"]) == (5, 4 * 2 * 32)  # bytes; steps, batch, length
    data = prepare_data(recipe["train"]["data"])
    seen = [data.train[i]["input_ids"].numpy() for i in SteadySampler(len(data.train), 8, 0)]
    held_out = np.stack([block["input_ids"].numpy() for block in data.validation])
    expected = KneserNey(np.stack(seen), data.vocab_size, 5).losses(held_out).mean()
    assert counted["validation_loss"] == pytest.approx(expected)
    assert json.loads((out / "ngram.json").read_text()) == counted


@pytest.fixture(scope="module")
def judged(text, tmp_path_factory):
    """A comparison with a reference, tuned initialisations and a check at full length."""
    out = tmp_path_factory.mktemp("judged") / "out"
    tune = {"learning_rates": [1e-3, 4e-3], "initializer_range": [0.05, 0.1], "fraction": 0.5, "extensions": 0}
    entries = {
        "dense": "dense",
        "low_rank": {
            "operator": "low_rank:rank=4",
            "duration": 1.5,
            "set": {"model_overrides.initializer_range": 0.02},
        },
    }
    recipe = small(text, entries=entries, tune=tune | {"check_full_length": True}, match="width", reference="dense")
    recipe["train"] |= {"eval_every": 0, "save_model": False}
    return out, recipe, compare(recipe, out, workers=0)


def test_gaps_are_paired_and_stated(judged, capsys, monkeypatch):
    monkeypatch.setattr("relinear.compare.report.save_panels", lambda panels, stem: None)
    out, _recipe, results = judged
    losses = {e["name"]: [run["validation_loss"] for run in e["runs"]] for e in results["entries"]}
    gaps = {e["name"]: e["gap"] for e in results["entries"]}
    assert gaps["dense"] is None
    pairs = zip(losses["low_rank"], losses["dense"], strict=True)
    assert gaps["low_rank"]["values"] == pytest.approx([a - b for a, b in pairs], abs=1e-5)
    assert gaps["low_rank"]["low"] <= gaps["low_rank"]["mean"] <= gaps["low_rank"]["high"]
    assert gaps["low_rank"]["blocks"] == 10
    for run in (run for entry in results["entries"] for run in entry["runs"]):
        assert len(run["block_losses"]) == 10
        assert sum(run["block_losses"]) / 10 == pytest.approx(run["validation_loss"], abs=1e-4)
    warned = any(note.startswith("Evaluation too small for the gaps discussed:") for note in results["notes"])
    assert warned == bool(too_small({name: found for name, found in gaps.items() if found}))
    assert main(["report", str(out)]) == 0
    assert "gap to dense" in capsys.readouterr().out
    assert "gap to dense" in (out / "report.html").read_text()


def test_initialisations_are_tuned_for_every_entry_that_brings_none(judged):
    out, _recipe, results = judged
    for entry in results["entries"]:
        spread = entry["settings"]["model_overrides"].get("initializer_range")
        tried = {t.get("initializer_range") for t in entry["tuning"]["trials"]}
        if entry["name"] == "low_rank":
            assert (spread, tried) == (0.02, {None})
        else:
            assert tried == {0.02, 0.05, 0.1}
            assert spread == entry["tuning"]["initializer_range"]
        full = entry["tuning"]["full_length"]
        assert len(full["trials"]) == 3
        assert entry["learning_rate"] == min(full["trials"], key=lambda t: t["validation_loss"])["learning_rate"]
        steps = 6 if entry["name"] == "low_rank" else 4
        assert {t["steps"] for t in full["trials"]} == {steps}
        assert {t["steps"] for t in entry["tuning"]["trials"]} == {steps // 2}
        assert entry["runs"][0]["steps"] == steps
        run = json.loads((out / "runs" / entry["name"] / "seed-1" / "run.json").read_text())
        assert run["settings"]["model_overrides"].get("initializer_range") == spread


def test_tuning_at_full_length_leaves_the_check_only_what_was_not_run(text, tmp_path):
    tune = {"learning_rates": [1e-3, 2e-3, 4e-3], "fraction": 1.0, "extensions": 0, "check_full_length": True}
    entries = {"dense": "dense", "given": {"operator": "dense", "learning_rate": 2e-3}}
    recipe = small(text, entries=entries, tune=tune, match="width", seeds=[0])
    results = compare(recipe, tmp_path / "out", workers=0)
    tuned, given = (entry["tuning"] for entry in results["entries"])
    assert tuned["full_length"]["trials"][:3] == tuned["trials"]  # and what lies beyond the grid, if anything
    assert len(given["full_length"]["trials"]) == 3
    whole = {name: len(list((tmp_path / "out" / "tuning" / name).glob("full-length-*"))) for name in entries}
    assert whole == {"dense": 0, "given": 3}


def test_initialisations_of_a_model_that_brings_its_weights_are_not_tuned(text, tmp_path):
    from relinear.models import from_preset

    from_preset("tiny", **WIDTH).save_pretrained(tmp_path / "model")
    recipe = small(text, tune={"initializer_range": True})
    recipe["train"] = {k: v for k, v in recipe["train"].items() if k != "model_overrides"}
    recipe["train"]["model"] = str(tmp_path / "model")
    with pytest.raises(ValueError, match=r"dense: tune.initializer_range needs a preset"):
        compare(recipe, tmp_path / "out", workers=0)
    assert not (tmp_path / "out").exists()


def test_started_again_nothing_is_done_again(finished):
    out, recipe, results, _ = finished
    events = []
    assert compare(recipe, out, workers=0, on_progress=events.append) == results
    assert events == []


def test_a_changed_recipe_is_refused_with_the_difference(finished):
    out, recipe, _, _ = finished
    before = (out / "results.json").read_bytes()
    with pytest.raises(ValueError, match=r"train.steps: 4 -> 5") as caught:
        compare(recipe | {"train": recipe["train"] | {"steps": 5}}, out)
    assert "entries" not in str(caught.value)
    assert (out / "results.json").read_bytes() == before


def test_overwriting_renames_what_was_there(text, tmp_path):
    recipe = small(text, entries={"dense": "dense"}, match="width", seeds=[0])
    compare(recipe, tmp_path / "out", workers=0)
    recipe["train"] |= {"learning_rate": 0.1}
    with pytest.raises(ValueError, match=r"other settings(.|\n)*train.learning_rate: 0.001 -> 0.1"):
        compare(recipe, tmp_path / "out", workers=0)
    again = compare(recipe, tmp_path / "out", workers=0, overwrite=True)
    assert again["entries"][0]["learning_rate"] == 0.1
    (before,) = (tmp_path / "out").glob("results.json.*")
    assert json.loads(before.read_text())["entries"][0]["learning_rate"] == 0.001


def test_lost_results_are_made_again_from_the_runs(finished):
    out, recipe, results, _ = finished
    (out / "results.json").unlink()
    again = compare(recipe, out, workers=0)
    assert losses(again) == losses(results)
    assert [e["speed"] for e in again["entries"]] == [e["speed"] for e in results["entries"]]


def test_report_is_self_contained_and_escapes(drawn, finished):
    from relinear.compare.report import write_report

    out = finished[0]
    values = json.loads((out / "results.json").read_text())
    values["description"] = "<script>alert(1)</script>"
    (out / "results.json").write_text(json.dumps(values))
    page = write_report(out).read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
    assert page.count("data-figure=") >= 4
    assert sorted(p.name for p in (out / "plots").glob("*.svg")) == [
        "curves.svg",
        "pareto.svg",
        "speeds.svg",
        "tuning.svg",
    ]


def test_an_entry_that_diverges_ends_none_of_the_others(text, tmp_path, capsys):
    wild = {"operator": "low_rank:rank=4", "learning_rate": 1e30}
    recipe = small(text, entries={"wild": wild}, seeds=[0], match="width", speed={"seconds": 0})
    recipe["train"] |= {"max_grad_norm": 0, "schedule": "constant", "warmup_steps": 0, "steps": 10, "eval_every": 0}
    recipe["train"]["save_model"] = False
    with pytest.raises(ValueError, match=r"wild: training diverged at the learning rate 1e\+30"):
        compare(recipe, tmp_path / "alone", workers=0)
    assert not (tmp_path / "alone" / "results.json").exists()
    recipe["entries"] |= {"dense": "dense"}
    recipe["reference"] = "wild"
    results = compare(recipe, tmp_path / "out", workers=0)
    assert [entry["name"] for entry in results["entries"]] == ["dense"]
    assert results["diverged"] == [{"name": "wild", "text": "training diverged at the learning rate 1e+30"}]
    assert "wild has no results: training diverged at the learning rate 1e+30." in results["notes"]
    assert results["entries"][0]["gap"] is None
    print_results(results)
    assert re.search(r"wild +diverged", capsys.readouterr().out)
    # and over budgets
    recipe = recipe | {"budgets": [256, 512], "reference": "dense"}
    del recipe["train"]["steps"]
    results = compare(recipe, tmp_path / "budgets", workers=0)
    assert [[entry["name"] for entry in row["entries"]] for row in results["budgets"]] == [["dense"], ["dense"]]
    assert "diverged" in write_report(tmp_path / "budgets").read_text()


def test_two_processes_in_one_directory_are_refused(text, tmp_path, monkeypatch):
    from filelock import FileLock

    monkeypatch.setattr("relinear.system.lock._PATIENCE", 0.1)
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / LOCK), pytest.raises(ValueError, match="another process is at work"):
        compare(small(text), tmp_path / "out", workers=0)


RUN = "import json, sys; from relinear.compare.run import compare; compare(json.loads(sys.argv[1]), sys.argv[2])"


def start(recipe, out, log):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen([sys.executable, "-c", RUN, json.dumps(recipe), str(out)], env=environment, stderr=log)


def _processes_in(out):
    """Command lines of living processes that mention ``out`` or work below it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            handles = [os.readlink(handle) for handle in (folder / "fd").iterdir()]
        except OSError:
            continue
        if any(handle.startswith(f"{out}/") and not handle.endswith("stderr") for handle in handles):
            found.append(folder.name)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_killed_and_started_again_gives_the_same_bits(text, tmp_path):
    recipe = small(text, tune={"learning_rates": [1e-3, 4e-3], "extensions": 0})
    recipe["train"] |= {"steps": 60, "save_every": 10, "eval_every": 20}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with (tmp_path / "stderr").open("w") as log:
        assert start(recipe, whole, log).wait() == 0
        for _ in range(3):  # while tuning or in some run, wherever the clock falls
            process = start(recipe, broken, log)
            seen = set(broken.rglob("checkpoint-*"))
            deadline = time.monotonic() + 120
            while process.poll() is None and time.monotonic() < deadline:
                if set(broken.rglob("checkpoint-*")) - seen:
                    break
                time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
            process.wait()
            deadline = time.monotonic() + 20  # on a busy machine a killed process takes seconds to end
            while (running := _processes_in(broken)) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert running == []  # the worker and its run have died too
        assert not (broken / "results.json").exists()
        assert start(recipe, broken, log).wait() == 0
    first, second = (json.loads((out / "results.json").read_text()) for out in (whole, broken))
    for a, b in zip(first["entries"], second["entries"], strict=True):
        same = ("name", "operators", "parameters", "flops_per_token", "size_mismatch", "learning_rate", "tuning")
        same += ("validation_loss", "perplexity", "initial_perplexity")
        assert {key: a[key] for key in same} == {key: b[key] for key in same}
        for run, other in zip(a["runs"], b["runs"], strict=True):
            assert run["curve"] == other["curve"]


@pytest.mark.slow
def test_isolated_runs_equal_those_in_process(text, tmp_path):
    recipe = small(text, seeds=[0], speed={"seconds": 0.5, "rounds": 3})
    here = compare(recipe, tmp_path / "here", workers=0)
    there = compare(recipe, tmp_path / "there")
    assert losses(here) == losses(there)
    assert all(entry["peak_memory_bytes"] > 0 for entry in there["entries"])


# Budgets


@pytest.fixture(scope="module")
def over_budgets(text, tmp_path_factory):
    """Three budgets with a warm-up, tuned at the smallest."""
    out = tmp_path_factory.mktemp("budgets") / "out"
    tune = {"learning_rates": [1e-3, 4e-3], "initializer_range": [0.02, 0.1], "fraction": 1, "extensions": 0}
    tune["check_full_length"] = False  # at the second budget alone
    recipe = small(text, entries={"dense": "dense", "low_rank": "low_rank:rank=4"}, match="width", seeds=[0])
    recipe |= {"budgets": ["0.512k", 128, 256], "reference": "dense", "tune": tune}
    recipe["train"] = {key: value for key, value in recipe["train"].items() if key != "steps"}
    recipe["train"] |= {"warmup_steps": 4, "eval_every": 4, "save_model": False}
    return out, recipe, compare(recipe, out, workers=0)


def test_every_budget_has_whole_schedules_and_its_own_gaps(over_budgets, capsys):
    out, _recipe, results = over_budgets
    assert [budget["tokens"] for budget in results["budgets"]] == [128, 256, 512]
    for budget, steps in zip(results["budgets"], (2, 4, 8), strict=True):
        for entry in budget["entries"]:
            run = json.loads((out / budget["folder"] / "runs" / entry["name"] / "seed-0" / "run.json").read_text())
            found = {key: run["settings"][key] for key in ("steps", "warmup_steps", "eval_every", "learning_rate")}
            places = {"warmup_steps": steps // 2, "eval_every": steps // 2}
            assert found == {"steps": steps, "learning_rate": entry["learning_rate"]} | places
        assert budget["entries"][1]["gap"]["blocks"] == 10
        assert budget["ngram"]["tokens"] == budget["tokens"]
    last = results["budgets"][-1]["entries"]
    assert [entry["validation_loss"] for entry in results["entries"]] == [entry["validation_loss"] for entry in last]
    assert json.loads((out / "results.json").read_text()) == json.loads(json.dumps(results))
    assert main(["report", str(out)]) == 0
    assert "Gap to dense by budget" in capsys.readouterr().out
    assert "Gap to dense by budget" in (out / "report.html").read_text()
    assert (out / "plots" / "budgets.svg").is_file()


@pytest.mark.slow
def test_warm_up_is_tuned_with_the_rate_and_handed_on(text, tmp_path):
    tune = {"learning_rates": [1e-3, 4e-3], "warmup_ratio": [0.25, 0.5]}
    entries = {"low_rank": "low_rank:rank=4", "own": {"set": {"warmup_steps": 2}}}
    recipe = small(text, entries=entries, match="width", seeds=[0], speed={"seconds": 0})
    tune |= {"fraction": 1, "extensions": 0, "check_full_length": False}
    recipe |= {"budgets": [256, 512], "reference": "own", "tune": tune}
    recipe["train"] = {key: value for key, value in recipe["train"].items() if key != "steps"}
    recipe["train"] |= {"eval_every": 0, "save_model": False}
    results = compare(recipe, tmp_path / "out", workers=0)
    for budget, steps in zip(results["budgets"], (4, 8), strict=True):
        for entry in budget["entries"]:
            run = json.loads(
                (tmp_path / "out" / budget["folder"] / "runs" / entry["name"] / "seed-0/run.json").read_text()
            )
            assert run["settings"]["warmup_ratio"] == entry["warmup_ratio"]
            if entry["name"] == "own":
                assert run["settings"]["warmup_steps"] == steps // 4
                assert "warmup_ratio" not in entry["tuning"]
            else:
                assert run["settings"]["warmup_steps"] is None
                assert run["settings"]["steps"] == steps
                assert entry["warmup_ratio"] in (0.25, 0.5)
    first, second = results["budgets"]
    a, b = first["entries"][0], second["entries"][0]
    assert {trial["warmup_ratio"] for trial in a["tuning"]["trials"]} == {0.25, 0.5}
    best = min(a["tuning"]["trials"], key=lambda trial: trial["validation_loss"])
    assert (best["warmup_ratio"], best["learning_rate"]) == (a["warmup_ratio"], a["learning_rate"])
    assert a["warmup_ratio"] == b["warmup_ratio"]
    assert any("Warm-up was tuned, too" in note for note in results["notes"])
    assert compare(recipe, tmp_path / "out", workers=0) == results


def test_a_fault_is_no_divergence_of_a_warm_up_and_the_search_is_gone_on_with(text, tmp_path, monkeypatch):
    tune = {"learning_rates": [1e-3, 4e-3], "warmup_ratio": [0.25, 0.5]}
    recipe = small(text, entries={"dense": "dense"}, match="width", seeds=[0], speed={"seconds": 0})
    recipe["tune"] = tune | {"fraction": 1, "extensions": 0, "check_full_length": True}
    run = engine.run_once

    def full_disk(settings, folder):
        if settings["warmup_ratio"] == 0.5:
            raise ValueError("No space left on device")
        return run(settings, folder)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "run_once", full_disk)
        with pytest.raises(ValueError, match="No space left"):
            compare(recipe, tmp_path / "out", workers=0)
    results = compare(recipe, tmp_path / "out", workers=0)
    trials = results["entries"][0]["tuning"]["trials"]
    assert {trial["warmup_ratio"] for trial in trials} == {0.25, 0.5}
    made = len(list((tmp_path / "out" / "tuning" / "dense").glob("*/run.json")))
    assert f"Runs of tuning: dense {made}." in results["notes"]  # those that hold the rate at full length count once


def test_one_warm_up_is_given():
    assert TrainSettings(steps=200, warmup_ratio=0.5).warmup == 100
    assert TrainSettings(steps=200, schedule="onecycle", warmup_ratio=0.0).warmup == 0
    with pytest.raises(ValueError, match="both say how long the warm-up is; give one of them"):
        TrainSettings(warmup_steps=3, warmup_ratio=0.5)


def test_what_the_smallest_budget_found_is_checked_at_the_next_and_handed_on(over_budgets):
    first, second, third = over_budgets[2]["budgets"]
    for a, b, c in zip(first["entries"], second["entries"], third["entries"], strict=True):
        assert {t["initializer_range"] for t in a["tuning"]["trials"]} == {0.02, 0.1}
        assert a["initializer_range"] == b["initializer_range"] == c["initializer_range"]
        checked = b["tuning"]["full_length"]
        assert checked["from"] == a["learning_rate"]
        assert len(checked["trials"]) == 3
        assert {t["steps"] for t in checked["trials"]} == {4}
        assert c["learning_rate"] == b["learning_rate"]
        assert c["tuning"] is None


def test_budgets_go_on_where_they_were(over_budgets):
    out, recipe, results = over_budgets
    (out / "results.json").unlink()
    (out / "budgets" / "512" / "results.json").unlink()
    events = []
    again = compare(recipe, out, workers=0, on_progress=events.append)
    assert again["budgets"] == results["budgets"]
    assert {event.stage for event in events} <= {"match", "data", "train", "ngram"}
    assert max(event.runs for event in events) <= 2  # of the last budget alone, and those are there


def test_the_plan_counts_the_least_runs_that_tune(over_budgets):
    out, recipe, _ = over_budgets
    planned = compare_requirements(CompareSettings.load(recipe), 1, timed=False)["runs"]
    # for each entry four at the smallest budget, and three to check the rate at the next
    assert planned == "2 entries on 1 seed at 3 sizes or budgets: 6 and at least 14 to tune, 1 at once"
    assert len(list(out.glob("budgets/*/tuning/*/*/run.json"))) >= 14


def test_every_budget_may_be_tuned(text):
    recipe = CompareSettings.load(
        {"entries": {"dense": "dense"}, "budgets": ["1M", "2.5M"], "reference": "dense", "tune": {"at": "each"}}
    )
    assert recipe.budgets == (1_000_000, 2_500_000)
    assert [each.tune for each in recipes_of_series(recipe, VOCABULARY)] == [recipe.tune] * 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reference": None}, "set reference"),
        ({"tokens": 5000}, "give the budget once: tokens or budgets"),
        ({"train": {"steps": 9}}, "give the budget once: budgets or train.steps"),
        ({"budgets": [100, 100]}, "come twice"),
        ({"budgets": ["3X"]}, "is not a number of tokens"),
        ({"entries": {"dense": {"set": {"steps": 9}}}}, "use duration"),
        ({"widths": [8, 16, 24, 32]}, "not both"),
    ],
)
def test_wrong_budgets(changes, said):
    recipe = {"entries": {"dense": "dense"}, "budgets": [100, 200], "reference": "dense"}
    with pytest.raises(ValueError, match=said):
        CompareSettings.load(recipe | changes)


# Sizes


def made_up_speeds(settings, reference, *_):
    """What ``measure_speed`` would return if speed fell with the width."""
    widths = {name: values["model_overrides"]["hidden_size"] for name, values in settings.items()}
    found = {"reference": reference, "rounds": 3, "processor": "none"}
    speeds = {f"{mode}_{what}" for mode in ("train", "inference") for what in ("ratio", "tokens_per_second")}
    return {name: found | dict.fromkeys(speeds, 1e6 / width) for name, width in widths.items()}


@pytest.fixture(scope="module")
def scaled(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("sizes") / "out"
    recipe = small(text, entries={"dense": "dense", "low_rank": "low_rank:rank=4"}, match="width", seeds=[0])
    recipe |= {"widths": [16, 32, 48, 64], "reference": "dense", "speed": {"seconds": 1, "rounds": 3}}
    recipe["train"] |= {"save_model": False, "learning_rate": 0.01, "eval_every": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("relinear.compare.run.measure_speed", made_up_speeds)
        return out, recipe, compare(recipe, out, workers=0)


def test_sizes_have_dense_controls_and_grow_together(scaled, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # in narrow tables the words that are looked for may be on two lines
    out, recipe, results = scaled
    entries = {entry["name"]: entry for entry in results["entries"]}
    assert list(entries) == ["dense", "low_rank", "dense-narrower", "dense-shallower"]
    assert [e["dense"] for e in entries.values()] == [True, False, True, True]
    sized = recipes_of_series(CompareSettings.load(recipe), VOCABULARY)[-1]
    settings = {name: sized.settings_of(name) for name in sized.entries}
    assert {name: s.model_overrides["hidden_size"] for name, s in settings.items()} == {
        "dense": 64,
        "low_rank": 64,
        "dense-narrower": 48,
        "dense-shallower": 64,
    }
    assert settings["dense-shallower"].model_overrides["num_hidden_layers"] == 1
    assert settings["dense"].model_overrides["intermediate_size"] == 128
    assert settings["low_rank"].operators["all-linear"]["rank"] == 8
    for entry in results["entries"]:
        flops = [point["flops"] for point in entry["points"]]
        assert flops == sorted(flops)
        assert [point["tokens"] for point in entry["points"]] == [256] * 4
    verdicts = [line for line in results["verdicts"] if line.startswith("low_rank")]
    assert len(verdicts) == 6
    # by time the ranges of tiny models may not overlap
    assert all("[" not in line and ("one seed, no intervals" in line or "no range" in line) for line in verdicts)
    assert sum("one seed, no intervals" in line for line in verdicts) >= 3
    assert all(entry["flops"]["fit"]["b_interval"] is None for entry in results["entries"])
    assert json.loads((out / "scale.json").read_text()) == json.loads(json.dumps(results))
    assert compare(recipe, out, workers=0) == json.loads(json.dumps(results))
    assert main(["report", str(out)]) == 0
    assert "loss at width" in capsys.readouterr().out
    assert (out / "plots" / "scale.svg").is_file()
    assert "loss = a x^-b" in (out / "report.html").read_text()


def test_a_power_law_is_found_again_and_crossings_are_where_they_are():
    x = np.asarray([1e9, 3e9, 1e10, 3e10])
    steep, flat = 20 * x**-0.1, 5 * x**-0.04
    fits = [fit_power_law(x, np.stack([y, y * 1.01], axis=1)) for y in (steep, flat)]
    assert fits[0][1] == pytest.approx([0.1, 0.1])
    assert np.exp(fits[0][0]) == pytest.approx([20, 20.2])
    meeting = (20 / 5) ** (1 / 0.06)
    assert crossing(*fits, 1e9, 1e11) == pytest.approx([meeting] * 2)
    assert np.isnan(crossing(*fits, 1e11, 1e12)).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"widths": [16, 32, 48]}, "must be a list of at least 4"),
        ({"match": "parameters"}, "leave match at width"),
        ({"entries": {"a": "low_rank:rank=4"}, "reference": "a"}, "dense entry"),
        ({"tokens": 5000, "widths": {"widths": [16, 32, 48, 64], "tokens_per_parameter": 20}}, "give the budget once"),
    ],
)
def test_wrong_sizes(changes, said):
    recipe = {"entries": {"dense": "dense"}, "widths": [16, 32, 48, 64], "reference": "dense"}
    with pytest.raises(ValueError, match=said):
        CompareSettings.load(recipe | changes)


def test_widths_are_read_under_their_old_name():
    recipe = {"entries": {"dense": "dense"}, "reference": "dense"}
    widths = CompareSettings.load(recipe | {"widths": [16, 32, 48, 64]})
    earlier = recipe | {"sizes": {"widths": [16, 32, 48, 64]}}
    with pytest.warns(DeprecationWarning, match="sizes has a new name: widths"):
        assert CompareSettings.load(earlier) == widths
    for written, key in ((earlier, "widths"), (recipe | {"widths": earlier["sizes"]}, "sizes")):
        changed = change_recipe(written, {f"{key}.tokens_per_parameter": 20})
        assert changed["widths"] == {"widths": [16, 32, 48, 64], "tokens_per_parameter": 20}
