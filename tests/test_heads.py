"""Checkpoints under other heads: whoever builds the body, its operators and attachments are put in once, exactly."""

import functools

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import relinear
from cases import CASES
from relinear import residual
from relinear.contract.attachment import AttachmentConfig
from relinear.hf.config_record import make_record
from tiny_models import make_family

HEADS = {
    "sequences": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
    "questions": AutoModelForQuestionAnswering,
}
FAMILIES = ("llama", "qwen2", "mistral", "gpt2")
IDS = torch.randint(0, 96, (1, 7), generator=torch.Generator().manual_seed(3))
LOW = relinear.LowRank(rank=4)


def attach(*methods):
    return lambda model: [relinear.attach_(model, method) for method in methods]


def replace(config, context_dim=None):
    def change(model):
        if context_dim is not None:
            relinear.attach_(model, relinear.ContextManager(dim=context_dim))
        names = ("c_fc", "c_attn") if model.config.model_type == "gpt2" else ("up_proj", "q_proj")
        relinear.replace_(model, dict.fromkeys(names, config))

    return change


def fits(config):
    try:
        config.check_shape(32, 64)
    except ValueError:
        return False
    return True


def bias_layers(model):
    """One layer of the body, where there is one without a bias, and the head."""
    plain = [name for name, module in model.named_modules() if type(module) is nn.Linear and module.bias is None]
    relinear.attach_(model, relinear.contract.AttachmentConfig.from_dict({"kind": "layer_bias", "layers": plain[-2:]}))


#: what every class of a family takes, and what needs the head of a language model
ATTACHMENTS = {
    config.kind: attach(config)
    for config in (
        relinear.ContextManager(dim=6, mixer="ema"),
        residual.DeepNorm(),
        residual.LaurelLR(rank=3, weights=True),
        residual.LaurelPA(rank=3),
        residual.LaurelRW(),
        residual.LayerNormScaling(),
        relinear.PathTransponder(),
        residual.PostLN(),
        residual.ReZero(),
        residual.SDPAGate(),
        residual.SecondEmbedding(dim=5),
    )
} | {
    "several": attach(
        relinear.PathTransponder(),
        residual.LaurelRW(),
        relinear.ContextManager(),
        residual.SDPAGate(),
    )
}
OF_A_HEAD = {kind: attach(kind) for kind in ("head_bias", "readout_scale:factor=0.5")} | {
    "layer_bias": bias_layers,
    "operator": lambda model: relinear.replace_(model, {"lm_head": LOW, model_body(model): LOW}),
}
#: of every kind; those for odd sizes alone fit no layer here
OPERATORS = {case.name: replace(case.config, case.context_dim) for case in CASES if fits(case.config)}
CHANGES = ATTACHMENTS | OF_A_HEAD | OPERATORS
FAST = (
    ("context_manager", "qwen2", "questions"),
    ("several", "mistral", "tokens"),
    ("path_transponder", "gpt2", "questions"),
    ("head_bias", "llama", "tokens"),
    ("layer_bias", "llama", "questions"),
    ("operator", "mistral", "sequences"),
    ("transponder-on_ccl", "qwen2", "questions"),
)


def model_body(model):
    return "c_fc" if model.config.model_type == "gpt2" else "up_proj"


def drawn(model):
    """``model`` with random values in everything it learns."""
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def hidden(model):
    return model.base_model(IDS).last_hidden_state


def hooks(model):
    """Of every module inside the body, how many; the body's own depend on whether it is the whole model."""
    parts = [*model.base_model.modules()][1:]
    return [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in parts]


def check_same(loaded, model):
    """The same body to the bit, with the same hooks."""
    assert torch.equal(hidden(loaded.eval()), hidden(model))
    assert hooks(loaded) == hooks(model)


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """Language models with a change, saved once."""

    @functools.cache
    def make(change, family):
        model = make_family(family, tie_word_embeddings=False)
        CHANGES[change](model)
        directory = tmp_path_factory.mktemp("causal")
        drawn(model).save_pretrained(directory)
        return model, directory

    return make


def matrix(fast, changes):
    every = [(c, f, h) for c in changes for f in FAMILIES for h in HEADS if (c, f) != ("layer_bias", "gpt2")]
    return [pytest.param(*row, marks=() if row in fast else pytest.mark.slow, id="-".join(row)) for row in every]


@pytest.mark.parametrize(("change", "family", "head"), matrix(FAST, CHANGES))
def test_a_language_model_under_another_head(causal, change, family, head, tmp_path):
    model, directory = causal(change, family)
    loaded = HEADS[head].from_pretrained(directory)
    check_same(loaded, model)
    loaded.save_pretrained(tmp_path)
    again = relinear.from_pretrained(tmp_path, auto_class=HEADS[head])
    check_same(again, model)
    assert make_record(again) == make_record(loaded)


@pytest.mark.parametrize(("change", "family", "head"), matrix(FAST, ATTACHMENTS | OPERATORS))
def test_a_head_with_operators_in_its_body(change, family, head, tmp_path):
    model = HEADS[head].from_config(make_family(family).config)
    CHANGES[change](model)
    drawn(model).save_pretrained(tmp_path / "auto")
    relinear.save_pretrained(model, tmp_path / "own")
    model.base_model.save_pretrained(tmp_path / "body")
    for loaded in (
        HEADS[head].from_pretrained(tmp_path / "auto"),
        relinear.from_pretrained(tmp_path / "own", auto_class=HEADS[head]),
    ):
        check_same(loaded, model)
        assert make_record(loaded) == make_record(model)
        assert loaded.state_dict().keys() == model.state_dict().keys()
    built = HEADS[head].from_config(AutoConfig.from_pretrained(tmp_path / "auto"))
    assert make_record(built) == make_record(model)
    built.load_state_dict(model.state_dict())
    check_same(built, model)
    for directory in ("auto", "own", "body"):
        body = AutoModel.from_pretrained(tmp_path / directory)
        check_same(body, model)
        assert make_record(body) == make_record(model.base_model)


def test_every_kind_is_tried():
    assert {case.config.kind for case in CASES if case.name in OPERATORS} == {case.config.kind for case in CASES}
    tried = {name.partition(":")[0] for name in ATTACHMENTS | OF_A_HEAD} - {"several", "operator"}
    # experts are taken apart in models that have some: test_separate_experts
    own = {kind for kind, cls in AttachmentConfig.kinds().items() if cls.__module__.startswith("relinear.")}
    assert tried | {"separate_experts"} == own
