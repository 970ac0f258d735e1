"""Where the context cannot be right, or is missing, the error says so and what to do."""

from __future__ import annotations

import copy
import gc
from unittest.mock import Mock

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import relinear
from conftest import make_tiny_gpt2, make_tiny_llama
from relinear.activations.shared_context import context_owner, current_context
from relinear.functional.context_manager import linear_recurrence
from relinear.training import TrainSettings, build_model

MANAGER = relinear.ContextManager(dim=8)
LAYER = relinear.CCL(rank=4, context_dim=8)
IDS = torch.arange(10).view(2, 5)


@pytest.fixture
def _no_traceback_of_another_test():
    """A forward that failed leaves its context to its traceback, which is in circles: it ends with them."""
    gc.collect()


def conditioned(manager=MANAGER):
    model = make_tiny_llama()
    relinear.attach_(model, manager)
    relinear.replace_(model, {"mlp.up_proj": LAYER})
    return model


def unchanged(model, call, match: str) -> None:
    """``call`` is refused and leaves no trace."""
    before = {name: p.clone() for name, p in model.state_dict().items()}
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    with pytest.raises(ValueError, match=match):
        call()
    assert {name: p.shape for name, p in model.state_dict().items()} == {n: p.shape for n, p in before.items()}
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks


def test_a_missing_manager() -> None:
    model = make_tiny_llama()
    relinear.replace_(model, {"mlp.up_proj": LAYER})
    with pytest.raises(ValueError, match=r"ContextManager\(dim=8\)"):
        model(IDS)


def test_a_run_without_a_manager_is_refused_before_it_starts() -> None:
    settings = {"model": "tiny", "operators": {"q_proj": "ccl:rank=8"}}
    with pytest.raises(ValueError, match=r"kind: context_manager, dim: 64"):
        build_model(TrainSettings(**settings))
    build_model(TrainSettings(**settings, attachments=["context_manager:dim=64"]))


def test_two_managers() -> None:
    model = conditioned()
    unchanged(model, lambda: relinear.attach_(model, MANAGER), "already")


@pytest.mark.parametrize("manager_first", [True, False])
def test_widths_that_differ(manager_first: bool) -> None:
    model = make_tiny_llama()
    wrong = relinear.CCL(rank=4, context_dim=6)
    first, second = (
        lambda: relinear.attach_(model, MANAGER),
        lambda: relinear.replace_(model, {"mlp.up_proj": wrong}),
    )
    if not manager_first:
        first, second = second, first
    first()
    unchanged(model, second, "context_dim=6.*dim=8")


def test_an_encoder_decoder() -> None:
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    unchanged(model, lambda: relinear.attach_(model, MANAGER), "encoder-decoder")
    cross = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, add_cross_attention=True))
    unchanged(cross, lambda: relinear.attach_(cross, MANAGER), "cross-attention")


@pytest.mark.parametrize("mixer", ["ema", "gru"])
def test_assisted_decoding(mixer: str) -> None:
    model = conditioned(MANAGER.replace(mixer=mixer))
    with pytest.raises(ValueError, match="assisted"):
        model.generate(IDS[:1], assistant_model=make_tiny_llama(), max_new_tokens=4, pad_token_id=0)
    with pytest.raises(ValueError, match="assisted"):
        model.generate(IDS[:1], prompt_lookup_num_tokens=2, max_new_tokens=4, pad_token_id=0)


def test_assisted_decoding_without_memory_is_exact() -> None:
    model = conditioned()
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(IDS[:1], **settings)
    assert torch.equal(model.generate(IDS[:1], prompt_lookup_num_tokens=3, **settings), plain)


def test_inputs_embeds() -> None:
    embeddings = make_tiny_llama().get_input_embeddings()(IDS)
    with pytest.raises(ValueError, match="source='embeddings'"):
        conditioned()(inputs_embeds=embeddings)
    model = conditioned(MANAGER.replace(source="embeddings", mixer="ema"))
    embeddings = model.get_input_embeddings()(IDS)
    assert torch.equal(model(inputs_embeds=embeddings).logits, model(IDS).logits)


def test_a_model_that_does_not_hand_keywords_on() -> None:
    config = GPTJConfig(vocab_size=32, n_embd=16, n_layer=1, n_head=2, rotary_dim=4, n_positions=16)
    model = AutoModelForCausalLM.from_config(config)
    relinear.attach_(model, MANAGER)
    relinear.replace_(model, {"fc_in": LAYER})
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in context_owner(model).parameters())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ValueError, match="GPTJBlock does not pass keyword arguments on to its attention"):
        model(IDS)


def test_what_watches_the_checkpoint_function_is_not_taken_for_reentrant() -> None:
    model = conditioned().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layer = model.model.layers[0]
    layer._gradient_checkpointing_func = Mock(side_effect=layer._gradient_checkpointing_func)
    model(IDS, labels=IDS).loss.backward()
    assert layer._gradient_checkpointing_func.called


def test_reentrant_checkpointing() -> None:
    model = conditioned().train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match=r"use_reentrant.*False"):
        model(IDS)
    model = make_tiny_llama().train()
    relinear.attach_(model, "laurel_pa")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match=r"use_reentrant.*False"):
        model(IDS)


def test_a_model_without_decoder_layers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    unchanged(model, lambda: relinear.attach_(model, MANAGER), "decoder")


def test_the_output_head() -> None:
    model = conditioned()
    unchanged(model, lambda: relinear.replace_(model, {"lm_head": LAYER}), "outside the decoder layers")
    model = make_tiny_llama()
    relinear.replace_(model, {"lm_head": LAYER})
    unchanged(model, lambda: relinear.attach_(model, MANAGER), "outside the decoder layers")


def test_data_parallel() -> None:
    replica = conditioned().base_model._replicate_for_data_parallel()
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        replica(IDS)


def test_a_cache_that_the_manager_has_not_seen() -> None:
    cache = make_tiny_llama()(IDS, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="not seen"):
        conditioned(MANAGER.replace(mixer="ema"))(IDS, past_key_values=cache)


@pytest.mark.parametrize("bad", [{"dim": 0}, {"source": "x"}, {"mixer": "rnn"}, {"timescales": ()}])
def test_bad_settings(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        relinear.ContextManager(**bad)
    with pytest.raises(ValueError, match=r"timescales\.1 must be above 0, got -2\.0"):
        relinear.ContextManager(timescales=(1.0, -2.0))


# The carrier


@pytest.mark.usefixtures("_no_traceback_of_another_test")
def test_context_by_hand() -> None:
    layer, x = LAYER.build(5, 7), torch.randn(2, 3, 5)
    with pytest.raises(ValueError, match=r"with relinear\.activations\.context"):
        layer(x)
    outer, inner = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    with relinear.activations.context(outer):
        first = layer(x)
        with relinear.activations.context(inner):
            second = layer(x)
        assert torch.equal(layer(x), first)
    with relinear.activations.context(inner):
        assert torch.equal(layer(x), second)
    assert not torch.equal(first, second)
    with relinear.activations.context(outer[:1, :1]):  # one context for all tokens
        assert torch.allclose(layer(x)[0, 0], first[0, 0])
    with pytest.raises(ValueError, match="needs a context"):
        layer(x)


@pytest.mark.usefixtures("_no_traceback_of_another_test")
def test_a_failing_block_gives_the_context_back() -> None:
    with pytest.raises(KeyError), relinear.activations.context(torch.zeros(1, 8)):
        raise KeyError
    with pytest.raises(ValueError, match="needs a context"):
        current_context(None, 8, "test")


@pytest.mark.parametrize("shape", [(2, 4, 8), (1, 2, 3, 8), (3, 1, 8)])
def test_a_context_for_other_tokens(shape: tuple[int, ...]) -> None:
    with relinear.activations.context(torch.zeros(shape)), pytest.raises(ValueError, match="context is for tokens"):
        LAYER.build(5, 7)(torch.zeros(2, 3, 5))
    with relinear.activations.context(torch.zeros(2, 3, 9)), pytest.raises(ValueError, match="width 9"):
        LAYER.build(5, 7)(torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match="floating-point"):
        relinear.activations.context(IDS)


def test_no_context_outlives_its_forward() -> None:
    model = conditioned().train()
    model.gradient_checkpointing_enable()
    model(IDS, labels=IDS).loss.backward()
    gc.collect()
    with pytest.raises(ValueError, match="needs a context"):
        current_context(None, 8, "test")
    layer = model.model.layers[0].mlp.up_proj
    with pytest.raises(ValueError, match="needs a context"):
        layer(torch.zeros(1, 2, 32))


def test_two_models_in_turn() -> None:
    torch.manual_seed(0)
    one, two = conditioned(), conditioned(MANAGER.replace(mixer="ema"))
    expected = [one(IDS).logits, two(IDS).logits]
    for _ in range(2):
        assert torch.equal(one(IDS).logits, expected[0])
        assert torch.equal(two(IDS).logits, expected[1])


def test_the_manager_wins_inside_its_model() -> None:
    model = conditioned()
    expected = model(IDS).logits
    with relinear.activations.context(torch.full((2, 5, 8), 9.0)) as given:
        assert torch.equal(model(IDS).logits, expected)
        assert current_context(None, 8, "test") is given


def test_one_context_a_forward() -> None:
    model, calls = conditioned(), []
    context_owner(model).register_forward_hook(lambda *a: calls.append(1))
    model(IDS)
    assert len(calls) == 1


# The manager


@pytest.mark.parametrize("mixer", ["ema", "gru"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_stays_finite_and_bounded(mixer: str, dtype: torch.dtype) -> None:
    model = conditioned(relinear.ContextManager(dim=8, mixer=mixer, timescales=(1e-3, 1.0, 1e6))).to(dtype)
    owner = context_owner(model)
    ids = torch.randint(0, 96, (1, 3000))
    context, state = owner(ids)
    context.float().square().sum().backward()
    assert state.dtype == torch.float32
    assert state.abs().max() <= owner.embedding.weight.float().abs().max()
    assert all(torch.isfinite(p.grad).all() for p in owner.parameters())
    reference = copy.deepcopy(owner).double()
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    assert torch.allclose(context.double(), reference(ids)[0], atol=tolerance)


def test_time_scales() -> None:
    """After an impulse, a channel of time constant tau has decayed by 1/e after tau tokens."""
    manager = relinear.ContextManager(dim=8, mixer="ema", timescales=(4.0, 20.0))
    owner = context_owner(conditioned(manager))
    impulse = torch.zeros(1, 21, 8)
    impulse[:, 0] = 1
    decay, value = owner.memory(impulse)
    states = linear_recurrence(decay, value, torch.zeros(1, 8))[0].detach()
    assert states[4, 0] / states[0, 0] == pytest.approx(1 / torch.e, rel=1e-5)
    assert states[20, 1] / states[0, 1] == pytest.approx(1 / torch.e, rel=1e-5)


def test_parameters_of_the_papers_models() -> None:
    """CCL-64 has 10.29 M parameters: Base-64, a token embedding of width 64, and the gates."""
    model = relinear.from_preset("gpt2-ccl-64")
    assert model.num_parameters() == 6_787_281
    relinear.attach_(model, relinear.ContextManager())
    relinear.replace_(model, {"mlp.c_fc": relinear.CCL(), "mlp.c_proj": relinear.CCL()})
    assert round(model.num_parameters() / 1e6, 2) == 10.29


def test_a_pretrained_model_starts_near_itself() -> None:
    model = make_tiny_gpt2()
    expected = model(IDS).logits
    relinear.attach_(model, MANAGER)
    full = relinear.CCL(rank=32, context_dim=8, norm=False)
    relinear.replace_(model, {"all-linear": full}, init="from_weight")
    assert torch.allclose(model(IDS).logits, expected, atol=1e-5)
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "gate" in n)
    with pytest.raises(ValueError, match="norm=False"):
        relinear.replace_(make_tiny_gpt2(), {"all-linear": relinear.CCL()}, init="from_weight")


def test_a_forward_that_fails_leaves_no_context() -> None:
    model = make_tiny_llama()
    relinear.attach_(model, relinear.ContextManager(dim=8))
    relinear.replace_(model, {"up_proj": relinear.CCL(rank=4, context_dim=8), "down_proj": relinear.LowRank(rank=2)})

    def fail(module, args):
        raise RuntimeError("in the middle")

    model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle") as kept:  # as a notebook keeps the last exception
        model(torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="needs a context"):
        model.model.layers[0].mlp.up_proj(torch.zeros(1, 4, 32))
    del kept
