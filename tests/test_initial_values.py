"""Initial values of operators and attached parts that are made on the meta device, or inside a model's own making."""

from __future__ import annotations

import pytest
import torch

import relinear
from conftest import make_tiny_gpt2, make_tiny_llama
from outside.families import FAMILIES

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


@pytest.mark.usefixtures("_no_chance")
@pytest.mark.parametrize("name", NAMES)
def test_parts_made_on_meta_are_initialised_with_the_model(name: str) -> None:
    make = MAKERS[FAMILIES[name].model]
    expected = make()
    FAMILIES[name].put_in(expected)
    with torch.device("meta"):
        model = make()
        FAMILIES[name].put_in(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(-1000)
    model.init_weights()
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, msg=lambda text, key=key: f"{key}: {text}")


def test_initialising_again_leaves_what_has_its_values() -> None:
    model = make_tiny_llama()
    FAMILIES["mixed"].put_in(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.init_weights()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


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
