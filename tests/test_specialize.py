"""A specialised model is a stock GPT-2: same logits as the frozen model, and no need of this package."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2LMHeadModel

import relinear
from tiny_models import make_cgt


@pytest.fixture(params=[{}, {"mixing": "softmax"}, {"tie_word_embeddings": False}, {"n_inner": 40, "context_layer": 1}])
def model(request):
    return make_cgt(**request.param)


def test_logits_equal_the_frozen_models(model):
    prefix, ids = torch.randint(0, 50, (9,)), torch.randint(0, 50, (2, 20))
    stock = relinear.specialize(model, prefix)
    assert type(stock) is GPT2LMHeadModel
    y = model.context(prefix[None])[:, -1].expand(2, -1)
    with torch.no_grad():
        wanted, dynamic = model(ids, frozen_context=y).logits, model(ids).logits
        assert (stock(ids).logits - wanted).abs().max() < 1e-5
        assert (dynamic - wanted).abs().max() > 1e-2
        again = relinear.specialize(model, context=y[0])
        assert torch.equal(again(ids).logits, stock(ids).logits)


def test_positions_may_go_on_from_the_prefix(model):
    prefix, ids = torch.randint(0, 50, (1, 9)), torch.randint(0, 50, (2, 20))
    stock = relinear.specialize(model, prefix, first_position=9)
    assert stock.config.n_positions == model.config.n_positions - 9
    y = model.context(prefix)[:, -1].expand(2, -1)
    with torch.no_grad():
        wanted = model(ids, frozen_context=y, position_ids=torch.arange(9, 29)[None]).logits
        assert (stock(ids).logits - wanted).abs().max() < 1e-5


def test_what_is_attached_is_folded_or_refused(model):
    prefix, ids = torch.randint(0, 50, (9,)), torch.randint(0, 50, (2, 20))
    relinear.attach_(model, relinear.models.ReadoutScale(factor=0.25))
    y = model.context(prefix[None])[:, -1].expand(2, -1)
    with torch.no_grad():
        wanted = model(ids, frozen_context=y).logits
        assert (relinear.specialize(model, prefix)(ids).logits - wanted).abs().max() < 1e-5
    relinear.attach_(model, relinear.models.HeadBias())
    with pytest.raises(ValueError, match="head_bias attached, which a stock GPT-2 cannot express"):
        relinear.specialize(model, prefix)


def test_shares_no_storage_and_leaves_the_model_alone(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stock = relinear.specialize(model, torch.randint(0, 50, (5,)))
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.zero_()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.slow
def test_checkpoint_loads_without_relinear(tmp_path):
    model = make_cgt()
    prefix, ids = torch.randint(0, 50, (7,)), torch.randint(0, 50, (1, 12))
    relinear.specialize(model, prefix).save_pretrained(tmp_path / "out")
    save_file({"ids": ids}, tmp_path / "ids")
    code = """
import sys, torch
sys.modules["relinear"] = None
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("out").eval()
assert type(model).__name__ == "GPT2LMHeadModel"
with torch.no_grad():
    save_file({"logits": model(load_file("ids")["ids"]).logits}, "logits")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env={"PATH": ""}, timeout=120)
    with torch.no_grad():
        wanted = model(ids, frozen_context=model.context(prefix[None])[:, -1]).logits
    assert (load_file(tmp_path / "logits")["logits"] - wanted).abs().max() < 1e-5


def test_a_list_of_ids_will_do():
    model = make_cgt()
    stock, other = relinear.specialize(model, [3, 4, 5]), relinear.specialize(model, torch.tensor([[3, 4, 5]]))
    for name, value in stock.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize("prefix", ["a text", [[3, 4], [5, 6]], 7, [], [50], [-1], [1.5], [True], {"input_ids": [3]}])
def test_what_is_no_prefix_is_refused_by_its_name(prefix):
    with pytest.raises(ValueError, match="prefix_ids must be"):
        relinear.specialize(make_cgt(), prefix)


def test_an_input_beyond_the_positions_is_refused():
    model, ids = make_cgt(), torch.zeros(1, 65, dtype=torch.long)
    for call in (model, model.context):
        with pytest.raises(ValueError, match="65 tokens and the cache 0; the model has n_positions=64"):
            call(ids)
    cache = model(ids[:, :60], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="5 tokens and the cache 60"):
        model(ids[:, :5], past_key_values=cache)


def test_refusals(tiny_gpt2):
    model = make_cgt()
    with pytest.raises(ValueError, match="CGTForCausalLM"):
        relinear.specialize(tiny_gpt2, torch.tensor([1]))
    with pytest.raises(ValueError, match="either"):
        relinear.specialize(model)
    with pytest.raises(ValueError, match="n_positions"):
        relinear.specialize(model, torch.zeros(65, dtype=torch.long))
    with pytest.raises(ValueError, match="first_position"):
        relinear.specialize(model, torch.tensor([1]), first_position=64)
