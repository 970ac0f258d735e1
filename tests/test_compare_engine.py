"""The comparison: matching, tuning, resuming, what it writes."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import relinear
from relinear.compare.match import matched, measure_size
from relinear.compare.run import compare, plan_comparison
from relinear.compare.settings import CompareSettings, Tune
from relinear.compare.tune import open_study, tune_learning_rate
from relinear.train.run import build_model
from relinear.train.settings import TrainSettings

VOCABULARY = 258
WIDTH = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(f"paragraph {i} says {i * i} and {i % 7}" for i in range(600)))
    return path


def small(text, **changes):
    """A comparison of three entries that takes a second or two."""
    train = {
        "model": "tiny",
        "model_overrides": WIDTH,
        "data": {"data": str(text), "sequence_length": 32, "max_validation_tokens": 640},
        "steps": 4,
        "batch_size": 2,
        "eval_every": 2,
        "dtype": "float32",
        "threads": 1,
    }
    recipe = {
        "name": "small",
        "entries": {"dense": "dense", "low_rank": "low_rank:rank=4", "hdpl": "hdpl:rank=4,blocks=8"},
        "train": train,
        "seeds": [0, 1],
        "match": "parameters",
        "speed": {"seconds": 0},
    }
    return recipe | changes


def losses(results):
    return {e["name"]: [run["validation_loss"] for run in e["runs"]] for e in results["entries"]}


# Sizes


def test_sizes_are_those_of_the_model_that_is_trained():
    settings = TrainSettings(model_overrides=WIDTH, operators={"all-linear": "low_rank:rank=4"})
    size = measure_size(settings, VOCABULARY)
    model = build_model(settings, VOCABULARY)
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert size.flops == relinear.summary(model).flops_per_token


@pytest.mark.parametrize("written", ["low_rank:rank=8", "monarch:blocks=8,rank=8", "hdpl:blocks=8,rank=8"])
@pytest.mark.parametrize("by", ["parameters", "flops"])
@pytest.mark.parametrize("factor", [0.8, 1.3])
def test_matching_finds_the_nearest_size(written, by, factor):
    settings = TrainSettings(operators={"all-linear": written})
    target = round(factor * measure_size(settings, VOCABULARY).of(by))
    found, size = matched(settings, VOCABULARY, by=by, target=target, how="operator", tolerance=0.05, name="x")
    assert size == measure_size(found, VOCABULARY)
    # No other rank comes nearer.
    (operator,) = found.operators.values()
    for other in (operator["rank"] - 1, operator["rank"] + 1):
        if other >= 1:
            changed = found.updated(operators={"all-linear": operator | {"rank": other}})
            assert abs(measure_size(changed, VOCABULARY).of(by) - target) >= abs(size.of(by) - target)


@pytest.mark.parametrize("model", ["tiny", "gpt2-ccl-64"])
def test_matching_by_width(model):
    settings = TrainSettings(model=model, data={"sequence_length": 32})
    target = round(0.6 * measure_size(settings, VOCABULARY).parameters)
    found, size = matched(
        settings, VOCABULARY, by="parameters", target=target, how="width", tolerance=0.1, name="dense"
    )
    assert size.parameters == sum(p.numel() for p in build_model(found, VOCABULARY).parameters())
    assert size.parameters == pytest.approx(target, rel=0.1)


def test_a_match_out_of_reach_says_how_near_it_came():
    settings = TrainSettings(operators={"all-linear": "low_rank:rank=4"})
    with pytest.raises(ValueError, match=r"low: no operator size gives 10 parameters within 2.0%; the nearest has"):
        matched(settings, VOCABULARY, by="parameters", target=10, how="operator", tolerance=0.02, name="low")


def test_all_entries_are_matched_to_the_first_with_operators(text):
    planned = plan_comparison(CompareSettings.load(small(text)), VOCABULARY)
    dense, low_rank, hdpl = planned
    assert dense.deviation is None
    assert low_rank.deviation == 0
    assert abs(hdpl.deviation) <= 0.02
    assert abs(hdpl.size.parameters / low_rank.size.parameters - 1) <= 0.02


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


# Tuning


def test_tuning_finds_the_minimum_and_grows_the_grid(tmp_path):
    tried = []

    def evaluate(rate):
        tried.append(rate)
        return None if rate > 0.5 else (math.log10(rate) + 1.3) ** 2

    tune = Tune(learning_rates=(1e-3, 2e-3, 4e-3), extensions=4)
    best, found = tune_learning_rate(tune, open_study(tmp_path, "x"), evaluate)
    assert tried == [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2]
    assert best == 6.4e-2
    assert found["edge"]  # the grid has grown as often as it may
    best, found = tune_learning_rate(tune.updated(extensions=6), open_study(tmp_path, "x"), evaluate)
    assert tried[7:] == [0.128]  # what the study has is not run again
    assert best == 6.4e-2
    assert not found["edge"]


def test_tuning_goes_on_after_a_kill(tmp_path):
    def killed(rate):
        if rate > 1:
            raise SystemExit
        return rate

    tune = Tune(learning_rates=(1.0, 2.0), extensions=0)
    with pytest.raises(SystemExit):
        tune_learning_rate(tune, open_study(tmp_path, "x"), killed)
    best, found = tune_learning_rate(tune, open_study(tmp_path, "x"), lambda rate: 1 / rate)
    assert best == 1.0 or best == 2.0
    assert [t["validation_loss"] for t in found["trials"]] == [1.0, 0.5]


def test_divergence_everywhere_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="diverged at every learning rate"):
        tune_learning_rate(Tune(), open_study(tmp_path, "x"), lambda rate: None)


# Whole comparisons


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A comparison with tuning and speeds, in this process."""
    out = tmp_path_factory.mktemp("finished") / "out"
    tune = {"learning_rates": [1e-3, 4e-3], "fraction": 0.5, "extensions": 0}
    recipe = small(text, tune=tune, speed={"seconds": 0.5, "rounds": 3})
    events = []
    results = compare(recipe, out, isolate=False, on_event=events.append)
    return out, recipe, results, events


def test_results_hold_what_was_asked(finished):
    out, _recipe, results, events = finished
    assert json.loads((out / "results.json").read_text()) == json.loads(json.dumps(results))
    assert [entry["name"] for entry in results["entries"]] == ["dense", "low_rank", "hdpl"]
    for entry in results["entries"]:
        assert [run["seed"] for run in entry["runs"]] == [0, 1]
        values = [run["validation_loss"] for run in entry["runs"]]
        assert entry["validation_loss"]["mean"] == pytest.approx(sum(values) / 2)
        assert entry["validation_loss"]["spread"] == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2))
        assert values[0] != values[1]
        assert [point["step"] for point in entry["runs"][0]["curve"] if "validation_loss" in point] == [0, 2, 4]
        assert entry["learning_rate"] in (1e-3, 4e-3)
        assert entry["tuning"]["edge"]
        assert len(entry["tuning"]["trials"]) == 2
    assert results["entries"][0]["speed"]["train_ratio"] == 1
    assert any("edge of the grid" in note for note in results["notes"])
    assert {event.stage for event in events} >= {"match", "tune", "train", "speed"}  # and "data", unless it is cached


def test_started_again_nothing_is_done_again(finished):
    out, recipe, results, _ = finished
    events = []
    assert compare(recipe, out, isolate=False, on_event=events.append) == results
    assert events == []


def test_a_changed_recipe_is_refused_with_the_difference(finished):
    out, recipe, _, _ = finished
    before = (out / "results.json").read_bytes()
    with pytest.raises(ValueError, match=r"train.steps: 4 -> 5") as caught:
        compare(recipe | {"train": recipe["train"] | {"steps": 5}}, out)
    assert "entries" not in str(caught.value)
    assert (out / "results.json").read_bytes() == before


def test_lost_results_are_made_again_from_the_runs(finished):
    out, recipe, results, _ = finished
    (out / "results.json").unlink()
    again = compare(recipe, out, isolate=False)
    assert losses(again) == losses(results)
    assert [e["speed"] for e in again["entries"]] == [e["speed"] for e in results["entries"]]


def test_report_is_self_contained_and_escapes(finished):
    from relinear.compare.report import write_report

    out = finished[0]
    values = json.loads((out / "results.json").read_text())
    values["description"] = "<script>alert(1)</script>"
    (out / "results.json").write_text(json.dumps(values))
    page = write_report(out).read_text()
    assert "<script>" not in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
    assert page.count("data:image/svg+xml;base64,") == 4
    assert sorted(p.name for p in (out / "plots").glob("*.svg")) == [
        "curves.svg",
        "pareto.svg",
        "speeds.svg",
        "tuning.svg",
    ]


def test_a_diverged_run_names_its_entry(text, tmp_path):
    recipe = small(text, entries={"wild": {"operator": "low_rank:rank=4", "set": {"learning_rate": 1e30}}}, seeds=[0])
    recipe["train"] |= {"max_grad_norm": 0, "schedule": "constant", "warmup_steps": 0, "steps": 30, "eval_every": 0}
    with pytest.raises(ValueError, match=r"wild: the (training|validation) loss is nan"):
        compare(recipe, tmp_path / "out", isolate=False)
    assert not (tmp_path / "out" / "results.json").exists()


def test_two_processes_in_one_directory_are_refused(text, tmp_path):
    from filelock import FileLock

    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"), pytest.raises(ValueError, match="another process is at work"):
        compare(small(text), tmp_path / "out", isolate=False)


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
            time.sleep(0.5)
            assert _processes_in(broken) == []  # the worker and its run have died too
        assert not (broken / "results.json").exists()
        assert start(recipe, broken, log).wait() == 0
    first, second = (json.loads((out / "results.json").read_text()) for out in (whole, broken))
    for a, b in zip(first["entries"], second["entries"], strict=True):
        same = ("name", "operators", "parameters", "flops_per_token", "deviation", "learning_rate", "tuning")
        same += ("validation_loss", "perplexity", "initial_perplexity")
        assert {key: a[key] for key in same} == {key: b[key] for key in same}
        for run, other in zip(a["runs"], b["runs"], strict=True):
            assert run["curve"] == other["curve"]


@pytest.mark.slow
def test_isolated_runs_equal_those_in_process(text, tmp_path):
    recipe = small(text, seeds=[0], speed={"seconds": 0.5, "rounds": 3})
    here = compare(recipe, tmp_path / "here", isolate=False)
    there = compare(recipe, tmp_path / "there")
    assert losses(here) == losses(there)
    assert all(entry["peak_memory_bytes"] > 0 for entry in there["entries"])
