"""An operator in the place of the embedding, with the head that is tied to it: rows, checkpoints, heads, folding."""

import copy

import peft
import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

import relinear
from conftest import make_tiny_llama, mostly_slow
from relinear.compression import compress
from relinear.compression.budget import stored_bytes

EIGHT = "quantized:bits=8,symmetric=true"
IDS = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(0))


def tiny(kind: str = "llama", tie: bool = True, layers: int = 2):
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(vocab_size=300, n_embd=64, n_layer=layers, n_head=4, tie_word_embeddings=tie)
    else:
        of = {"llama": LlamaConfig, "qwen2": Qwen2Config, "mistral": MistralConfig}[kind]
        sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers}
        config = of(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tie)
    config.pad_token_id = 0
    return AutoModelForCausalLM.from_config(config).eval()


def rounded(kind: str = "llama", tie: bool = True):
    model = tiny(kind, tie)
    names = ["wte" if kind == "gpt2" else "embed_tokens", *([] if tie else ["lm_head"])]
    relinear.replace_(model, dict.fromkeys(names, EIGHT), init="from_weight")
    return model


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def body(model) -> torch.Tensor:
    with torch.no_grad():
        return model.base_model(IDS)[0]


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gpt2"])
def test_it_is_loaded_by_every_head_and_folds_back(kind: str, tie: bool, tmp_path) -> None:
    model, expected = rounded(kind, tie), logits(tiny(kind, tie))
    found = logits(model)
    assert 0 < (found - expected).abs().max() < 0.1 * expected.std()
    table = model.get_input_embeddings()
    assert torch.equal(table(IDS), table.to_dense()[IDS])
    assert sum(key.endswith(".codes") for key in model.state_dict()) == (1 if tie else 2)
    relinear.save_pretrained(model, tmp_path / "whole")
    for load in (relinear.from_pretrained, AutoModelForCausalLM.from_pretrained):
        again = load(tmp_path / "whole").eval()
        again.tie_weights()  # as Trainer and accelerate do
        assert torch.equal(logits(again), found)
    assert torch.equal(logits(copy.deepcopy(model)), found)
    again.generate(IDS[:1], max_new_tokens=2)
    other = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole").eval()
    assert torch.equal(body(other), body(model))
    base = AutoModel.from_pretrained(tmp_path / "whole").eval()
    relinear.save_pretrained(base, tmp_path / "base")
    headed = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    assert torch.equal(body(headed), body(model))
    if tie:
        assert torch.equal(logits(headed), found)

    relinear.fold_(model, verbose=False)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    assert (type(table), type(head)) == (torch.nn.Embedding, torch.nn.Linear)
    assert (head.weight is table.weight) == tie
    torch.testing.assert_close(logits(model), found, atol=1e-6, rtol=0)
    model.save_pretrained(tmp_path / "stock")
    assert "relinear" not in (tmp_path / "stock" / "config.json").read_text()
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "stock").eval()), logits(model))
    assert model.resize_token_embeddings(310).num_embeddings == 310


def test_a_name_means_it_and_no_pattern_for_layers_does() -> None:
    for pattern in ("all-linear", r".*", r"model\..*"):
        model = tiny(tie=False)
        assert not any(r.name.endswith("embed_tokens") for r in relinear.plan(model, {pattern: EIGHT}).replacements)
        relinear.replace_(model, {"embed_tokens": EIGHT}, init="from_weight")
        relinear.replace_(model, {pattern: "low_rank:rank=4"}, init="from_weight")
        assert model.get_input_embeddings().config.kind == "quantized"
    for operator in ("hdpl:rank=4,blocks=4", "transponder", "rotor", "ccl:rank=4"):
        with pytest.raises(ValueError, match=r"embed_tokens is an embedding, .* has no rows; give an operator with"):
            relinear.replace_(tiny(), {"embed_tokens": operator})
    with pytest.raises(ValueError, match="the embedding is an operator"):
        rounded().resize_token_embeddings(310)
    with pytest.raises(ValueError, match="embed_tokens is an embedding that is an operator, which LoRA does"):
        peft.get_peft_model(rounded(), peft.LoraConfig(target_modules=["embed_tokens"]))


def test_folding_keeps_the_row_of_padding() -> None:
    model = make_tiny_llama(pad_token_id=3)
    assert model.model.embed_tokens.padding_idx == 3
    relinear.replace_(model, {"embed_tokens": "quantized:bits=8"}, init="from_weight")
    relinear.fold_(model, verbose=False)
    assert model.model.embed_tokens.padding_idx == 3


def test_its_scales_train_through_lookup_and_head() -> None:
    model = rounded().train()
    scales = model.get_input_embeddings().scales
    grads = []
    for given in ({"input_ids": IDS}, {"inputs_embeds": model.get_input_embeddings()(IDS).detach()}):
        model.zero_grad()
        model(**given, labels=IDS).loss.backward()
        grads.append(scales.grad.clone())
    assert all(bool(g.any()) for g in grads)
    assert not torch.equal(*grads), "looked up as well as multiplied with"
    thin = tiny()
    relinear.replace_(thin, {"embed_tokens": "low_rank:rank=4"})
    assert relinear.summary(thin).flops_before == relinear.summary(tiny()).flops_per_token
    untied = tiny(tie=False)
    relinear.replace_(untied, {"lm_head": EIGHT})
    assert "_tied_weights_keys" not in vars(untied), "of a head by itself nothing else is told"
    summary = relinear.summary(model)
    assert (summary.flops_per_token, summary.parameters_before) == (
        relinear.summary(tiny()).flops_per_token,
        relinear.summary(tiny()).parameters,
    )


@pytest.mark.parametrize("tie", mostly_slow([True, False], True))
def test_a_budget_of_bytes_rounds_it(tie: bool, tmp_path) -> None:
    model, ids = tiny(tie=tie, layers=1), torch.randint(300, (64, 16), generator=torch.Generator().manual_seed(1))
    settings = {"bits": 4.5, "tokens": 512, "sequence_length": 16, "evaluation_tokens": 64, "heal_tokens": 64}
    settings |= {"passages": 0}
    report = compress(model, ids, settings=settings, out_dir=tmp_path)
    assert model.get_input_embeddings().config.kind == "quantized"
    assert report.bytes == stored_bytes(model)
    assert report.bytes < 0.5 * report.bytes_before
    again = relinear.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    assert torch.equal(logits(again), logits(model))


def test_an_embedding_that_is_left_out_of_a_budget_stays() -> None:
    kept, ids = tiny(layers=1), torch.randint(300, (64, 16), generator=torch.Generator().manual_seed(1))
    settings = {"bits": 4.5, "tokens": 512, "sequence_length": 16, "evaluate": False}
    compress(kept, ids, exclude="embed_tokens", settings=settings)
    assert type(kept.get_input_embeddings()) is torch.nn.Embedding


@pytest.mark.parametrize("kind", ["phi", "gptj", "bert", "distilbert"])
def test_a_tied_head_keeps_its_bias_and_its_other_ties(kind: str, tmp_path) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "rotary_dim": 4}
    config = CONFIG_MAPPING[kind](**sizes, tie_word_embeddings=True)
    auto = AutoModelForCausalLM if kind in ("phi", "gptj") else AutoModelForMaskedLM
    model, ids = auto.from_config(config).eval(), IDS % 96
    torch.nn.init.normal_(model.get_output_embeddings().bias)
    with torch.no_grad():
        expected = model(ids).logits
        names = {name for name, module in model.named_modules() if module is model.get_input_embeddings()}
        relinear.replace_(model, dict.fromkeys(names, EIGHT), init="from_weight")
        found = model(ids).logits
        assert (found - expected).abs().max() < 0.1 * expected.std()
        model.save_pretrained(tmp_path)
        assert torch.equal(auto.from_pretrained(tmp_path).eval()(ids).logits, found)
        relinear.fold_(model, verbose=False)
        torch.testing.assert_close(model(ids).logits, found, atol=1e-6, rtol=0)


def test_weights_that_more_than_the_head_shares_or_reads_are_refused() -> None:
    sizes = {"vocab_size": 96, "num_layers": 1, "num_hidden_layers": 1, "d_model": 32, "hidden_size": 32, "d_ff": 64}
    for kind, name, message in (
        ("t5", "shared", "shares its weight with"),
        ("mamba", "embeddings", "reads its weight"),
    ):
        config = CONFIG_MAPPING[kind](**sizes, tie_word_embeddings=True)
        auto = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
        with pytest.raises(ValueError, match=message):
            relinear.replace_(auto.from_config(config), {name: EIGHT})


@pytest.mark.parametrize("by", ["merged", "embedding", "head"])
def test_a_tie_that_was_cut_is_saved_as_cut(by: str, tmp_path) -> None:
    model, torch_head = rounded(), torch.nn.Linear(64, 300, bias=False)
    if by == "merged":
        lora = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"])
        tuned = peft.get_peft_model(model, lora)
        with torch.no_grad():
            tuned.get_input_embeddings().modules_to_save["default"].scales.mul_(2)
        model = tuned.merge_and_unload()
    elif by == "embedding":
        model.set_input_embeddings(torch.nn.Embedding(300, 64))
    else:
        model.set_output_embeddings(torch_head)
    found = logits(model.eval())
    relinear.save_pretrained(model, tmp_path)
    assert torch.equal(logits(relinear.from_pretrained(tmp_path).eval()), found)
    relinear.fold_(model, verbose=False)
    torch.testing.assert_close(logits(model), found, atol=1e-5, rtol=0)


def test_ids_hooks_and_adapters_mean_what_they_mean_to_an_embedding() -> None:
    with pytest.raises(IndexError):
        rounded().get_input_embeddings()(torch.tensor([-1]))
    model = rounded()
    states = torch.randn(2, 64)
    expected = model.lm_head(states)
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output + 1)
    assert torch.equal(model.lm_head(states), expected)
    tuned = peft.get_peft_model(tiny(), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.warns(UserWarning, match="adapter"):
        relinear.replace_(tuned, {"embed_tokens": EIGHT}, init="from_weight")
    inside = tuned.get_base_model()
    inside.tie_weights()
    assert inside.lm_head.table is inside.model.embed_tokens
