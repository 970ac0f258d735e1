"""The recipes that come with relinear: their numbers, and each of them at a budget of the user's."""

import json
import re

import pytest

from relinear.compare.recipe import BUNDLED, change_recipe, read_recipe
from relinear.compare.settings import CompareSettings
from relinear.settings.yaml_settings import read_value
from relinear.training import FitSettings
from relinear_cli.main import main

NAMES = sorted(path.stem for path in BUNDLED.glob("*.yaml"))
BUDGETS = [{"tokens": "20k"}, {"tokens": "20.5M"}, {"train.steps": 20}]
#: warm-up steps of the first entry as the papers and the records have them, at the recipe's own (largest) budget
WARMUPS = {"hdpl": 1000, "hdpl-authors": 1000, "quick": 15, "transponder": 64, "transponder-paper": 1000}
WARMUPS |= {"transponder-128": 32, "transponder-ablations": 32, "transponder-claims": 488}


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_takes_another_budget(name, budget):
    settings = CompareSettings.load(change_recipe(read_recipe(name), budget), name)
    assert settings.budgets is None
    assert settings.steps == 20 or "tokens" in budget
    for entry in settings.entries:
        run = settings.settings_of(entry)
        assert run.warmup < run.steps
        if "tokens" in budget and settings.entries[entry].duration == 1:
            asked = round(float(budget["tokens"][:-1]) * {"k": 1e3, "M": 1e6}[budget["tokens"][-1]])
            assert 0 <= run.steps * run.tokens_per_step - asked < run.tokens_per_step


@pytest.mark.parametrize("name", [name for name in NAMES if name != "scale"])  # widths are matched by themselves
def test_every_recipe_takes_another_match_and_settings_of_what_it_says_in_short(name):
    changes = {"match.by": "parameters", "tune.fraction": 0.5}
    settings = CompareSettings.load(change_recipe(read_recipe(name), changes), name)
    assert (settings.match.by, settings.tune.fraction) == ("parameters", 0.5)
    changed = change_recipe({"widths": [32, 48], "tune": True}, {"widths.tokens_per_parameter": 5, "tune.fraction": 1})
    assert changed["widths"] == {"widths": [32, 48], "tokens_per_parameter": 5}
    assert changed["tune"] == {"fraction": 1}


@pytest.mark.parametrize("name", WARMUPS)
def test_warmups_are_those_of_the_papers(name):
    settings = CompareSettings.load(read_recipe(name), name)
    assert settings.settings_of(next(iter(settings.entries))).warmup == WARMUPS[name]
    assert settings.train.warmup_steps is None  # another budget moves them


def test_twice_the_time_is_twice_any_budget():
    for budget, steps in (({}, 1280), ({"train.steps": 20}, 40)):
        settings = CompareSettings.load(change_recipe(read_recipe("transponder"), budget), "transponder")
        assert settings.settings_of("dense_same_time").steps == steps


def test_a_description_says_what_was_changed():
    changes = {"train.model": "tiny", "train.data.data": "stdlib", "tokens": "20k"}
    said = change_recipe(read_recipe("hdpl"), changes)["description"]
    assert said.startswith("Changed on the command line: train.model=tiny, train.data.data=stdlib, tokens=20k. The rec")
    assert said.endswith(read_recipe("hdpl")["description"])
    assert change_recipe(read_recipe("hdpl"), {})["description"] == read_recipe("hdpl")["description"]
    other = change_recipe(read_recipe("quick"), {"entries": {"dense": "dense"}})["description"]
    assert other == "Changed on the command line: entries={'dense': 'dense'}.", "quick's words are of quick's entries"
    assert change_recipe(read_recipe("hdpl"), {"description": "mine"})["description"] == "mine"


@pytest.mark.parametrize("schedule", ["onecycle", "cosine", "noam", "constant"])
def test_a_peak_that_is_never_reached_is_refused(schedule):
    with pytest.raises(ValueError, match=r"warmup_steps=60 must be below steps=60, or the .* never reaches its peak"):
        FitSettings.load({"steps": 60, "warmup_steps": 60, "schedule": schedule})
    assert FitSettings.load({"steps": 60, "warmup_steps": 59, "schedule": schedule}).warmup == 59


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0042", 42),
        ("010", 10),
        ("0o10", 8),
        ("1:30", "1:30"),
        ("12:30:45", "12:30:45"),
        ("1.5e3", 1500.0),
        ("1e-3", 0.001),
        ("2E4", 20000.0),
        ("yes", "yes"),
        ("off", "off"),
        ("{a: 007, b: [1.e2, on]}", {"a": 7, "b": [100.0, "on"]}),
    ],
)
def test_numbers_are_those_of_yaml_1_2(text, value):
    found = read_value(text, "--set")
    assert found == value
    assert type(found) is type(value)


#: what makes a run of any recipe small, and needs no network
SMALL = [
    *("--data", "stdlib", "--seeds", "0", "--threads", "1", "--set", "speed.seconds=0", "--set", "ngram=null"),
    *("--set", "train.data.max_documents=40"),
    *("--set", "train.data.max_validation_tokens=512", "--set", "train.save_model=false"),
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("budget", [["--tokens", "20k"], ["--steps", "20"]], ids=" ".join)
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_runs_to_its_report(name, budget, tmp_path, monkeypatch):
    """A batch of short sequences; where the recipe is about GPT-2's layers, on its own small model."""
    monkeypatch.setattr("relinear.compare.run.runs_at_once", lambda recipe: 0)  # a process a run takes seconds
    recipe, out = read_recipe(name), tmp_path / "out"
    if recipe["train"]["model"].startswith("cgt"):  # whose data are a task
        small = [
            "--set",
            "train.batch_size=2",
            *SMALL[2:],
            "--set",
            "train.data.max_documents=null",
            "--set",
            "tune=null",
        ]
        assert main(["compare", "--recipe", name, *budget, *small, "--out", str(out)]) == 0
        assert len(json.loads((out / "results.json").read_text())["entries"]) == len(recipe["entries"])
        return
    model = [] if recipe["train"]["model"].startswith("gpt2") else ["--model", "tiny"]
    cut = ["--set", "train.batch_size=8", "--set", "train.accumulation=1", "--set", "train.data.sequence_length=64"]
    cut += ["--set", "train.data.tokenizer=bytes"] if "/" in recipe["train"]["data"]["tokenizer"] else []
    tuned = ["--set", "tune=null"] if recipe.get("tune") else []
    assert main(["compare", "--recipe", name, *model, *budget, *SMALL, *cut, *tuned, "--out", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert "Changed on the command line" in page
    if recipe.get("widths"):  # whose record is of all sizes
        assert (out / "scale.json").is_file()
        return
    results = json.loads((out / "results.json").read_text())
    assert len(results["entries"]) == len(recipe["entries"])
    assert re.search(r"trained for [\d,]+ steps of 512 tokens .* of stdlib", results["budget"])
