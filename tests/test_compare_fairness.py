"""What would make a comparison unfair in silence: other budgets, other text, other machines, settings that overrule."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from compare_helpers import made, trials_in
from relinear.compare import engine
from relinear.compare.engine import run_search
from relinear.compare.results import comparison_result
from relinear.compare.run import compare
from relinear.compare.series import recipe_at, recipes_of_series, series_results
from relinear.compare.settings import CompareSettings, TuneSettings
from relinear.compare.speed import _throughput
from relinear.compare.tune import check_neighbors
from relinear.deprecated import with_new_columns
from relinear.system.files import read_json, write_json
from relinear.system.timing import Timing
from relinear.training.run import read_result
from relinear.training.settings import TrainSettings
from relinear_cli.main import main

WIDTH = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TRAIN = {"model": "tiny", "batch_size": 8, "data": {"sequence_length": 32}}


def recipe(**changes):
    values = {"entries": {"dense": "dense", "low_rank": "low_rank:rank=4"}, "train": TRAIN}
    return CompareSettings.load(values | changes)


# Budgets


def test_an_entry_with_another_batch_is_trained_on_as_many_tokens():
    entries = {"dense": "dense", "large": {"set": {"batch_size": 32}}, "twice": {"set": {"accumulation": 2}}}
    found = recipe(entries=entries, tokens=100_000)
    steps = {name: found.settings_of(name).steps for name in entries}
    assert steps == {"dense": 391, "large": 98, "twice": 196}
    planned = [
        SimpleNamespace(name=name, settings=found.settings_of(name), size=None, size_mismatch=None) for name in entries
    ]
    data = SimpleNamespace(description={"splits": {"train": {"tokens": 1_000_000}}})
    said = comparison_result(found, data, planned, [], {})["budget"]
    assert "391 steps of 256 tokens" in said
    assert "Other steps: large for 98 of 1,024, twice for 196 of 512." in said


def test_warm_up_and_evaluations_keep_their_places_with_another_batch():
    entries = {
        "dense": "dense",
        "large": {"set": {"batch_size": 32}},
        "own": {"set": {"batch_size": 32, "eval_every": 7}},
    }
    train = TRAIN | {"warmup_steps": 40, "eval_every": 100}
    found = recipe(entries=entries, train=train, tokens=100_000)
    settings = {name: found.settings_of(name) for name in entries}
    assert {name: (s.steps, s.warmup_steps, s.eval_every) for name, s in settings.items()} == {
        "dense": (391, 40, 100),
        "large": (98, 10, 25),
        "own": (98, 10, 7),
    }
    in_steps = recipe(entries=entries, train=train | {"steps": 400})
    assert {in_steps.settings_of(name).steps for name in entries} == {400}


def test_a_recipe_as_it_was_recorded_is_read_again():
    found = recipe(tokens=100_000)
    written = found.model_dump(mode="json")
    assert written["train"]["seed"] == 0
    kept = {key: value for key, value in written["train"].items() if key != "steps"}
    again = CompareSettings.load(written | {"train": kept})
    assert again.settings_of("dense") == found.settings_of("dense")
    assert CompareSettings.upgraded({key: value for key, value in written.items() if key != "speed"}) == written


def test_warm_up_may_be_longer_than_the_default_number_of_steps():
    train = TRAIN | {"warmup_steps": 2000}
    found = recipe(train=train, tokens=1_000_000)
    assert (found.settings_of("dense").steps, found.settings_of("dense").warmup_steps) == (3907, 2000)
    with pytest.raises(ValueError, match=r"entries\.dense.*warmup_steps=2000 must be below steps=391"):
        recipe(train=train, tokens=100_000)
    with pytest.raises(ValueError, match=r"warmup_steps=2000 must be below steps=1000"):
        recipe(train=train)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"entries": {"dense": {"set": {"learning_rate": 0.01}}}}, "the entry's own learning_rate"),
        ({"entries": {"dense": {"set": {"seed": 3}}}}, "the recipe's seeds"),
        ({"train": TRAIN | {"seed": 3}}, "a comparison has seeds"),
        ({"seeds": [0, 1000], "tune": True}, "one of seeds"),
    ],
)
def test_settings_that_would_be_overruled_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        recipe(**changes)


def test_speeds_are_of_tokens_where_batches_differ():
    small, large = (TrainSettings(batch_size=size, data={"sequence_length": 8}) for size in (2, 4))
    figures = _throughput("train", Timing(4.0, 2.0, 2.0, 2.0, 3), large, small)
    assert figures == {"train_ratio": 1, "train_tokens_per_second": 8}
    same = _throughput("train", Timing(2.0, 1.0, 1.0, 1.0, 3), small, small)
    assert same == {"train_ratio": 1, "train_tokens_per_second": 8}


def test_later_budgets_are_checked_where_the_recipe_asks_for_it_and_tell_of_edges():
    tune = {"learning_rates": [0.001, 0.002], "check_full_length": False}
    series = {"budgets": [1000, 2000, 4000], "reference": "dense"}
    chosen = [{"entries": [{"name": n, "learning_rate": 0.002, "tuning": None} for n in ("dense", "low_rank")]}]
    assert recipe_at(recipe(**series, tune=tune), 2, 258, chosen).tune is None
    checked = recipe(**series, tune=tune | {"check_full_length": True})
    assert recipe_at(checked, 2, 258, chosen).tune.check_full_length

    def at(index):
        at_one = recipe_at(recipe(**series, tune=tune), index, 258, chosen)
        tuned = {"edge": at_one.tokens == 2000, "trials": []} if at_one.tune else None
        entry = {"learning_rate": 0.002, "tuning": tuned, "validation_loss": {"mean": 2.0}, "gap": None, "runs": []}
        entries = [entry | {"name": name, "settings": {"model_overrides": {}}} for name in at_one.entries]
        return {"entries": entries, "ngram": None, "notes": []}

    notes = series_results(recipe(**series, tune=tune), [at(index) for index in range(3)], {})["notes"]
    assert [note for note in notes if "edge" in note] == [
        "At 2,000 tokens: The best learning rate lies at the edge of the grid for dense, low_rank: widen the grid."
    ]


# Tuning


def test_where_all_neighbours_diverge_the_way_is_down(tmp_path):
    settings = TuneSettings(learning_rates=(5e-4, 1e-3, 2e-3, 4e-3, 8e-3), extensions=1)
    trials = trials_in(tmp_path / "x", lambda rate, _: None if rate > 6e-4 else 1.0 / rate)
    assert run_search(check_neighbors(settings, trials, 4e-3), made).rate == 5e-4
    hopeless = trials_in(tmp_path / "y", lambda rate, _: None)
    with pytest.raises(ValueError, match="diverged"):
        run_search(check_neighbors(settings, hopeless, 4e-3), made)
    assert min(row["learning_rate"] for row in hopeless.rows()) == pytest.approx(2.5e-4)


# Sizes


def test_operators_that_an_entry_sets_by_name_grow_with_the_width():
    entry = {"operator": "low_rank:rank=8", "target": ["q_proj", "all-linear"], "set": {"operators.q_proj.rank": 4}}
    train = TRAIN | {"model_overrides": WIDTH | {"num_hidden_layers": 2}}
    found = recipe(entries={"dense": "dense", "mixed": entry}, train=train, widths=[32, 64, 96, 128], reference="dense")
    at_widths = recipes_of_series(found, 258)
    for sized, ranks in ((at_widths[0], (8, 4)), (at_widths[-1], (32, 16))):
        operators = sized.settings_of("mixed").operators
        assert (operators["all-linear"]["rank"], operators["q_proj"]["rank"]) == ranks


# Runs that fail


def test_a_run_that_fails_keeps_none_of_the_others_from_ending(begun, tmp_path, monkeypatch):
    values, _ = begun
    values["entries"] = {"bad": "low_rank:rank=4", "dense": "dense"}
    whole = engine.run_once

    def run(settings, folder):
        if "bad" in folder:
            raise RuntimeError("no kernel")
        return whole(settings, folder)

    monkeypatch.setattr(engine, "run_once", run)
    with pytest.raises(RuntimeError, match="bad: no kernel"):
        compare(values, tmp_path / "new", workers=0)
    assert read_result(tmp_path / "new" / "runs" / "dense" / "seed-0") is not None


def test_an_entry_that_diverges_wherever_it_is_tuned_keeps_nobody_from_the_rest(begun, tmp_path, monkeypatch):
    values, _ = begun
    values["entries"] = {"wild": "low_rank:rank=4", "dense": {"operator": "dense", "learning_rate": 0.001}}
    values |= {"tune": {"learning_rates": [0.1, 0.2], "fraction": 1.0, "extensions": 0}, "match": "width"}
    whole = engine.run_once
    monkeypatch.setattr(engine, "run_once", lambda s, folder: math.inf if "wild" in folder else whole(s, folder))
    results = compare(values, tmp_path / "new", workers=0)
    assert [entry["name"] for entry in results["entries"]] == ["dense"]
    assert results["diverged"][0]["text"].startswith("training diverged at every learning rate of [0.1, 0.2]")


def test_where_a_final_run_diverges_all_seeds_take_the_next_lower_rate(begun, tmp_path, monkeypatch):
    values, _ = begun
    values |= {"tune": {"learning_rates": [0.001, 0.002, 0.004], "fraction": 1.0, "extensions": 0}, "seeds": [0, 1, 2]}
    values["tune"]["check_full_length"] = False  # so that all seeds meet the rate that diverges
    whole, diverged = engine.run_once, []

    def run(settings, folder):
        loss = whole(settings, folder)
        if "tuning" in folder:  # the higher, the better
            record = read_json(Path(folder) / "run.json")
            record["result"]["validation_loss"] = -settings["learning_rate"]
            write_json(Path(folder) / "run.json", record)
            return -settings["learning_rate"]
        if settings["learning_rate"] == 0.004 and settings["seed"] == 1:
            diverged.append(folder)
            return math.inf
        return loss

    monkeypatch.setattr(engine, "run_once", run)
    results = compare(values, tmp_path / "new", workers=0)
    (entry,) = results["entries"]
    assert len(diverged) == 1
    assert (entry["learning_rate"], entry["tuning"]["diverged"]) == (0.002, [0.004])
    assert any("diverged at the learning rate that tuning had found (0.004)" in note for note in results["notes"])
    runs = [tmp_path / "new" / "runs" / "dense" / f"seed-{seed}" / "run.json" for seed in (0, 1, 2)]
    assert [read_json(run)["settings"]["learning_rate"] for run in runs] == [0.002] * 3
    aside = tmp_path / "new" / "tuning" / "dense"
    assert sorted(path.name for path in aside.glob("given-up-*")) == [f"given-up-0.004-seed-{s}" for s in (0, 1, 2)]
    # and at the lowest rate there is no way on
    (tmp_path / "new" / "results.json").unlink()
    shutil.rmtree(tmp_path / "new" / "runs")
    monkeypatch.setattr(engine, "run_once", lambda settings, folder: math.inf)
    with pytest.raises(ValueError, match=r"dense: final runs diverged at 0.004, 0.002, 0.001, and no lower"):
        compare(values, tmp_path / "new", workers=0)


# Going on


@pytest.fixture
def begun(tmp_path):
    """A recipe on a file, and a directory where it has ended but for its results."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i} of {i % 11}" for i in range(400)))
    train = {"model": "tiny", "model_overrides": WIDTH, "steps": 2, "batch_size": 2, "dtype": "float32", "threads": 1}
    train["data"] = {"data": str(text), "sequence_length": 32, "cache_dir": str(tmp_path / "cache")}
    values = {"entries": {"dense": "dense"}, "train": train, "speed": {"seconds": 0}, "ngram": None}
    compare(values, tmp_path / "out", workers=0)
    (tmp_path / "out" / "results.json").unlink()
    return values, text


def test_other_text_under_the_same_name_is_refused(begun, tmp_path):
    values, text = begun
    before = text.read_text()
    text.write_text(before.replace("line", "lime"))
    with pytest.raises(ValueError, match="begun on other text"):
        compare(values, tmp_path / "out", workers=0)
    text.write_text(before)
    assert compare(values, tmp_path / "out", workers=0)["entries"]


def test_another_precision_is_refused(begun, tmp_path, monkeypatch):
    values, _ = begun
    monkeypatch.setattr("relinear.compare.folder._computed", lambda settings: "bfloat16 on cuda")
    with pytest.raises(ValueError, match="dense in float32 on cpu, which would be bfloat16 on cuda"):
        compare(values, tmp_path / "out", workers=0)


def test_tune_on_the_command_line_keeps_how_a_recipe_tunes(tmp_path, monkeypatch, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("entries: {dense: dense}\ntune: {learning_rates: [0.003, 0.006]}\n")
    seen = []

    def stop(settings, *_, **__):
        seen.append(settings)
        raise ValueError("seen")

    monkeypatch.setattr("relinear.compare.run.compare", stop)
    monkeypatch.setattr("relinear.compare.requirements.compare_requirements", lambda *_, **__: {})
    main(["compare", "--recipe", str(path), "--tune"])
    capsys.readouterr()
    assert seen[0].tune.learning_rates == (0.003, 0.006)
    assert math.isclose(seen[0].tune.fraction, 0.25)
    assert seen[0].tune.check_full_length


def test_tune_on_the_command_line_checks_rates_at_full_length(tmp_path, monkeypatch, capsys):
    """A quarter of 150 steps chose a rate for dense that is worse at full length than the untuned one."""
    seen = []
    monkeypatch.setattr("relinear.compare.requirements.compare_requirements", lambda *_, **__: {})
    monkeypatch.setattr("relinear.compare.run.compare", lambda settings, *_, **__: seen.append(settings) or exit(0))
    with pytest.raises(SystemExit):
        main(["compare", "-o", "dense", "--tune", "--set", "tune.fraction=0.5", "--out", str(tmp_path / "out")])
    capsys.readouterr()
    assert seen[0].tune.check_full_length
    assert math.isclose(seen[0].tune.fraction, 0.5)


def test_columns_of_0_2_are_read_under_their_new_names_and_what_a_user_wrote_is_left() -> None:
    entry = {"deviation": 0.01, "validation_loss": {"mean": 5.0, "spread": 0.1}, "settings": {"spread": 1}}
    read = with_new_columns({"entries": [entry], "recipe": {"entries": {"spread": "dense"}}})
    assert read["entries"][0] == {
        "size_mismatch": 0.01,
        "validation_loss": {"mean": 5.0, "std": 0.1},
        "settings": {"spread": 1},
    }
    assert read["recipe"] == {"entries": {"spread": "dense"}}
