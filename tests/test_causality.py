"""The causality check finds leaks, where they are, and nothing in models that have none."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import relinear
from conftest import make_tiny_llama
from relinear.analysis.causality import CausalityError
from relinear.hf.next_token_check import check_predicts_next_token
from relinear.operators.context_manager import ContextNetwork
from tiny_models import make_family


class MeanPooled(ContextNetwork):
    """The manager that would explain perplexities too good to be true: a mean over the whole sequence."""

    def forward(self, source, valid=None, state=None):
        context, state = super().forward(source, valid, state)
        return context.mean(1, keepdim=True).expand_as(context), state


@relinear.register
class LeakingManager(relinear.ContextManager):
    kind = "leaking_manager"

    def attach(self, model):
        table = model.get_input_embeddings()
        MeanPooled(self, table.num_embeddings, table.embedding_dim).eval().install(model.base_model)


class PeeksAhead(nn.Module):
    """Adds to token 5 what token 6 has."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        return torch.cat([y[:, :5], y[:, 5:6] + y[:, 6:7], y[:, 6:]], dim=1)


class PoisonedByLaterTokens(nn.Module):
    """Gives NaN at token 3 if token 6 is not what it was at the first call."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.first = inner, None

    def forward(self, x):
        y = self.inner(x).clone()
        self.first = y[:, 6].clone() if self.first is None else self.first
        if not torch.equal(y[:, 6], self.first):
            y[:, 3] = torch.nan
        return y


def test_nan_is_neither_causal_nor_stable():
    model = make_tiny_llama().eval()
    model.model.layers[0].mlp.up_proj = PoisonedByLaterTokens(model.model.layers[0].mlp.up_proj)
    with pytest.raises(CausalityError):
        relinear.check_causality(model, tokens=8)
    model = make_tiny_llama().eval()
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="up_proj"):
        relinear.check_causality(model, tokens=8)


def conditioned(manager):
    model = make_tiny_llama()
    relinear.attach_(model, manager)
    relinear.replace_(model, {"mlp.up_proj": relinear.CCL(rank=4, context_dim=8)})
    return model


@pytest.mark.parametrize("mixer", ["token", "ema", "gru"])
@pytest.mark.parametrize("source", ["tokens", "embeddings"])
def test_managers_are_causal(mixer: str, source: str) -> None:
    model = conditioned(relinear.ContextManager(dim=8, mixer=mixer, source=source)).train()
    report = relinear.check_causality(model)
    assert report.causal
    assert report.modules > 20
    assert model.training
    assert "causal" in str(report)


def test_stock_models_are_causal(tiny_model) -> None:
    assert relinear.check_causality(tiny_model).causal


def test_a_mean_pooled_manager_leaks() -> None:
    model = conditioned(LeakingManager(dim=8))
    with pytest.raises(CausalityError, match=r"'model\.relinear_context' at token 0") as caught:
        relinear.check_causality(model)
    report = caught.value.report
    assert (report.module, report.layer, report.position, report.source) == ("model.relinear_context", None, 0, 1)
    assert relinear.check_causality(model, raises=False).to_dict()["causal"] is False


@pytest.mark.parametrize("layer", [0, 1])
def test_the_layer_and_the_position_are_named(layer: int) -> None:
    model = make_tiny_llama()
    block = model.model.layers[layer]
    block.mlp = PeeksAhead(block.mlp)
    report = relinear.check_causality(model, raises=False)
    assert (report.module, report.layer, report.position, report.source) == (f"model.layers.{layer}.mlp", layer, 5, 6)


def test_inputs_and_noise_are_refused() -> None:
    model = make_tiny_llama()
    with pytest.raises(ValueError, match=r"shape \(1, T\)"):
        relinear.check_causality(model, torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="no token embedding"):
        relinear.check_causality(nn.Linear(2, 2))
    model.model.norm.register_forward_hook(lambda m, a, y: y + torch.rand_like(y))
    with pytest.raises(ValueError, match="different outputs for equal inputs"):
        relinear.check_causality(model)


def test_inspect_reports_causality(tmp_path, capsys) -> None:
    from relinear_cli.main import main

    conditioned(relinear.ContextManager(dim=8, mixer="ema")).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path), "--causality"]) == 0
    assert "causal: every suffix" in capsys.readouterr().out


# What compares each token with the next refuses other models


def of_text(kind: str, auto_class=transformers.AutoModelForMaskedLM, **more):
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return auto_class.from_config(transformers.CONFIG_MAPPING[kind](**sizes, num_attention_heads=4, **more)).eval()


ROWS = torch.arange(1600).view(100, 16) % 96
USERS = {
    "perplexity": lambda model: relinear.perplexity(model, Samples({"input_ids": r, "labels": r} for r in ROWS)),
    "distill_": lambda model: relinear.distill_(
        model, {r".*layers?\.0\..*": "low_rank:rank=2"}, ROWS, settings={"tokens": 512, "validation_tokens": 256}
    ),
    "compress": lambda model: relinear.compress(
        model, ROWS, targets=r".*layers?\.0\..*", settings={"bits": 4.5, "tokens": 256, "sequence_length": 16}
    ),
}


class Samples(list, torch.utils.data.Dataset):
    """A list of samples as a dataset."""


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: of_text("bert"), "BertForMaskedLM sees later tokens"),
        (lambda: of_text("modernbert", pad_token_id=0), "ModernBertForMaskedLM sees later tokens"),
        (lambda: conditioned(LeakingManager(dim=8)), "LlamaForCausalLM sees later tokens"),
        (lambda: make_family("t5"), "T5ForConditionalGeneration is an encoder-decoder"),
    ],
)
def test_models_that_see_later_tokens_are_refused(make, message: str, user: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.*; {user} needs a causal language model"):
        USERS[user](make())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3_moe", "mamba"])
def test_decoders_pass_in_every_dtype(kind: str, dtype: torch.dtype) -> None:
    check_predicts_next_token(make_family(kind).to(dtype).train(), "this")


def test_models_that_read_no_tokens_are_refused() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=32))
    with pytest.raises(ValueError, match="ViTForImageClassification reads pixel_values, not tokens"):
        USERS["perplexity"](model)


def test_models_without_logits_of_tokens_are_refused_by_their_class() -> None:
    classifier = of_text("llama", transformers.AutoModelForSequenceClassification)
    for model in (classifier, make_tiny_llama().model):
        with pytest.raises(ValueError, match=f"{type(model).__name__} returns no logits of each token"):
            USERS["perplexity"](model)


class RoundsAnew(nn.Module):
    """Sums in an order that the last token decides: everything moves by a step of bfloat16."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        return y + 2**-8 * y * (x[:, -1:, :1] > 0)


def test_rounding_of_half_precision_is_no_leak() -> None:
    model = make_tiny_llama()
    model.model.layers[1].mlp = RoundsAnew(model.model.layers[1].mlp)
    with pytest.raises(CausalityError):
        relinear.check_causality(model)
    assert relinear.check_causality(model.to(torch.bfloat16)).causal
