"""A vocabulary that is resized: every part that knows the tokens follows, and what is saved then can be loaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, CLIPVisionConfig, LlamaConfig, LlavaConfig

import relinear
from conftest import mostly_slow
from relinear.hf.vocabulary import max_positions
from relinear.models import HeadBias, ReadoutScale
from tiny_models import make_family

VOCABULARY = 90  # no other size in these models

#: what a model gets, each with something that is as large as the vocabulary or that sits on such a thing
PARTS = {
    "context manager": [relinear.ContextManager(dim=8, mixer="ema")],
    "second embedding": [relinear.residual.SecondEmbedding(dim=8)],
    "head": [HeadBias(), ReadoutScale(factor=0.25)],
}


def treated(family: str, parts: str, **settings):
    model = make_family(family, vocab_size=VOCABULARY, **settings)
    for part in PARTS[parts]:
        relinear.attach_(model, part)
    if parts == "context manager":
        name = "c_fc" if family == "gpt2" else "up_proj"
        relinear.replace_(model, {name: relinear.CCL(rank=4, context_dim=8)})
    with torch.no_grad():
        for parameter in model.parameters():  # no bias at zero
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("size", mostly_slow([VOCABULARY + 9, VOCABULARY - 9], VOCABULARY - 9))
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", mostly_slow(["llama", "gpt2"], "llama"))
@pytest.mark.parametrize("parts", PARTS)
def test_all_parts_follow_the_vocabulary(tmp_path, parts, family, tied, size):
    model = treated(family, parts, tie_word_embeddings=tied)
    kept = min(size, VOCABULARY)
    ids = torch.arange(10).view(2, 5)
    with torch.no_grad():
        before, values = model(ids).logits, {name: p.clone() for name, p in model.state_dict().items()}
        model.resize_token_embeddings(size)
        # The values of the tokens that stay are those that they were, to the bit.
        torch.testing.assert_close(model(ids).logits[..., :kept], before[..., :kept])
        for name, value in model.state_dict().items():
            was = values[name]
            assert value.shape == (was.shape if was.shape[0] != VOCABULARY else (size, *was.shape[1:])), name
            assert torch.equal(value[:kept], was[:kept]), name
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        last = torch.tensor([[size - 1, 0, size - 2]])
        assert torch.equal(loaded(last).logits, model(last).logits)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied


def test_new_rows_are_drawn_as_the_models_own():
    model = treated("llama", "context manager")
    table = model.model.relinear_context.embedding
    mean = table.weight.mean(0)
    model.resize_token_embeddings(VOCABULARY + 1, pad_to_multiple_of=10)
    assert table.num_embeddings == VOCABULARY + 10
    torch.testing.assert_close(table.weight[VOCABULARY:], mean.expand(10, -1), atol=1e-3, rtol=0)
    model.resize_token_embeddings(VOCABULARY + 200, mean_resizing=False)
    assert 0.01 < table.weight[VOCABULARY + 10 :].std() < 0.03  # initializer_range


def test_an_operator_as_the_head_is_refused_before_anything_changes():
    model = make_family("llama", vocab_size=VOCABULARY)
    relinear.replace_(model, {"lm_head": relinear.LowRank(rank=4)})
    with pytest.raises(ValueError, match=r"low_rank.*fold_"):
        model.resize_token_embeddings(100)
    assert model.get_input_embeddings().num_embeddings == model.config.vocab_size == VOCABULARY
    assert model.resize_token_embeddings() is model.get_input_embeddings()


def test_a_table_that_is_wrapped_is_refused_before_anything_changes():
    model = treated("llama", "second embedding")
    model.model.relinear_context.embedding = nn.Sequential(model.model.relinear_context.embedding)
    with pytest.raises(ValueError, match="Sequential"):
        model.resize_token_embeddings(100)
    assert model.get_input_embeddings().num_embeddings == VOCABULARY


def test_a_vocabulary_that_was_changed_by_hand():
    for parts, name in (("context manager", "ContextManager"), ("second embedding", "second embedding")):
        model = treated("llama", parts)
        model.set_input_embeddings(nn.Embedding(100, 32))
        with pytest.raises(ValueError, match=f"grown to 100, the {name} knows 90 tokens; .*resize_token_embeddings"):
            model(torch.arange(10)[None])


def test_a_stock_model_is_resized_as_ever():
    model = make_family("llama", tie_word_embeddings=False)
    head = model.lm_head
    model.resize_token_embeddings(100)
    assert model.lm_head is not head
    assert model.lm_head.out_features == 100


def test_the_longest_sequence_of_a_model_of_several_is_the_language_models():
    text, model = LlamaConfig(max_position_embeddings=64), nn.Module()
    model.config = LlavaConfig(vision_config=CLIPVisionConfig(), text_config=text)
    assert max_positions(model) == 64
