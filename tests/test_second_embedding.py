"""The second embedding: what the MLPs read, where it may be, and that it goes where models go."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import relinear
from conftest import make_tiny_gpt2, make_tiny_llama

IDS = torch.randint(0, 96, (2, 11), generator=torch.Generator().manual_seed(3))
MAKERS = {"llama": make_tiny_llama, "gpt2": make_tiny_gpt2}


def treated(make, **settings):
    model = make()
    relinear.attach_(model, relinear.residual.SecondEmbedding(std=1.0, **settings))
    return model.eval()


def mlp_inputs(model):
    seen = []
    mlps = [m for n, m in model.named_modules() if n.endswith(".mlp")]
    hooks = [m.register_forward_pre_hook(lambda module, args: seen.append(args[0])) for m in mlps]
    logits = model(IDS).logits
    for hook in hooks:
        hook.remove()
    return seen, logits


@pytest.mark.parametrize("dim", [None, 5])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_every_mlp_reads_the_embedding_of_its_tokens(make, dim):
    torch.manual_seed(0)
    stock = make()
    model = copy.deepcopy(stock)
    relinear.attach_(model, relinear.residual.SecondEmbedding(dim=dim, std=1.0))
    owner = next(m for n, m in model.named_modules() if n.endswith("relinear_context"))
    assert (owner.projection is None) == (dim is None)
    given = owner.embedding(IDS)
    given = given if dim is None else given @ owner.projection.weight.T
    (first, *_), logits = mlp_inputs(model.eval())
    (plain, *_), before = mlp_inputs(stock.eval())
    torch.testing.assert_close(first, plain + given)
    assert not torch.allclose(logits, before)
    with torch.no_grad():
        owner.embedding.weight.zero_()
    assert torch.equal(model(IDS).logits, before)


def test_its_start_is_that_of_the_model():
    model = make_tiny_llama(initializer_range=0.3)
    relinear.attach_(model, relinear.residual.SecondEmbedding())
    assert model.model.relinear_context.embedding.weight.std().item() == pytest.approx(0.3, rel=0.1)


def test_it_learns_under_checkpointing_as_without():
    model = treated(make_tiny_llama, dim=5).train()
    other = copy.deepcopy(model)
    other.gradient_checkpointing_enable({"use_reentrant": False})
    for one in (model, other):
        one(input_ids=IDS, labels=IDS).loss.backward()
    table = model.model.relinear_context.embedding.weight
    assert table.grad[IDS[:, :-1].unique()].abs().sum(1).all()
    torch.testing.assert_close(table.grad, other.model.relinear_context.embedding.weight.grad)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_it_is_saved_generates_and_looks_nowhere_ahead(make, tmp_path):
    model = treated(make, dim=5)
    relinear.check_causality(model)
    model.save_pretrained(tmp_path)
    torch.manual_seed(9)
    again = relinear.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(IDS).logits, model(IDS).logits)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    cached, whole = (model.generate(IDS, use_cache=cache, **settings) for cache in (True, False))
    assert torch.equal(cached, whole)


def test_integers_in_its_place_are_refused(tmp_path):
    treated(make_tiny_llama, dim=5).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    (key,) = (key for key in state if key.endswith("relinear_context.embedding.weight"))
    save_file(state | {key: state[key].to(torch.int64)}, path, metadata={"format": "pt"})
    for load in (relinear.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match="integers for floats"):
            load(tmp_path)


def test_it_is_refused_where_it_cannot_be_right():
    model = treated(make_tiny_llama)
    with pytest.raises(ValueError, match="needs input_ids"):
        model(inputs_embeds=torch.zeros(1, 2, 32))
    with pytest.raises(ValueError, match="already"):
        relinear.attach_(model, relinear.ContextManager(dim=4))
    conditioned = make_tiny_llama()
    relinear.replace_(conditioned, {"up_proj": relinear.CCL(rank=3, context_dim=4)})
    with pytest.raises(ValueError, match="attach a ContextManager"):
        relinear.attach_(conditioned, relinear.residual.SecondEmbedding())
    for bad in ({"dim": 0}, {"std": -1.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            relinear.residual.SecondEmbedding(**bad)
