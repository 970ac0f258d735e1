"""The atlas of results/atlas: its costs against fits made by hand, its table, and a killed one that goes on."""

import importlib
import json

import pytest

import relinear
from conftest import REPOSITORY, make_tiny_llama
from relinear.contract.operator import OperatorConfig
from relinear.data.tokenizers import load_tokenizer, vocabulary_size


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "results" / "atlas"))
    return importlib.import_module("atlas")


@pytest.mark.slow
def test_costs_are_those_of_the_fits_and_a_killed_atlas_goes_on(study, tmp_path, monkeypatch, capsys) -> None:
    reader, text, out = load_tokenizer("bytes"), tmp_path / "text.txt", tmp_path / "out"
    model = make_tiny_llama(vocab_size=vocabulary_size(reader), max_position_embeddings=2048)
    relinear.save_pretrained(model, tmp_path / "model", tokenizer=reader)
    text.write_text("A line of text that is not like the others: %d.\n" * 200)
    words = [str(tmp_path / "model"), str(text), "--layers", "1", "--tokens", "512", "--sequence-length", "64"]
    words += ["-o", "low_rank", "-o", "monarch:blocks=4", "--steps", "3", "--out", str(out)]
    study.main(words)
    assert "layers it is cheapest in" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} >= {"atlas.json", "costs.svg", "cheapest.svg"}
    record = json.loads((out / "atlas.json").read_text())
    assert {layer["depth"] for layer in record["layers"].values()} == {1}
    name = "model.layers.1.mlp.up_proj"
    layer, linear = record["layers"][name], model.get_submodule(name)
    weight, moments = linear.weight.detach().double(), study.SavedStatistics(out / "moments").moments(name)
    assert layer["nothing"] == pytest.approx(0.5 * float(moments.error(weight)))
    operator = OperatorConfig.read("monarch:blocks=4").build(*weight.T.shape, bias=False)
    operator.fit_to_calibration_(linear, moments, steps=3)
    (point,) = layer["operators"]["monarch"]
    error = float(moments.error(weight - operator.to_dense().detach().double()))
    assert point["nats"] == pytest.approx(0.5 * error, rel=1e-3)
    assert point["parameters"] == sum(p.numel() for p in operator.parameters())
    costs = [p["nats"] for p in layer["operators"]["low_rank"]]
    assert len(costs) > 3
    assert costs == sorted(costs, reverse=True)
    partial = json.loads((out / "atlas.json").read_text())
    dropped = partial["layers"].popitem()[0]
    (out / "atlas.json").write_text(json.dumps(partial))
    fitted, whole = [], study._of_layer
    monkeypatch.setattr(study, "_of_layer", lambda *given: fitted.append(given[1]) or whole(*given))
    study.main(words)
    assert fitted == [dropped]
    assert json.loads((out / "atlas.json").read_text())["layers"] == record["layers"]
    with pytest.raises(SystemExit, match="is an atlas with other operators or settings"):
        study.main([*words, "--steps", "4"])


def test_the_cheapest_is_interpolated_at_half_the_parameters(study) -> None:
    costs = {"low_rank": [(40, 4.0), (60, 1.0)], "monarch": [(50, 3.0)], "block_hadamard": [(80, 0.1)]}
    points = {kind: [{"parameters": p, "nats": n} for p, n in known] for kind, known in costs.items()}
    layer = {"depth": 0, "type": "q_proj", "parameters": 100, "nothing": 9.0, "operators": points}
    kind, nats = study.cheapest({"layers": {"q": layer}})["q"]
    assert kind == "low_rank"
    assert nats == pytest.approx(2.0), "the geometric mean of 4 and 1; the third is never as small"


def test_no_two_operators_look_alike(study) -> None:
    record = json.loads((REPOSITORY / "results" / "atlas" / "four.json").read_text())
    assert len(record["operators"]) > 8
    for panel in study.cost_panels(record):
        looks = [(series.color, series.number % 8) for series in panel.shown]
        assert len(set(looks)) == len(looks)
