"""The maximal update parametrisation: multipliers by formula, the base width as it was, the start, resuming."""

import math

import pytest
import torch

import relinear
from conftest import make_tiny_gpt2, make_tiny_llama
from relinear import attach_, from_preset, replace_
from relinear.compare.settings import CompareSettings
from relinear.contract.parameter_roles import ParamRole
from relinear.hf.attachments import attachments
from relinear.models import ReadoutScale
from relinear.training import FitSettings, TrainSettings, build_model, fit
from relinear.training.optim import parameter_groups, parameter_roles, scale_stock_, width_ratio
from train_helpers import Tokens

MUP = FitSettings(steps=4, learning_rate=1e-2, weight_decay=0.3, parametrization="mup", device="cpu", threads=1)
SIZES = {"num_hidden_layers": 1, "vocab_size": 96}


def groups_of(model, settings):
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: group for group in parameter_groups(model, settings) for p in group["params"]}


def at_width(width, **changes):
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": width // 16}
    values = {"model": "tiny", "model_overrides": SIZES | sizes, "parametrization": "mup", "device": "cpu"}
    return TrainSettings.load(values | changes)


# Formulas


@pytest.mark.parametrize("ratio", [0.5, 4, 8])
def test_factors_of_every_kind_of_parameter(ratio):
    """Rates go by base fan-in / fan-in, standard deviations by its root, relative to the law they are drawn by."""
    hidden = ParamRole(64 * ratio, fan_out=256 * ratio)
    assert hidden.lr_scale(ratio) == pytest.approx(1 / ratio)
    assert hidden.init_std_scale(ratio) == pytest.approx(1)  # drawn as 1 / sqrt(fan-in) already
    stock = hidden._replace(init_law="constant")
    assert stock.init_std_scale(ratio) == pytest.approx(ratio**-0.5)
    assert stock._replace(readout=True).init_std_scale(ratio) == pytest.approx(1 / ratio)
    assert hidden._replace(readout=True).init_std_scale(ratio) == pytest.approx(ratio**-0.5)
    short = ParamRole(64 * ratio - 16, fan_in_offset=16)  # a width less a rank
    assert short.lr_scale(ratio) == pytest.approx(48 / (64 * ratio - 16))
    factor = hidden._replace(growth=0.5)
    assert factor.lr_scale(ratio) == pytest.approx(ratio**-0.5)
    for fixed in (ParamRole(None), ParamRole(8, fan_in_scales=False, fan_out=8, fan_out_scales=False)):
        assert fixed.lr_scale(ratio) == fixed.init_std_scale(ratio) == 1
    down = ParamRole(64 * ratio, fan_out=8, fan_out_scales=False)  # into a rank that stays
    assert down.lr_scale(ratio) == pytest.approx(1 / ratio)
    assert down.init_std_scale(ratio) == pytest.approx(1)
    up = ParamRole(8, fan_in_scales=False, fan_out=64 * ratio)
    assert up.lr_scale(ratio) == up.init_std_scale(ratio) == 1
    decoder = ParamRole(8, fan_in_scales=False, fan_out=64 * ratio, init_law="orthogonal")
    assert decoder.init_std_scale(ratio) == pytest.approx(ratio**0.5)  # orthogonal columns are shorter than rows
    encoder = ParamRole(64 * ratio, fan_out=8, fan_out_scales=False, init_law="orthogonal")
    assert encoder.init_std_scale(ratio) == pytest.approx(1)


def test_at_the_base_width_every_factor_is_exactly_one():
    for start in ("fan_in", "constant", "orthogonal"):
        for readout in (False, True):
            role = ParamRole(48, fan_out=80, init_law=start, readout=readout, growth=0.5)
            assert role.lr_scale(1.0) == role.init_std_scale(1.0) == 1.0


OPERATORS = {
    "q_proj": "low_rank:rank=8",
    "k_proj": "transponder:rank=2",
    "v_proj": "block_hadamard:blocks=4",
    "o_proj": "rotor:terms=kronecker",
    "gate_proj": "hdpl:rank=8,blocks=4",
    "up_proj": "output_gate",
    "down_proj": "rotor:scale=true",
}
#: learning rates at four times the base width, in units of that of norms and biases
RATES = {
    "model.embed_tokens.weight": 1,
    "lm_head.weight": 1 / 4,
    "model.norm.weight": 1,
    "q_proj.down": 1 / 4,
    "q_proj.up": 1,
    "k_proj.base.weight": 1 / 4,
    "k_proj.modulator.down": 1 / 4,
    "k_proj.modulator.channel_up": 1,
    "k_proj.modulator.channel_log_alpha": 1,
    "v_proj.blocks.0": 1 / 4,
    "o_proj.entry.left": 1 / 2,
    "o_proj.entry.right": 1 / 2,
    "gate_proj.blocks": 1 / 4,
    "gate_proj.mu.weight": 1 / 4,
    "gate_proj.mu.bias": 1,
    "gate_proj.decoder.weight": 1,
    "up_proj.base.weight": 1 / 4,
    "up_proj.gate.weight": 1 / 4,
    "down_proj.entry.left": 1,
    "down_proj.entry.scale": 1,
}


def test_rates_of_operators_and_of_the_model_around_them():
    model = build_model(at_width(256, operators=OPERATORS))
    groups = groups_of(model, MUP)
    assert len(groups) == len(list(model.parameters()))
    plain = groups_of(model, MUP.replace(parametrization="standard"))
    for ending, factor in RATES.items():
        (name,) = [name for name in groups if name.endswith(ending)]
        assert groups[name]["lr"] == pytest.approx(1e-2 * factor), name
        assert groups[name]["lr"] * groups[name]["weight_decay"] == pytest.approx(
            plain[name]["lr"] * plain[name]["weight_decay"]
        ), name


@pytest.mark.parametrize("start", ["config", "torch"])
def test_the_start_of_a_preset(start):
    """Standard deviations at four times the base width, in units of the standard start at the base width."""
    base = build_model(at_width(64, model_init=start))
    wide = build_model(at_width(256, model_init=start))
    for (name, narrow), (_, found) in zip(base.named_parameters(), wide.named_parameters(), strict=True):
        factor = {"embed_tokens": 1, "lm_head": 1 / 4, "layernorm": 1, "norm": 1}.get(name.split(".")[-2], 1 / 2)
        factor = 1 if "layernorm" in name else factor
        assert float((found.square().mean() / narrow.square().mean()).sqrt().detach()) == pytest.approx(factor, rel=0.1)


def test_the_start_of_what_is_put_in():
    changes = {"operators": OPERATORS, "attachments": [{"kind": "sdpa_gate"}, {"kind": "path_transponder"}]}
    wide = dict(build_model(at_width(256, **changes)).named_parameters())
    plain = dict(build_model(at_width(256, parametrization="standard", **changes)).named_parameters())
    factors = {
        "q_proj.down": 1,
        "q_proj.up": 1,
        "k_proj.base.weight": 1 / 2,
        "k_proj.modulator.down": 1,
        "v_proj.blocks.0": 1,
        "o_proj.entry.left": 1,
        "gate_proj.blocks": 1,
        "gate_proj.mu.weight": 1,
        "gate_proj.decoder.weight": 2,
        "up_proj.gate.weight": 1 / 2,
        "self_attn.relinear_gate.weight": 1 / 2,
        "mlp.relinear_modulator.down": 1,
        "mlp.relinear_modulator.channel_up": 1,
        "down_proj.entry.left": 1,
    }
    for ending, factor in factors.items():
        (name,) = [name for name in wide if name.endswith(ending)]
        torch.testing.assert_close(wide[name], factor * plain[name])


def test_weights_that_operators_take_over_are_scaled_once():
    changes = {"operators": {"q_proj": "low_rank:rank=256"}, "init": "from_weight"}
    wide, dense = build_model(at_width(256, **changes)), build_model(at_width(256))
    found = [m.model.layers[0].self_attn.q_proj for m in (wide, dense)]
    torch.testing.assert_close(found[0].to_dense(), found[1].weight, atol=1e-5, rtol=1e-4)


# The base width, and the standard


def test_at_the_base_width_it_is_the_standard_bit_for_bit():
    changes = {"operators": OPERATORS, "parametrization_base_width": 64}
    results = []
    for name in ("mup", "standard"):
        settings = at_width(64, steps=3, batch_size=4, threads=1, dtype="float32", parametrization=name, **changes)
        model = build_model(settings)
        fit(model, Tokens(samples=16), settings)
        results.append(model.state_dict())
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())


@pytest.mark.parametrize("tied", [False, True])
def test_the_standard_does_not_ask_for_the_width(tied):
    assert width_ratio(torch.nn.Linear(2, 2), FitSettings()) == 1
    rates = {group["lr"] for group in parameter_groups(make_tiny_llama(tied=tied), FitSettings(learning_rate=1e-2))}
    assert rates == {1e-2}


def test_settings_written_before_there_was_a_choice_are_the_standard():
    saved = TrainSettings().model_dump(mode="json")
    for name in ("parametrization", "parametrization_base_width"):
        del saved[name]
    assert TrainSettings.upgraded(saved)["parametrization"] == "standard"


def test_entries_of_a_comparison_take_it_from_the_recipe_or_have_their_own():
    entries = {"dense": "dense", "own": {"operator": "low_rank:rank=8", "set": {"parametrization": "mup"}}}
    recipe = CompareSettings.load({"entries": entries, "train": {"model": "tiny"}})
    assert [recipe.settings_of(name).parametrization for name in entries] == ["standard", "mup"]
    recipe = CompareSettings.load({"entries": entries, "train": {"model": "tiny", "parametrization": "mup"}})
    assert [recipe.settings_of(name).parametrization for name in entries] == ["mup", "mup"]


# A head that shares the embedding's weight


@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_gpt2])
def test_a_tied_head_keeps_its_weight_and_scales_the_logits(make, tmp_path):
    model = make(tied=True)
    ids = torch.arange(12).view(2, 6)
    table = model.get_input_embeddings().weight.clone()
    with pytest.raises(ValueError, match=r"ReadoutScale\(factor=0.5\)"):
        parameter_groups(model, MUP.replace(parametrization_base_width=16))
    attach_(model, ReadoutScale(factor=0.5))
    with torch.no_grad():
        scaled = model(input_ids=ids).logits
    plain = make(tied=True)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(scaled, 0.5 * plain(input_ids=ids).logits)
    groups = groups_of(model, MUP.replace(parametrization_base_width=16))
    (name,) = [name for name, p in model.named_parameters() if p is model.get_output_embeddings().weight]
    assert groups[name]["lr"] == 1e-2
    assert torch.equal(table, model.get_output_embeddings().weight)
    relinear.save_pretrained(model, tmp_path)
    assert torch.equal(relinear.from_pretrained(tmp_path)(input_ids=ids).logits, scaled)


def test_a_tied_preset_gets_the_factor():
    sizes = {"hidden_size": 256, "num_attention_heads": 16, "tie_word_embeddings": True}
    model = build_model(at_width(256, model_overrides=SIZES | sizes))
    assert attachments(model) == (ReadoutScale(factor=0.25),)
    assert float(model.model.embed_tokens.weight.std().detach()) == pytest.approx(0.02, rel=0.05)
    with pytest.raises(ValueError, match="factor must be above 0"):
        ReadoutScale(factor=0.0)
    with pytest.raises(ValueError, match="not scaled already"):
        attach_(model, ReadoutScale(factor=0.5))


# Refusals


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ValueError, match="optimizer='adamw', or weight_decay=0"):
        MUP.replace(optimizer="adam")
    assert MUP.replace(optimizer="adam", weight_decay=0).parametrization == "mup"
    with pytest.raises(ValueError, match="Linear contains no Hugging Face model"):
        parameter_groups(torch.nn.Linear(2, 2), MUP)


# Training


@pytest.mark.parametrize("tied", [False, True])
def test_a_run_goes_on_to_the_same_bits(tied, tmp_path):
    def model():
        torch.manual_seed(0)
        made = from_preset("tiny", **SIZES, hidden_size=128, num_attention_heads=4, tie_word_embeddings=tied)
        scale_stock_(made, 2.0)
        replace_(made, {"up_proj": relinear.HDPL(rank=8)})
        return made.eval()

    class Interrupt(Exception):
        pass

    def stop(progress):
        if progress.done == 3 and progress.stage == "train":
            raise Interrupt

    settings = MUP.replace(steps=6, batch_size=4, save_every=2, dtype="float32")
    data = (Tokens(samples=24), Tokens(samples=8, seed=1))
    whole = fit(model(), data, settings, out_dir=tmp_path / "whole")
    with pytest.raises(Interrupt):
        fit(model(), data, settings, out_dir=tmp_path / "killed", on_progress=stop)
    resumed = fit(model(), data, settings, out_dir=tmp_path / "killed")
    assert resumed.validation_loss == whole.validation_loss
    assert math.isfinite(whole.validation_loss)


def test_roles_of_the_readout():
    assert parameter_roles(make_tiny_llama())["lm_head.weight"].readout
    assert not any(role.readout for role in parameter_roles(make_tiny_llama(tied=True)).values())
