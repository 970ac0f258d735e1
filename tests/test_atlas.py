"""The atlas: its costs against fits made by hand, its figures from its record, and a killed one that goes on."""

import json

import pytest
import torch

import relinear
from conftest import REPOSITORY, make_tiny_llama
from relinear.compress import atlas as module
from relinear.compress.atlas import AtlasSettings, atlas, atlas_section, cheapest, default_operators, write_atlas
from relinear.compress.calibrate import Calibration
from relinear.core.operator import OperatorConfig
from relinear.data.tokenizers import load_tokenizer, vocabulary_size
from relinear_cli.main import main

SMALL = {"tokens": 512, "sequence_length": 64, "steps": 3}


def tokens(model, count=1024):
    torch.manual_seed(0)
    return [torch.randint(0, model.config.vocab_size, (count,))]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    model, out = make_tiny_llama(), tmp_path_factory.mktemp("atlas")
    chosen = AtlasSettings(operators=("low_rank", "monarch:blocks=4", "block_hadamard:blocks=4"), layers=(1,), **SMALL)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    record = atlas(model, tokens(model), settings=chosen, out_dir=out)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return model, out, chosen, record


def test_costs_are_those_of_the_fits(made) -> None:
    model, out, chosen, record = made
    assert record == json.loads((out / "atlas.json").read_text())
    assert {layer["depth"] for layer in record["layers"].values()} == {1}
    name = "model.layers.1.mlp.up_proj"
    layer, linear = record["layers"][name], model.get_submodule(name)
    weight, moments = linear.weight.detach().double(), Calibration(out / "calibration").moments(name)
    assert layer["nothing"] == pytest.approx(0.5 * float(moments.error(weight)))
    assert layer["parameters"] == weight.numel()
    for kind, settings in (("monarch", "monarch:blocks=4"), ("block_hadamard", "block_hadamard:blocks=4")):
        operator = OperatorConfig.read(settings).build(*weight.T.shape, bias=False)
        operator.from_moments(linear, moments, steps=chosen.steps)
        (point,) = layer["operators"][kind]
        assert point["nats"] == pytest.approx(
            0.5 * float(moments.error(weight - operator.to_dense().detach().double())), rel=1e-4
        )
        assert point["parameters"] == sum(p.numel() for p in operator.parameters())
    curve = layer["operators"]["low_rank"]
    assert len(curve) > 3
    assert [p["nats"] for p in curve] == sorted((p["nats"] for p in curve), reverse=True)


def test_a_killed_atlas_goes_on_and_another_is_refused(made, tmp_path, monkeypatch) -> None:
    model, out, chosen, record = made
    partial = json.loads((out / "atlas.json").read_text())
    dropped = partial["layers"].popitem()[0]
    (out / "atlas.json").write_text(json.dumps(partial))
    counted, whole = [], module._of_layer
    monkeypatch.setattr(module, "_of_layer", lambda *given: counted.append(given[1]) or whole(*given))
    assert atlas(model, tokens(model), settings=chosen, out_dir=out)["layers"] == record["layers"]
    assert counted == [dropped]
    with pytest.raises(ValueError, match="is an atlas with other operators or settings"):
        atlas(model, tokens(model), settings=AtlasSettings(operators=("low_rank",), layers=(1,), **SMALL), out_dir=out)


def test_the_page_is_made_of_the_record(made, tmp_path) -> None:
    record = made[-1]
    point = {"setting": "", "parameters": 0, "nats": 1.0}
    costs = {"low_rank": [(40, 4.0), (60, 1.0)], "monarch": [(50, 3.0)], "block_hadamard": [(80, 0.1)]}
    told = {kind: [point | {"parameters": p, "nats": n} for p, n in known] for kind, known in costs.items()}
    layer = {"depth": 0, "type": "q_proj", "parameters": 100, "nothing": 9.0, "operators": told}
    kind, nats = cheapest(record | {"layers": {"q": layer}})["q"]
    assert (kind, nats) == (
        "low_rank",
        pytest.approx(2.0),
    )  # the geometric mean of 4 and 1; the third is never as small
    paths = write_atlas(record, tmp_path)
    assert {path.name for path in paths} >= {"costs.svg", "cheapest.svg", "report.html"}
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    first, count = max(((k, [b for b, _ in cheapest(record).values()].count(k)) for k in costs), key=lambda one: one[1])
    assert f"At half the parameters {first} costs the least in {count} of 7 layers" in page
    titles = [block.panel.title for block in atlas_section(record).blocks if getattr(block, "stem", "") == "costs"]
    assert titles == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_what_cannot_be_fitted_or_counted_is_left_out_or_refused(made, tmp_path) -> None:
    kinds = {config.kind for config in default_operators()}
    assert kinds >= {"low_rank", "pivoted_low_rank", "monarch", "block_hadamard"}
    assert not kinds & {"quantized", "rotor", "ccl", "transponder", "output_gate", "hdpl"}
    model = made[0]
    with pytest.raises(ValueError, match="cannot be in an atlas"):
        atlas(model, tokens(model), settings=AtlasSettings(operators=("rotor",), **SMALL), out_dir=tmp_path)
    with pytest.raises(ValueError, match=r"no decoder layer .* is among layers=\(99,\)"):
        atlas(model, tokens(model), settings=AtlasSettings(layers=(99,), **SMALL), out_dir=tmp_path)
    with pytest.raises(ValueError, match=r"shares\.0 must be below 1\.0, got 2\.0"):
        AtlasSettings.load({"shares": (2.0,)})
    assert list(tmp_path.iterdir()) == []


def test_the_command_makes_the_page(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    reader = load_tokenizer("bytes")
    model = make_tiny_llama(vocab_size=vocabulary_size(reader), max_position_embeddings=2048)
    relinear.save_pretrained(model, "model", tokenizer=reader)
    words = ["atlas", "model", "--data", str(REPOSITORY / "CONTRIBUTING.md"), "--split", "all", "--layers", "0"]
    assert main([*words, "--tokens", "1024", "-o", "low_rank", "-o", "monarch:blocks=2", "--shares", "0.5"]) in (
        None,
        0,
    )
    assert "report.html" in capsys.readouterr().out
    assert main(["report", "runs/atlas", "--out", "again.html"]) == 0
    assert "At half the parameters" in (tmp_path / "again.html").read_text(encoding="utf-8")
    assert main([*words, "--shares", "half", "--out", "other"]) == 2
    assert "--shares 'half': write them as 0.25,0.5" in capsys.readouterr().err
    assert main([*words, "-o", "low_rnk", "--out", "other"]) == 2
    assert "did you mean 'low_rank'" in capsys.readouterr().err


def test_no_two_operators_look_alike() -> None:
    record = json.loads((REPOSITORY / "results" / "atlas" / "four.json").read_text())
    assert len(record["operators"]) > 8
    for block in atlas_section(record).blocks:
        if getattr(block, "stem", "") == "costs":
            looks = [(series.colour, series.number % 8) for series in block.panel.shown]
            assert len(set(looks)) == len(looks)
