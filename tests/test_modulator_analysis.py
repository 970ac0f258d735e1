"""What is measured of modulators, on gates that are known."""

import pytest
import torch

import relinear
from conftest import make_tiny_gpt2, make_tiny_llama
from relinear.analysis.analyses import Subject, analyze
from relinear.analysis.modulators import modulators, record_modulators, variance_split

IDS = torch.randint(0, 96, (3, 20), generator=torch.Generator().manual_seed(2))


def test_variance_split_on_gates_of_one_kind_each():
    tokens, channels = torch.randn(50, 1), torch.randn(1, 30)
    static = variance_split(channels.expand(50, 30))
    assert static["varying"] == pytest.approx(0, abs=1e-9)
    assert static["static"] == pytest.approx(channels.double().var(unbiased=False).item())
    token = variance_split(tokens.expand(50, 30))
    assert token["varying"] == pytest.approx(1)
    assert token["token"] == pytest.approx(tokens.double().var(unbiased=False).item())
    mixed = variance_split(torch.randn(50, 30))
    assert mixed["static"] + mixed["token"] + mixed["token_channel"] == pytest.approx(mixed["total"])
    assert variance_split(torch.ones(5, 3))["varying"] == 0


def test_record_holds_the_gates_that_the_model_used():
    model = make_tiny_llama()
    relinear.replace_(model, {"all-linear": relinear.Transponder()})
    relinear.attach_(model, relinear.PathTransponder(scalar=False, mlp=False))
    assert len(modulators(model)) == 2 * 7 + 2
    seen = {}
    layer = model.model.layers[1].mlp.down_proj
    layer.register_forward_hook(lambda m, a, out: seen.update(x=a[0], y=out, z=m.base(a[0])))
    record = record_modulators(model, IDS, tokens=8)
    name = "model.layers.1.mlp.down_proj"
    gate = record.channel[name] * record.scalar[name][:, None]
    torch.testing.assert_close(gate, (seen["y"] / seen["z"])[0, :8], rtol=1e-4, atol=1e-5)
    assert set(record.channel) == {f"model.layers.{i}.mlp.down_proj" for i in range(2)}
    row = record.statistics[name]
    assert (row["layer"], row["module"], row["alphas"]) == (1, "down_proj", {"channel": 1.0, "scalar": 1.0})
    full = layer.modulator.gates_of(seen["x"])["scalar"]
    assert row["gates"]["scalar"]["mean"] == pytest.approx(full.mean().item(), rel=1e-5)
    assert "scalar" not in record.statistics["model.layers.0.self_attn"]["gates"]
    places = {(row["layer"], row["module"]) for row in record.statistics.values()}
    assert (len({layer for layer, _ in places}), len({module for _, module in places})) == (2, 8)
    assert not [m for m in model.modules() if type(m).__name__ == "Modulator" and m._forward_pre_hooks]


@pytest.mark.parametrize(
    ("make", "operator"),
    [
        (make_tiny_gpt2, {}),
        *(
            pytest.param(make_tiny_llama, {off: False}, marks=pytest.mark.slow)
            for off in ("contextual", "channel", "scalar")
        ),
    ],
)
def test_numbers_and_figures_are_written(make, operator, tmp_path):
    model = make()
    relinear.replace_(model, {r".*\.(c_fc|up_proj)": relinear.Transponder(**operator)})
    results = analyze(Subject(model, IDS[:1]), tmp_path)
    assert "modulators" in results
    assert ("effective_rank" in results) != operator.get("contextual", True)  # static gates are a plain matrix
    assert (tmp_path / "modulators.json").is_file()
    figures = {path.stem for path in tmp_path.glob("*.png")}
    assert figures >= {"modulators_variance"}
    assert ("modulators_scalar" in figures) == (operator.get("contextual", True) and operator.get("scalar", True))
    assert ("modulators_channel" in figures) == operator.get("channel", True)
