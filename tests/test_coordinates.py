"""Activations against width: the check tells a parametrisation whose activations grow from one that keeps them."""

import json

import pytest

from relinear.compare.coordinates import KINDS, at_heads, check_coordinates, is_flat
from relinear.models import preset_config
from relinear.train import TrainSettings
from relinear_cli.main import main

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 8}  # heads of 16 channels


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text(" ".join(f"line {i} says {i * i}" for i in range(400)))
    return folder


def settings(text, **changes):
    values = {"model": "tiny", "model_overrides": SMALL, "learning_rate": 1e-2, "batch_size": 2}
    values |= {"parametrization_base_width": 32, "data": {"data": str(text / "a.txt"), "sequence_length": 16}}
    return TrainSettings.load(values | changes)


@pytest.mark.parametrize("operator", [None, {"kind": "block_hadamard", "blocks": 4}], ids=["dense", "blocks"])
def test_growth_is_that_of_the_standard_alone(text, operator):
    told = []
    operators = {"all-linear": operator}
    found = check_coordinates(
        settings(text, operators=operators), [32, 128], steps=4, seeds=[0], on_progress=lambda *done: told.append(done)
    )
    assert told == [(done, 4) for done in (1, 2, 3, 4)]
    standard, mup = found["parametrizations"]["standard"], found["parametrizations"]["mup"]
    for kind in KINDS:
        assert standard[kind]["scale"][0] == mup[kind]["scale"][0], "the base width is the standard"
        assert [len(steps) for steps in mup[kind]["scale"]] == [5, 5]
        assert mup[kind]["change"][0][0] == 0
        values = [steps[-1] for steps in mup[kind]["scale"]]
        assert mup[kind]["spread"] == pytest.approx(max(values) / min(values))
    assert standard["logits"]["spread"] > 1.5 * mup["logits"]["spread"]
    assert found["flat"] == {"standard": False, "mup": True}


def test_what_diverges_is_not_flat():
    assert is_flat({"logits": {"spread": 2.0}})
    assert not is_flat({"logits": {"spread": 2.1}})
    assert not is_flat({"logits": {"spread": None}})


def test_a_rate_that_breaks_training_is_told_of(text):
    found = check_coordinates(settings(text, learning_rate=1e30), [32, 64], steps=2, seeds=[0])
    assert found["flat"] == {"standard": False, "mup": False}
    assert found["parametrizations"]["mup"]["logits"]["spread"] is None
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(("model", "inner"), [("tiny", "intermediate_size"), ("gpt2-ccl-64", "n_inner")])
def test_widths_come_from_more_heads_of_one_size(model, inner):
    base = preset_config(model)
    sized = at_heads(TrainSettings(model=model), 4 * base.hidden_size)
    wide = preset_config(model, **sized.model_overrides)
    assert wide.hidden_size == 4 * base.hidden_size
    assert wide.num_attention_heads == 4 * base.num_attention_heads
    assert getattr(wide, inner) == (None if getattr(base, inner) is None else 4 * getattr(base, inner))


def test_what_cannot_be_checked_is_refused(text, tmp_path):
    with pytest.raises(ValueError, match="width 40 is no multiple of 16"):
        check_coordinates(settings(text), [32, 40])
    with pytest.raises(ValueError, match="at least two widths"):
        check_coordinates(settings(text), [32, 32])
    with pytest.raises(ValueError, match="give a preset"):
        check_coordinates(settings(text, model=str(tmp_path), model_overrides={}), [32, 64])
    with pytest.raises(ValueError, match="width 80 has 5 heads, which 2 heads of keys and values cannot serve"):
        check_coordinates(settings(text, model_overrides=SMALL | {"num_key_value_heads": 4}), [32, 80])
    with pytest.raises(ValueError, match="sequences of 16 tokens to train on, 4000 are asked for"):
        check_coordinates(settings(text, batch_size=4000), [32, 64])
    operators = {"all-linear": {"kind": "low_rank", "rank": 48}}
    with pytest.raises(ValueError, match="rank=48 exceeds"):
        check_coordinates(settings(text, operators=operators), [32, 64])


def test_the_command_leaves_numbers_a_figure_and_a_page(text, tmp_path, capfd):
    arguments = ["--data", str(text / "a.txt"), "--widths", "32,64", "--steps", "1", "--seeds", "0", "--length", "16"]
    sizes = ["--set", "num_hidden_layers=1", "--set", "num_attention_heads=8"]
    replace = ["--replace", "up_proj=low_rank:rank=4", "--attach", "rezero"]
    out = tmp_path / "found"
    assert main(["check-coordinates", "tiny", *replace, *arguments, *sizes, "--out", str(out)]) == 0
    printed = capfd.readouterr().out
    assert "residual stream" in printed
    assert "over 2 times the width" in printed
    assert {path.name for path in out.iterdir()} >= {"coordinates.json", "coordinates.png", "report.html"}
    found = json.loads((out / "coordinates.json").read_text())
    assert found["operators"]["up_proj"]["rank"] == 4
    assert main(["report", str(out)]) == 0
    (out / "coordinates.json").write_text(json.dumps(found | {"widths": [0, 64]}))
    assert main(["report", str(out)]) == 2
    assert main(["check-coordinates", "tiny", *arguments, "--widths", "32,33"]) == 2
