"""Presets: exact parameter counts, overrides, determinism."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM

import relinear
from relinear.hf.attachments import apply_attachment_
from relinear.models import HeadBias, draw_as_torch_, from_preset, preset_config, preset_names
from relinear.models.cgt import CGTForCausalLM, CGTForRegression
from relinear.training import TrainSettings, train
from relinear.training.run import build_model

COUNTS = {
    "tiny": 1_115_776,
    "gpt2-ccl-64": 6_787_281,
    "gpt2-ccl-256": 30_537_297,
    "gpt2-ccl-512": 70_461_521,
    "hdpl-67m": 67_113_472,
    "llama-60m": 58_073_600,
    "llama-130m": 134_105_856,
    "llama-250m": 247_370_496,
    "llama-355m": 354_993_152,
    "cgt-arithmetic": 1_419_712,
    "cgt-regression": 2_380_049,
    "cgt-text": 7_210_624,
    "gpt2-cgt": 940_800,
}


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_every_preset_has_a_count():
    assert set(COUNTS) == set(preset_names())


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_count(name):
    with torch.device("meta"):
        model = from_preset(name)
    assert count(model) == COUNTS[name]
    assert type(model) in (GPT2LMHeadModel, LlamaForCausalLM, CGTForCausalLM, CGTForRegression)


@pytest.mark.parametrize(
    ("name", "all_gate"),
    [("llama-60m", 0.436), ("llama-130m", 0.633), ("llama-250m", 0.801), ("llama-355m", 0.815)],
)
def test_llama_sizes_give_the_published_gate_overhead(name, all_gate):
    # A square gate on each of the seven projections: the figure that fixes width, MLP width, depth and vocabulary.
    with torch.device("meta"):
        model = from_preset(name)
    linears = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    assert len(linears) == 7 * model.config.num_hidden_layers
    assert sum(m.weight.numel() for m in linears) / count(model) == pytest.approx(all_gate, abs=6e-4)


def test_hdpl_preset_uses_the_authors_rope_base():
    assert preset_config("hdpl-67m").rope_parameters["rope_theta"] == 500_000


def test_overrides_take_either_name_of_a_field():
    assert preset_config("gpt2-ccl-64", num_hidden_layers=2).n_layer == 2
    assert preset_config("gpt2-ccl-64", n_layer=2).num_hidden_layers == 2
    model = from_preset("tiny", vocab_size=300, num_attention_heads=8)
    assert model.get_output_embeddings().weight.shape == (300, 128)
    assert model.config.num_key_value_heads == 8
    assert model(input_ids=torch.tensor([[299, 0]])).logits.shape == (1, 2, 300)


def test_the_global_seed_fixes_the_weights():
    def build(seed):
        torch.manual_seed(seed)
        return from_preset("tiny", num_hidden_layers=1).state_dict()

    first, again, other = build(1), build(1), build(2)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("tinny", {}, "did you mean 'tiny'"),
        ("tiny", {"hiden_size": 64}, "did you mean 'hidden_size'"),
        ("tiny", {"hidden_size": 130}, "130"),
        ("tiny", {"hidden_size": "wide"}, "wide"),
        ("tiny", {"model_type": "gpt2"}, "unknown config field 'model_type'"),
        ("gpt2-ccl-64", {"n_layer": 2, "num_hidden_layers": 3}, "same field"),
        ("gpt2-ccl-64", {"n_head": 7}, "cannot be built"),
    ],
)
def test_wrong_overrides_are_one_clear_error(name, overrides, said):
    with pytest.raises(ValueError, match=said):
        from_preset(name, **overrides)


def test_head_bias_starts_at_zero_and_is_added_to_the_logits(tiny_model):
    ids = torch.arange(6)[None]
    before = tiny_model(input_ids=ids).logits
    parameters = count(tiny_model)
    apply_attachment_(tiny_model, HeadBias())
    assert count(tiny_model) == parameters + tiny_model.config.vocab_size
    assert torch.equal(tiny_model(input_ids=ids).logits, before)
    with torch.no_grad():
        tiny_model.get_output_embeddings().bias.copy_(torch.arange(96.0))
    torch.testing.assert_close(tiny_model(input_ids=ids).logits, before + torch.arange(96.0))


def test_head_bias_grows_with_the_vocabulary():
    model = from_preset("gpt2-ccl-64", vocab_size=97, n_layer=1)
    model.resize_token_embeddings(103)
    assert model.lm_head.bias.shape == (103,)
    assert model(input_ids=torch.tensor([[102]])).logits.shape == (1, 1, 103)


def test_head_bias_refuses_what_it_cannot_do(tiny_gpt2):
    apply_attachment_(tiny_gpt2, HeadBias())
    with pytest.raises(ValueError, match="without a bias"):
        apply_attachment_(tiny_gpt2, HeadBias())
    with pytest.raises(ValueError, match="output head"):
        apply_attachment_(torch.nn.Linear(2, 2), HeadBias())


@pytest.mark.parametrize("load", [AutoModelForCausalLM.from_pretrained, relinear.from_pretrained])
def test_a_preset_with_operators_comes_back_with_its_head_bias(tmp_path, load):
    model = from_preset("gpt2-ccl-64", vocab_size=97, n_layer=2).eval()
    relinear.replace_(model, {"c_fc": relinear.LowRank(rank=4)})
    with torch.no_grad():
        model.lm_head.bias.normal_()
    model.save_pretrained(tmp_path)
    torch.manual_seed(1)
    loaded = load(tmp_path).eval()
    ids = torch.arange(60)[None]
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    assert torch.equal(loaded.lm_head.bias, model.lm_head.bias)


@pytest.mark.parametrize("load", [AutoModelForCausalLM.from_pretrained, relinear.from_pretrained])
def test_a_preset_without_operators_comes_back_with_its_head_bias(tmp_path, load):
    model = from_preset("gpt2-ccl-64", vocab_size=97, n_layer=1).eval()
    with torch.no_grad():
        model.lm_head.bias.normal_()
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path).lm_head.bias, model.lm_head.bias)


def test_public_names():
    assert relinear.from_preset is from_preset
    assert relinear.models.preset_names is preset_names


def test_drawn_as_torch_draws_it():
    """Every linear layer as nn.Linear makes it; embeddings of untied models are a copy of the head."""
    model = relinear.from_preset("tiny", tie_word_embeddings=False)
    torch.manual_seed(3)
    draw_as_torch_(model)
    assert torch.equal(model.get_input_embeddings().weight, model.lm_head.weight)
    assert model.get_input_embeddings().weight is not model.lm_head.weight
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert len(linears) > 7
    for module in linears:
        bound = module.in_features**-0.5
        assert 0.98 * bound < module.weight.abs().max() <= bound
        assert module.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
    assert (model.model.norm.weight == 1).all()
    gpt2 = relinear.from_preset("gpt2-ccl-64", vocab_size=300)
    draw_as_torch_(gpt2)
    block = gpt2.transformer.h[0].mlp
    assert 0.98 / 16 < block.c_proj.weight.abs().max() <= 1 / 16  # Conv1D of 256 inputs
    assert 0 < block.c_proj.bias.abs().max() <= 1 / 16


def test_a_run_may_start_from_torchs_own_weights(tmp_path):
    ours, stock = (build_model(TrainSettings(model="tiny", model_init=start)) for start in ("torch", "config"))
    assert torch.equal(ours.get_input_embeddings().weight, ours.lm_head.weight)
    assert not torch.equal(stock.get_input_embeddings().weight, ours.get_input_embeddings().weight)
    stock.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_init='torch' needs a preset"):
        train(TrainSettings(model=str(tmp_path), model_init="torch"), tmp_path / "run")
