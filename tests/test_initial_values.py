"""Initial values of operators and attached parts that are made on the meta device, or inside a model's own making."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import relinear
from conftest import make_tiny_gpt2, make_tiny_llama, mostly_slow
from outside.families import FAMILIES
from relinear.contract.operator import Operator
from relinear.contract.wrapper import Wrapper
from relinear.models.cgt import CGTForRegression

MAKERS = {"llama": make_tiny_llama, "gpt2": make_tiny_gpt2}
# DeepNorm rescales the values that are there when it is attached: on meta there are none
STOCK = ("llama", "gpt2", "cgt", "deep_norm")
NAMES = [name for name in FAMILIES if name not in STOCK]


@pytest.fixture
def _no_chance(monkeypatch):
    """Whatever is drawn is constant, so that two draws can be compared."""
    monkeypatch.setattr(torch.Tensor, "normal_", lambda self, mean=0.0, std=1.0, **_: self.fill_(mean + std))
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, a=0.0, b=1.0, **_: self.fill_(b))
    monkeypatch.setattr(torch, "randn", lambda *size, **options: torch.ones(*size, **{**options, "generator": None}))


def initialized_on_meta(make):
    """What ``make`` makes on the meta device, its values from ``init_weights`` alone."""
    with torch.device("meta"):
        model = make()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(-1000)
    model.init_weights()
    return model


def with_parts(name, **sizes):
    model = MAKERS[FAMILIES[name].model](**sizes)
    FAMILIES[name].put_in(model)
    return model


@pytest.mark.usefixtures("_no_chance")
@pytest.mark.parametrize("name", NAMES)
def test_parts_made_on_meta_are_initialised_with_the_model(name: str) -> None:
    expected, model = with_parts(name), initialized_on_meta(lambda: with_parts(name))
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, msg=lambda text, key=key: f"{key}: {text}")


def loaded_in_part(model):
    """``model`` from a state that lacks all but its embeddings."""
    state = {key: value for key, value in model.state_dict().items() if "embed_tokens" in key or "wte" in key}
    return type(model).from_pretrained(None, config=model.config, state_dict=state)


ROUTES = {
    "built": lambda make: make(),
    "from its config": lambda make: type(make())._from_config(make().config),
    "on meta": initialized_on_meta,
    "loaded in part": lambda make: loaded_in_part(make()),
}


@pytest.mark.usefixtures("_no_chance")
@pytest.mark.parametrize("route", mostly_slow(ROUTES, "on meta"))
@pytest.mark.parametrize("kind", mostly_slow(MAKERS, "gpt2"))
@pytest.mark.parametrize("name", mostly_slow(NAMES, "transponder", "mixed_gpt2"))
def test_what_a_part_leaves_in_place_is_initialised_as_in_the_stock_model(name, kind, route, monkeypatch) -> None:
    """Every value is its own standard deviation here: 12 layers of GPT-2 show whether c_proj is scaled."""
    family, sizes = FAMILIES[name], {"n_layer": 12} if kind == "gpt2" else {}
    if kind != family.model:
        if family.layers and "all-linear" not in family.layers:
            pytest.skip("it names the layers of another model")
        monkeypatch.setitem(FAMILIES, name, dataclasses.replace(family, model=kind))
    stock = dict(MAKERS[kind](**sizes).named_parameters())
    model = ROUTES[route](lambda: with_parts(name, **sizes))
    left = {key.replace(".base.", "."): value for key, value in model.named_parameters()}
    for key in left.keys() & stock.keys():
        if left[key].shape == stock[key].shape and not isinstance(owner(model, key), Operator):
            assert torch.equal(left[key], stock[key]), key


def owner(model, key):
    """The module that a parameter of the stock model was put into, a wrapper's own layer among them."""
    module = model.get_submodule(key.rpartition(".")[0])
    while isinstance(module, Wrapper):
        module = module.base
    return module


def make_cgt(kind=relinear.CGTForCausalLM, **settings):
    settings = {"n_embd": 32, "n_head": 4, "context_size": 16, "context_heads": 2, "variational": True} | settings
    return kind(relinear.CGTConfig(vocab_size=96, n_positions=128, **settings)).eval()


@pytest.mark.usefixtures("_no_chance")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("layers", mostly_slow([2, 12], 12))
@pytest.mark.parametrize("kind", [relinear.CGTForCausalLM, CGTForRegression])
def test_both_streams_of_a_cgt_are_initialised_as_gpt2(kind, layers, route) -> None:
    vectors = {} if kind is relinear.CGTForCausalLM else {"input_features": 3, "output_features": 2}
    sizes = {"n_layer": layers, "initializer_range": 0.03}
    model = ROUTES[route](lambda: make_cgt(kind, context_layer=layers // 2, **sizes, **vectors))
    stock = make_tiny_gpt2(tied=True, **sizes).state_dict()
    compared = 0
    for key, value in model.state_dict().items():
        y = key.replace(".context.", ".").replace("context_ln", "ln_f").replace("context_w", "w")
        if key in stock:
            assert torch.equal(value, stock[key]), key
            compared += 1
        elif y in stock:
            assert torch.equal(value.unique(), stock[y].unique()), key
    assert compared == len(stock) - (2 if vectors else 0)  # a regression model has no table of tokens and no head
    assert not model.transformer.context_log_variance.weight.any()


@pytest.mark.parametrize("mixing", ["tanh", "softmax"])
def test_generated_operators_change_x_as_much_for_few_templates_as_for_many(mixing) -> None:
    def change(templates: int) -> float:
        torch.manual_seed(0)
        sizes = {"n_layer": 2, "context_layer": 1, "context_size": 128}
        model = make_cgt(templates=templates, mixing=mixing, **sizes)
        x, y = torch.randn(1, 500, 32), torch.randn(1, 500, 128)
        with torch.no_grad():
            return float((model.modulators()[0](x, y) - x).norm() / x.norm())

    few, many = change(4), change(64)
    if mixing == "tanh":
        assert 0.9 < many / few < 1.1
        assert 0.01 < few < 0.02
    else:  # the squares of M shares sum up to between 1 / M and e / M
        assert 1 < many / few < 1.8


def test_initialising_again_leaves_what_has_its_values() -> None:
    model = make_tiny_llama()
    FAMILIES["mixed"].put_in(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.init_weights()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


class Shift(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.constant_(self.shift, 0.5)


@relinear.register
class ShiftOfAnotherPackage(relinear.contract.AttachmentConfig):
    kind = "shift_of_another_package"

    def attach(self, model):
        model.model.add_module("relinear_shift", Shift(8))


def test_parts_of_other_packages_are_initialised_with_the_model() -> None:
    def make():
        model = make_tiny_llama()
        relinear.attach_(model, ShiftOfAnotherPackage())
        return model

    model = initialized_on_meta(make)
    assert (model.model.relinear_shift.shift == 0.5).all()


def test_a_state_without_the_operators_gives_fresh_ones() -> None:
    model = make_tiny_llama()
    relinear.replace_(model, {"all-linear": relinear.LowRank(rank=4)})
    state = {key: value for key, value in model.state_dict().items() if "proj" not in key}
    loaded = type(model).from_pretrained(None, config=model.config, state_dict=state)
    down = torch.cat([value.flatten() for key, value in loaded.state_dict().items() if key.endswith(".down")])
    assert 0.5 < down.std() / torch.cat([m.down.flatten() for m in model.modules() if hasattr(m, "down")]).std() < 2


def test_a_table_of_another_vocabulary_is_drawn_anew_where_that_is_asked_for(tmp_path) -> None:
    model = make_tiny_llama()
    relinear.attach_(model, relinear.ContextManager(dim=8, mixer="ema"))
    with torch.no_grad():
        model.model.relinear_context.memory.log_timescale.fill_(7)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        type(model).from_pretrained(tmp_path, vocab_size=10)
    context = type(model).from_pretrained(tmp_path, vocab_size=10, ignore_mismatched_sizes=True).model.relinear_context
    assert context.embedding.weight.shape == (10, 8)
    assert 0.5 < context.embedding.weight.std() < 2
    assert (context.memory.log_timescale == 7).all()
