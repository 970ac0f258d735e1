"""What surgery reaches in each family, what it leaves and why, and what it says of PEFT models, CGTs and modes."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import relinear
from conftest import make_tiny_llama
from relinear.contract.module_state import eval_mode
from relinear.contract.operator import Operator
from relinear.models.cgt import CGTConfig, CGTForCausalLM
from tiny_models import FAMILIES, VOCABULARY, make_family

IDS = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
THIN = relinear.LowRank(rank=1)
#: families of which "all-linear" leaves more than a tenth
GAPS = {
    "mixtral": "Experts",
    "qwen2_moe": "Experts",
    "qwen3_moe": "Experts",
    "olmoe": "Experts",
    "mamba": "dt_proj|x_proj",
}


def reasons(table) -> dict[str, str]:
    return {name: entry.reason for entry in table.coverage.skipped for name in entry.names}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_linear_parameter_is_replaced_or_left_for_a_reason(family: str) -> None:
    model = make_family(family)
    dense = sum(p.numel() for p in model.parameters() if p.ndim in (2, 3))
    dense -= sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding | nn.Conv1d))
    dense += sum(m.bias.numel() for m in model.modules() if hasattr(m, "in_features") and m.bias is not None)
    dense += sum(m.bias.numel() for m in model.modules() if type(m).__name__ == "Conv1D")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        table = relinear.replace_(model, {"all-linear": THIN})
    assert table.coverage.total == dense
    gaps = [str(w.message) for w in said if "all-linear" in str(w.message)]
    assert len(gaps) == (family in GAPS), gaps
    if gaps:
        assert any(part in gaps[0] for part in GAPS[family].split("|"))
    assert str(table.coverage) in str(table)
    assert json.loads(json.dumps(table.to_dict()))["coverage"]["replaced_layers"] == table.coverage.replaced_layers
    assert torch.isfinite(model(IDS).logits).all()
    assert relinear.summary(model).coverage.replaced_layers == table.coverage.replaced_layers


def test_reasons_are_those_of_the_call() -> None:
    table = relinear.replace_(
        make_tiny_llama(),
        {"k_proj": None, "all-linear": THIN},
        layers=[0],
        exclude="v_proj",
        filter_fn=lambda module, name: "up_proj" not in name,
    )
    said = reasons(table)
    first, second = "model.layers.0", "model.layers.1"
    assert said[f"{first}.self_attn.k_proj"] == "mapped to None"
    assert said[f"{first}.self_attn.v_proj"] == "exclude="
    assert said[f"{first}.mlp.up_proj"] == "filter_fn="
    assert said[f"{second}.self_attn.q_proj"] == "layers="
    assert said["lm_head"] == "output head"
    assert "skipped:" in str(table)
    assert "lm_head" in str(table)


def test_integers_count_as_weights() -> None:
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 64))
    table = relinear.replace_(model, {"0": relinear.Quantized(bits=4, group=64, symmetric=True)}, init="from_weight")
    integers, dense = table.rows
    assert (integers.parameters, integers.parameters_before) == (128 * 128, 128 * 128)
    assert integers.bytes == 128 * 128 // 2 + 4 * 128 * 2  # half a byte a weight, a float32 scale a group
    assert (dense.parameters, dense.bytes) == (128 * 64 + 64, 4 * (128 * 64 + 64))
    assert table.parameters == table.parameters_before == 128 * 128 + 128 * 64 + 64
    assert table.bytes == integers.bytes + dense.bytes
    assert {"4.5", "9,216"} <= {*str(table).split()}


def test_a_tied_head_counts_as_embedding() -> None:
    skipped = relinear.replace_(make_family("gpt2"), {"all-linear": THIN}).coverage.skipped
    assert [(entry.reason, entry.parameters) for entry in skipped] == [("tied to the embedding", 0)]


def test_subclasses_of_linear_are_named() -> None:
    class OwnLinear(nn.Linear):
        pass

    model = nn.Sequential(OwnLinear(8, 8), nn.ReLU())
    with pytest.raises(ValueError, match="matches no module"):
        relinear.replace_(model, {"all-linear": THIN})
    assert reasons(relinear.summary(model))["0"] == "a subclass of nn.Linear"


# Weights that the code around a layer reads


def make_tiny_t5() -> T5ForConditionalGeneration:
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()


def test_t5_reads_the_weight_of_wo() -> None:
    model = make_tiny_t5()
    with pytest.raises(ValueError, match="T5DenseActDense reads its weight"):
        relinear.replace_(model, {"wo": THIN})
    with pytest.warns(UserWarning, match="T5DenseActDense"):
        table = relinear.replace_(model, {"all-linear": THIN})
    assert table.coverage.replaced_layers == 14
    model(input_ids=torch.arange(4)[None], decoder_input_ids=torch.arange(3)[None])


def test_mamba_reads_the_weight_of_dt_proj_when_it_trains() -> None:
    model = make_family("mamba")
    with pytest.raises(ValueError, match="MambaMixer reads its weight"):
        relinear.replace_(model, {"dt_proj": THIN})
    relinear.replace_(model, {"in_proj": THIN})
    model.train()
    model(IDS, labels=IDS, use_cache=False).loss.backward()


def test_rwkv_divides_the_weights_of_all_its_blocks() -> None:
    for name in ("attention.output", "feed_forward.value"):
        with pytest.raises(ValueError, match=r"Rwkv.* reads its weight"):
            relinear.replace_(make_family("rwkv"), {name: THIN})


def test_a_read_that_is_not_foreseen_names_the_layer() -> None:
    """BLOOM reads ``dense.weight`` where ``pretraining_tp > 1 and slow_but_exact``."""
    model = make_family("bloom", pretraining_tp=2, slow_but_exact=True)
    relinear.replace_(model, {"self_attention.dense": THIN})
    with pytest.raises(AttributeError, match=r"transformer\.h\.0\.self_attention\.dense is .* operator .*exclude="):
        model(IDS)


# PEFT


def lora(model, **settings):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(**({"target_modules": ["q_proj"], "r": 2} | settings)))


def test_adapters_are_left_alone_and_what_is_new_trains() -> None:
    model = lora(make_tiny_llama(), modules_to_save=["lm_head"])
    with pytest.warns(UserWarning, match=r"PEFT model.*does not hold them.*modules_to_save"):
        table = relinear.replace_(model, {"all-linear": THIN})
    operators = {name for name, module in model.named_modules() if isinstance(module, Operator)}
    assert len(operators) == 14
    assert not any("lora_" in name or "lm_head" in name for name in operators)
    assert {entry.reason for entry in table.coverage.skipped} == {"PEFT's"}
    fresh = [p for n, p in model.named_parameters() if any(n.startswith(f"{name}.") for name in operators)]
    assert fresh
    assert all(p.requires_grad for p in fresh)
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in fresh)


def test_the_layer_inside_an_adapter_goes_by_both_names() -> None:
    for pattern in ("q_proj", "q_proj.base_layer", r".*self_attn\.q_proj"):
        model = lora(make_tiny_llama())
        with pytest.warns(UserWarning, match="PEFT"):
            relinear.replace_(model, {pattern: THIN})
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        assert isinstance(layer.base_layer, Operator)
        assert type(layer.lora_A["default"]) is nn.Linear
        assert "model.layers.0.self_attn.q_proj" in model.config.quantization_config["operators"]


def test_the_model_inside_keeps_its_operators_without_the_adapter(tmp_path) -> None:
    model = lora(make_tiny_llama())
    with pytest.warns(UserWarning, match="PEFT"):
        relinear.replace_(model, {"q_proj": THIN, "up_proj": THIN})
    plain = model.unload()
    plain.save_pretrained(tmp_path)
    assert torch.equal(relinear.from_pretrained(tmp_path)(IDS).logits, plain(IDS).logits)


def test_a_part_attached_to_a_peft_model_trains() -> None:
    model = lora(make_tiny_llama())
    with pytest.warns(UserWarning, match=r"PEFT model.*modules_to_save=\['relinear_modulator'\]"):
        relinear.attach_(model, relinear.PathTransponder())
    model(IDS, labels=IDS).loss.backward()
    new = [p for n, p in model.named_parameters() if "relinear_modulator" in n]
    assert new
    assert all(p.grad is not None for p in new)


@pytest.mark.filterwarnings("ignore:.*PEFT")
def test_auxiliary_losses_are_added_once_under_peft() -> None:
    model = make_tiny_llama()
    operator = relinear.HDPL(rank=4, blocks=2)
    relinear.replace_(model, {"q_proj": operator})
    outer = lora(model, target_modules=["v_proj"])
    relinear.replace_(outer, {"o_proj": operator})
    outer.train()
    torch.manual_seed(0)
    loss = outer(IDS, labels=IDS).loss
    added = sum(relinear.contract.auxiliary_losses_of(outer).values())
    torch.manual_seed(0)
    without = model.forward(IDS, labels=IDS).loss  # no hooks
    assert (loss - without).item() == pytest.approx(added.item(), rel=0.05)


def test_outside_of_peft_operators_stay_as_frozen_as_the_layers_they_replace() -> None:
    model = make_tiny_llama().requires_grad_(False)
    relinear.replace_(model, {"q_proj": THIN})
    assert not any(p.requires_grad for p in model.parameters())


# CGT


def make_tiny_cgt() -> CGTForCausalLM:
    sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32}
    torch.manual_seed(0)
    return CGTForCausalLM(
        CGTConfig(**sizes, context_size=8, context_layer=1, context_heads=2, templates=3, rank=2)
    ).eval()


def test_all_linear_leaves_the_mixing_of_templates() -> None:
    model = make_tiny_cgt()
    relinear.replace_(model, {"all-linear": relinear.LowRank(rank=2)})
    assert not any(isinstance(modulator.mix, Operator) for modulator in model.modulators())
    model(torch.arange(6)[None])
    with pytest.raises(ValueError, match=r"pattern 'mix' matches .*which cannot be replaced"):
        relinear.replace_(model, {"mix": relinear.LowRank(rank=2)})


@pytest.mark.parametrize("operator", [relinear.LowRank(rank=2), relinear.Monarch()])
def test_specialize_multiplies_operators_out(operator) -> None:
    model = make_tiny_cgt().double()
    relinear.replace_(model, {"all-linear": operator})
    prefix, rest = torch.arange(5)[None], torch.arange(7, 12)[None]
    stock = relinear.specialize(model, prefix)
    assert not any(isinstance(module, Operator) for module in stock.modules())
    wanted = model(rest, frozen_context=model.context(prefix)[:, -1]).logits
    torch.testing.assert_close(stock(rest).logits, wanted)


def test_specialize_says_which_operator_has_no_matrix() -> None:
    model = make_tiny_cgt()
    relinear.replace_(model, {r"transformer\.h\.2\.mlp\.c_fc": relinear.Transponder()})
    with pytest.raises(ValueError, match=r"transformer\.h\.2\.mlp\.c_fc cannot become a layer of a stock GPT-2"):
        relinear.specialize(model, torch.arange(5))


# Modes


def test_evaluating_restores_the_mode_of_every_module() -> None:
    model = make_tiny_llama().train()
    model.model.layers[0].eval()
    model.model.layers[0].mlp.train()
    before = {name: module.training for name, module in model.named_modules()}
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert {name: module.training for name, module in model.named_modules()} == before


def test_what_is_put_in_while_evaluating_takes_the_mode_of_its_place() -> None:
    model = make_tiny_llama().train()
    model.model.layers[0].self_attn.eval()
    with eval_mode(model):
        relinear.replace_(model, {"q_proj": relinear.Transponder(rank=2, base=THIN)})
    for layer, mode in zip(model.model.layers, (False, True), strict=True):
        parts = [*layer.self_attn.q_proj.modules()]
        assert len(parts) > 2
        assert all(part.training is mode for part in parts)


def test_measuring_a_model_in_part_frozen_leaves_its_modes() -> None:
    model = make_tiny_llama().train()
    relinear.replace_(model, {"q_proj": THIN})
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    relinear.check_causality(model)
    assert [module.training for module in model.modules()] == before
    twin = copy.deepcopy(model)
    relinear.fold_(twin, IDS, verbose=False)
    frozen = [module.training for module in twin.model.layers[0].modules()]
    assert not any(frozen)
    assert twin.training
