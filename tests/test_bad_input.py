"""Wrong inputs and settings: one ValueError that says what was wrong, what was expected and what is nearest to it."""

import copy
import functools
import json
import os
import re
import socket
import threading
from typing import Annotated

import numpy as np
import pytest
import torch
from torch import nn

import relinear
from cases import CASES
from conftest import make_tiny_gpt2, make_tiny_llama, mostly_slow
from relinear.compare.folder import comparison_folder
from relinear.contract import config as registry
from relinear.contract.attachment import AttachmentConfig
from relinear.contract.config import IntRange, UnknownSettingError
from relinear.contract.operator import Operator, OperatorConfig
from relinear.data import DataSettings, iter_texts
from relinear.data.tokenizers import byte_tokenizer
from relinear.models import locate_model
from relinear.settings.config_text import parse_config_text
from relinear.settings.messages import did_you_mean, quoted
from relinear.settings.yaml_settings import apply_overrides, parse_overrides, read_yaml

LOW = relinear.LowRank(rank=2)
IDS = torch.tensor([[3, 1, 4, 1, 5]])
#: with a context and without one
COMPILED = [case for case in CASES if case.name in ("ccl", "hdpl")]
LONG = "x" * 10_000
#: no message repeats an input of 10,000 characters
LONGEST_MESSAGE = 2_000


def brief(value):
    """A test's name for one of its values."""
    return quoted(value)[:24]


def refused(function, *words, error=ValueError):
    """The message with which ``function`` refuses; it has all ``words`` in it."""
    with pytest.raises(error) as caught:
        function()
    message = str(caught.value)
    assert len(message) <= LONGEST_MESSAGE
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"
    return message


def wrong_inputs(width):
    """What an ``nn.Linear`` of this width would not take -> what the message says of it."""
    return [
        (torch.randn(3, width - 1), f"({3}, {width - 1})"),
        (torch.randn(3, width + 1), f"({3}, {width + 1})"),
        (torch.randn(2, 3, 2 * width), f"({2}, {3}, {2 * width})"),
        (torch.randn(3, 1), "(3, 1)"),
        (torch.randn(width, 3), f"({width}, 3)"),
        (torch.randn(()), "shape ()"),
        (torch.ones(3, width, dtype=torch.long), "torch.int64"),
        (torch.ones(3, width, dtype=torch.bool), "torch.bool"),
        (torch.ones(3, width, dtype=torch.complex64), "torch.complex64"),
        (np.zeros((3, width), dtype=np.float32), "array("),
        (None, "None"),
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_an_operator_refuses_what_is_no_input_of_its_size(case, training):
    width, outputs = case.shapes[0]
    operator = case.config.build(width, outputs).train(training)
    given = torch.randn(3, case.context_dim or 1)
    with torch.set_grad_enabled(training), relinear.activations.context(given):
        for x, said in wrong_inputs(width):
            refused(lambda x=x: operator(x), type(operator).__name__, f"(..., {width})", said)
        assert operator(torch.randn(3, width)).shape == (3, outputs)


@pytest.mark.parametrize("case", mostly_slow(CASES, *COMPILED), ids=lambda case: case.name)
def test_a_compiled_or_exported_operator_keeps_the_check_out_of_its_graph(case):
    width = case.shapes[0][0]
    operator = case.config.build(*case.shapes[0]).eval()
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(operator, backend=backend, fullgraph=True)
    with relinear.activations.context(torch.randn(3, case.context_dim or 1)):
        compiled(torch.randn(3, width))
        assert len(seen) == 1
        with pytest.raises(Exception, match=re.escape(f"(..., {width})")):
            compiled(torch.randn(3, width + 1))


def test_an_operator_is_exported_with_any_number_of_tokens():
    operator = LOW.build(16, 24).eval()
    tokens = torch.export.Dim("tokens", min=2, max=64)
    exported = torch.export.export(operator, (torch.randn(3, 16),), dynamic_shapes={"x": {0: tokens}})
    x = torch.randn(7, 16)
    torch.testing.assert_close(exported.module()(x), operator(x))


def test_a_strangers_operator_is_held_to_it_too():
    class Stranger(Operator):
        def forward(self, x):
            return x[..., :1]

    refused(lambda: Stranger(LOW, 4, 1)(torch.randn(2, 5)), "Stranger", "(..., 4)", "(2, 5)")


def test_the_message_names_the_layer_of_the_model():
    model = make_tiny_llama()
    relinear.replace_(model, {"down_proj": relinear.Transponder(base=relinear.Monarch(blocks=2))})
    for place in (model, copy.deepcopy(model)):
        operator = place.model.layers[1].mlp.down_proj
        refused(lambda operator=operator: operator(torch.randn(2, 3)), "model.layers.1.mlp.down_proj", "(..., 64)")


class Narrow(nn.Module):
    """A layer that gives one of its outputs only, which broadcasts with any stream."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[..., :1]


@pytest.mark.parametrize(
    "method",
    ["rezero", "deepnorm", "laurel_rw", "laurel_lr:rank=4", "laurel_pa:rank=4", "post_ln", "path_transponder"],
)
@pytest.mark.filterwarnings("ignore:DeepNorm")
def test_a_sub_block_that_would_broadcast_into_the_stream_is_refused(method):
    model = make_tiny_llama()
    relinear.attach_(model, method)
    model(IDS)
    mlp = model.model.layers[1].mlp
    mlp.down_proj = Narrow(mlp.down_proj)
    refused(lambda: model(IDS), "LlamaMLP", "32", "(1, 5, 1)")


def test_what_the_context_manager_and_the_attention_gate_read():
    model = make_tiny_llama()
    relinear.attach_(model, "context_manager:dim=4,source=embeddings")
    refused(lambda: model(inputs_embeds=torch.randn(2, 3, 7)), "ContextManager", "(..., 32)", "(2, 3, 7)")
    model = make_tiny_llama()
    relinear.attach_(model, "context_manager:dim=4")
    refused(lambda: model(IDS.float()), "ContextManager", "token ids", "torch.float32")
    model = make_tiny_llama()
    relinear.attach_(model, "sdpa_gate")
    gate = model.model.layers[0].self_attn.relinear_gate
    refused(lambda: gate(torch.randn(2, 32), torch.randn(2, 64)), "(..., 32)", "(2, 64)")


# Settings


@pytest.mark.parametrize("config", [*OperatorConfig.kinds().values(), *AttachmentConfig.kinds().values()])
def test_an_unknown_keyword_names_the_nearest(config):
    for error in (ValueError, TypeError):  # what settings raise, and what a wrong keyword raises in Python
        refused(lambda: config(nonsense_=1), config.__name__, "'nonsense_'", error=error)
    refused(lambda: config(**{LONG: 1}), config.__name__)
    refused(lambda: config().replace(nonsense_=1), "'nonsense_'")
    refused(lambda: config(3), "by name")
    assert copy.deepcopy(config()) == config()


def test_the_nearest_keyword():
    refused(lambda: relinear.LowRank(ranks=8), "LowRank", "did you mean 'rank'?")
    refused(lambda: relinear.HDPL(rank=8, block=4), "HDPL", "'blocks'")
    refused(lambda: relinear.ContextManager(dims=8), "'dim'")
    refused(lambda: relinear.LowRank().replace(rnk=8), "'rank'")
    assert issubclass(UnknownSettingError, TypeError)


@pytest.mark.parametrize(
    ("annotation", "said"),
    [
        ("OnlyForTypeCheckers | None", ("Mine.rank", "'OnlyForTypeCheckers' is not defined", "at runtime")),
        ("list[int]", ("Mine.rank", "read back", "a tuple")),
        ("tuple[dict, ...] | None", ("Mine.rank", "read back")),
        (torch.dtype, ("Mine.rank", "read back")),
    ],
    ids=brief,
)
def test_annotations_that_cannot_be_checked_or_read_back(annotation, said):
    class Mine(relinear.OperatorConfig):
        kind = "mine"
        module_class = relinear.Operator
        __annotations__ = {"rank": annotation}

    refused(lambda: relinear.register(Mine), *said)
    refused(lambda: Mine(rank=2), "Mine is not registered", "@relinear.register")


def test_annotations_may_name_what_the_function_around_them_defines(monkeypatch):
    monkeypatch.setitem(registry._REGISTRY, "operator", dict(registry._REGISTRY["operator"]))
    Few = Annotated[int, IntRange(1, 3)]

    @relinear.register
    class Mine(relinear.OperatorConfig):
        kind = "mine"
        module_class = relinear.Operator
        few: "tuple[Few, ...]"

    assert Mine(few=[1, 2]).few == (1, 2), "a list is taken for a tuple"
    refused(lambda: Mine(few=[4]), "few.0")
    refused(lambda: Mine(few={1}), "few must be a list")


def test_what_a_class_lacks_or_annotates_wrongly():
    class Without(relinear.OperatorConfig):
        kind = "without"

    class Annotated(relinear.OperatorConfig):
        kind: str = "annotated"
        module_class = relinear.Operator

    refused(lambda: relinear.register(Without), "Without", "module_class")
    refused(lambda: relinear.register(Annotated), "Annotated.kind", "unannotated")
    for kind in ("dense", "none", "a b", ""):
        named = type("Named", (Without,), {"kind": kind, "module_class": relinear.Operator})
        refused(lambda named=named: relinear.register(named), repr(kind), "choose a word")


@pytest.mark.parametrize(
    "value", [0, -1, 1.0, True, None, "8", float("nan"), np.float32(2), 10**30, 10**5000, LONG], ids=brief
)
def test_a_rank_that_is_none(value):
    refused(lambda: relinear.LowRank(rank=value), "rank")


@pytest.mark.parametrize("given", [nn.LayerNorm(4), torch.ones(4, 4), None], ids=brief)
def test_what_no_operator_replaces(given):
    for config in (LOW, relinear.Transponder()):
        for method in (config.convert, config.build(4, 4).fit_to_linear_):
            refused(functools.partial(method, given), "expected nn.Linear", type(given).__name__)


@pytest.mark.parametrize("config", [LOW, relinear.Transponder()], ids=brief)
def test_an_unknown_initialisation(config):
    refused(lambda: config.convert(nn.Linear(4, 4), init="from_wieght"), "init must be one of", "'from_weight'")


def test_an_operator_without_a_cost_replaces_nothing(monkeypatch):
    monkeypatch.delattr(type(LOW.build(4, 4)), "flops_per_token")
    model = make_tiny_llama()
    refused(lambda: relinear.replace_(model, {"q_proj": LOW}), "flops_per_token", error=NotImplementedError)
    assert not isinstance(model.model.layers[0].self_attn.q_proj, Operator)
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "1", True, LONG], ids=brief)
def test_a_weight_that_is_none(value):
    refused(lambda: relinear.HDPL(beta=value), "beta")


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "low_rank:",
        "low_rank:rank",
        "low_rank:=8",
        "low_rank:rank=",
        "low_rank:rank=8,rank=8",
        "low_rank:rank=(",
        "low_rank:rank=)(",
        "low_rank:rank={]",
        "low rank",
        LONG + ":",
        "low_rank:" + LONG,
        "low_rank:rank=" + LONG,
        f"low_rank:{LONG}=8",
        "low_rank:rank=" + "9" * 10_000,
        "low_rank:rank=" + "(" * 10_000,
        "low_rank:rank=" + "(" * 10_000 + ")" * 10_000,
        "transponder:base=low_rnk",
        "low_rank:kind=hdpl",
        "low_rank:family=attachment",
    ],
    ids=brief,
)
def test_text_that_is_no_operator(text):
    refused(lambda: OperatorConfig.read(text))


def test_nested_text_is_still_read():
    text = "transponder:rank=8,base=(transponder:rank=4,base=(low_rank:rank=2))"
    inner = relinear.Transponder(rank=4, base=relinear.LowRank(rank=2))
    assert OperatorConfig.read(text) == relinear.Transponder(rank=8, base=inner)
    assert parse_config_text('a:b={"c": 1, "d": [2]}') == {"kind": "a", "b": {"c": 1, "d": [2]}}


@pytest.mark.parametrize(
    "setting", [None, 3, [], "x", {}, {"kind": 3}, {"kind": LONG}, {"kind": "low_rank", LONG: 1}], ids=brief
)
def test_what_is_no_setting(setting):
    refused(lambda: OperatorConfig.read(setting))


def test_what_is_shown_is_short():
    for value in (LONG, [LONG] * 100, dict.fromkeys(range(100), LONG), torch.zeros(10_000), 10**4000):
        assert len(quoted(value)) < 500
    assert quoted("short") == "'short'"


def test_long_names_among_the_known_ones_are_cut():
    for known in ([LONG], [LONG, "short"], [f"{LONG}{i}" for i in range(100)]):
        assert len(did_you_mean("other", known)) <= LONGEST_MESSAGE
    assert len(did_you_mean("y" * 200, ["y" * 150 + LONG[:200]] * 3)) <= LONGEST_MESSAGE


def test_a_base_that_is_a_long_text():
    refused(
        lambda: OperatorConfig.from_dict({"kind": "transponder", "base": LONG}),
        "unknown operator kind",
    )


@pytest.mark.parametrize("text", ["!!int", "!!bool x", "!!timestamp x", "!!float x", "9" * 5_000], ids=brief)
def test_tags_of_yaml_on_what_is_none(text, tmp_path):
    refused(lambda: parse_overrides([f"steps={text}"]), "--set ", "steps=", "the value ")
    (tmp_path / "recipe.yaml").write_text(f"steps: {text}\n")
    refused(lambda: read_yaml(tmp_path / "recipe.yaml"), "recipe.yaml", "the value ")


def test_a_file_without_end_is_no_recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text("steps: 3\n#" + " " * 1_000_000)
    refused(lambda: read_yaml(tmp_path / "recipe.yaml"), "recipe.yaml", "longer than 100,000 characters")


def test_a_pipe_with_a_writer_is_read_to_its_end():
    reading, writing = os.pipe()
    threading.Timer(0.2, lambda: (os.write(writing, b"a: 1"), os.close(writing))).start()
    assert read_yaml(f"/dev/fd/{reading}") == {"a": 1}
    os.close(reading)


def test_overrides_that_lead_through_a_long_name():
    refused(lambda: apply_overrides({LONG: 3}, {f"{LONG}.a": 1}), "has no settings of its own")


def test_a_comparison_with_other_settings_of_long_names(tmp_path):
    record = {"format": 1, "recipe": {LONG: 1, "entries": {LONG: 1, "a": 2}}, "entries": {}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    refused(
        lambda: comparison_folder(tmp_path).check({"entries": {"a": 2, LONG: 1}}), "other settings", "(gone)", "order"
    )


def test_columns_of_long_names(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({LONG: "x", "n": 1}))
    refused(lambda: list(iter_texts(DataSettings(data=str(tmp_path), text_column="text"), "all")), "no column 'text'")


def test_sizes_whose_squares_are_no_sizes():
    for config, name in ((relinear.ContextManager, "dim"), (relinear.LowRank, "rank"), (relinear.CCL, "rank")):
        refused(lambda config=config, name=name: config(**{name: 8 * 10**13}), f"{name} must be at most 536,870,912")
    assert relinear.Rotor(seed=2**62).seed == 2**62


def test_messages_of_transformers_are_cut(tmp_path):
    make_tiny_llama().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"model_type": LONG}))
    refused(lambda: relinear.from_pretrained(tmp_path), "model type")


def test_a_checkpoints_operator_at_a_long_name(tmp_path):
    model = make_tiny_llama()
    relinear.replace_(model, {"q_proj": LOW})
    relinear.save_pretrained(model, tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["quantization_config"]["operators"][LONG] = LOW.to_dict()
    path.write_text(json.dumps(values))
    refused(lambda: relinear.from_pretrained(tmp_path), "has an operator at 'xxx")


# Surgery


def unchanged(model, function, *words):
    """``function(model)`` is refused, and the model stays as it was."""
    before = {name: type(module) for name, module in model.named_modules()}
    refused(lambda: function(model), *words)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("change", [relinear.replace_, relinear.plan])
@pytest.mark.parametrize(
    ("mapping", "options", "words"),
    [
        ({"all_linear": LOW}, {}, ["'all_linear'", "did you mean 'all-linear'"]),
        ({"All-Linear": LOW}, {}, ["did you mean 'all-linear'"]),
        ({"linear": LOW}, {}, ["all-linear"]),
        ({"q_porj": LOW}, {}, ["'q_porj'", "q_proj"]),
        ({LONG: LOW}, {}, ["matches no module"]),
        ({"(" * 10_000: LOW}, {}, ["regular expression"]),
        ({"a{99999999999}": LOW}, {}, ["regular expression"]),
        ({1: LOW}, {}, ["string", "1"]),
        ({"*": LOW}, {}, ["regular expression"]),
        ([("q_proj", LOW)], {}, ["dict"]),
        ("q_proj", {}, ["dict"]),
        (LONG, {}, ["dict"]),
        ({}, {}, ["non-empty dict"]),
        ({"q_proj": 3}, {}, ["'q_proj'", "operator settings"]),
        ({"q_proj": relinear.LowRank}, {}, ["'q_proj'", "LowRank"]),
        ({"q_proj": relinear.residual.ReZero()}, {}, ["'q_proj'", "ReZero"]),
        ({"q_proj": "low_rnak"}, {}, ["'q_proj'", "did you mean 'low_rank'"]),
        ({"q_proj": "low_rank:rnk=8"}, {}, ["'q_proj'", "did you mean 'rank'"]),
        ({"q_proj": "low_rank:rank"}, {}, ["key=value"]),
        ({"q_proj": LONG}, {}, ["unknown operator kind"]),
        ({"q_proj": LOW}, {"layers": "0-1"}, ["'0-1'", "range"]),
        ({"q_proj": LOW}, {"layers": LONG}, ["layers="]),
        ({"q_proj": LOW}, {"layers": 1.0}, ["layers=", "1.0"]),
        ({"q_proj": LOW}, {"layers": [0, 0.5]}, ["layers=", "0.5"]),
        ({"q_proj": LOW}, {"layers": True}, ["layers=", "True"]),
        ({"q_proj": LOW}, {"layers": [None]}, ["layers=", "None"]),
        ({"q_proj": LOW}, {"layers": np.array([0.0])}, ["layers="]),
        ({"q_proj": LOW}, {"layers": -3}, ["-3", "2 layers"]),
        ({"q_proj": LOW}, {"layers": np.int64(2)}, ["2 layers"]),
        ({"q_proj": LOW}, {"exclude": "q_porj"}, ["exclude=", "'q_porj'", "q_proj"]),
        ({"all-linear": LOW}, {"exclude": ["k_proj", "mpl"]}, ["'mpl'"]),
        ({"all-linear": LOW}, {"exclude": [LONG]}, ["exclude="]),
        ({"all-linear": LOW}, {"exclude": 3}, ["exclude=", "3"]),
        ({"all-linear": LOW}, {"exclude": [3]}, ["pattern", "3"]),
        ({"all-linear": LOW}, {"exclude": "("}, ["regular expression"]),
        ({"q_proj": LOW}, {"filter_fn": "q_proj"}, ["filter_fn", "'q_proj'"]),
    ],
    ids=brief,
)
def test_surgery_that_cannot_be_meant(change, mapping, options, words):
    unchanged(make_tiny_llama(), lambda model: change(model, mapping, **options), *words)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"layers": np.int64(1)}, 1),
        ({"layers": np.arange(2)}, 2),
        ({"layers": torch.tensor([0, -1])}, 2),
        ({"layers": (i for i in range(1))}, 1),
        ({"exclude": ["lm_head", "embed_tokens", "k_proj"]}, 2),
        ({"exclude": r".*\.0\..*"}, 1),
    ],
)
def test_what_stays_allowed(options, count):
    assert len(relinear.plan(make_tiny_llama(), {"q_proj": LOW}, **options).replacements) == count


def test_the_layers_of_a_module_that_is_excluded_are_left_alone():
    names = [r.name for r in relinear.plan(make_tiny_llama(), {"all-linear": LOW}, exclude="mlp").replacements]
    assert names
    assert not any(".mlp." in name for name in names)


def test_operators_and_attachments_as_text():
    by_text, by_config = make_tiny_llama(), make_tiny_llama()
    text = {"q_proj": "low_rank:rank=8", "v_proj": "none", "o_proj": "dense", r".*\.up_proj": "hdpl:rank=4,blocks=2"}
    relinear.replace_(by_text, text)
    configs = {"q_proj": relinear.LowRank(rank=8), r".*\.up_proj": relinear.HDPL(rank=4, blocks=2)}
    relinear.replace_(by_config, configs)
    relinear.attach_(by_text, "context_manager:dim=4")
    relinear.attach_(by_config, relinear.ContextManager(dim=4))
    relinear.attach_(by_text, "laurel_lr:rank=4")
    relinear.attach_(by_config, relinear.residual.LaurelLR(rank=4))
    assert by_text.config.quantization_config == by_config.config.quantization_config


@pytest.mark.parametrize(
    "function",
    [
        lambda model: relinear.replace_(model, {"q_proj": LOW}),
        lambda model: relinear.plan(model, {"q_proj": LOW}),
        lambda model: relinear.attach_(model, "rezero"),
        lambda model: relinear.surgery.train_only_(model, "q_proj"),
        relinear.summary,
        relinear.fold_,
        relinear.check_causality,
        relinear.contract.auxiliary_losses_of,
        relinear.activations.latents,
        lambda model: relinear.activations.intervene(model, {}),
    ],
)
@pytest.mark.parametrize("model", ["path", None, 3, LONG, LOW, make_tiny_gpt2], ids=brief)
def test_what_is_no_model(function, model):
    refused(lambda: function(model), "a model (an nn.Module), got")


@pytest.mark.parametrize(
    "setting", ["rezzero", "laurel_lr:rnk=4", "laurel_lr:rank=0", "context_managr", LONG, 3, None, LOW], ids=brief
)
def test_what_is_no_attachment(setting):
    unchanged(make_tiny_llama(), lambda model: relinear.attach_(model, setting))


@pytest.mark.parametrize("layers", ["0-1", 0.5, [None], LONG], ids=brief)
def test_layers_of_an_attachment(layers):
    refused(lambda: relinear.PathTransponder(layers=layers), "layers=")


@pytest.mark.parametrize("patterns", ["(", [], "q_porj", [LONG], [3], None, 3], ids=brief)
def test_parts_to_train_that_are_not_there(patterns):
    refused(lambda: relinear.surgery.train_only_(make_tiny_llama(), patterns))


@pytest.mark.parametrize(
    ("model", "directory", "words"),
    [
        ("out", make_tiny_llama, ["a model (an nn.Module), got 'out'"]),
        (None, "out", ["a model (an nn.Module), got None"]),
        ("model", "out", ["a model (an nn.Module), got 'model'"]),
        (lambda: nn.Linear(2, 3), "out", ["Linear", "a Hugging Face model"]),
        (make_tiny_llama, None, ["directory", "None"]),
        (make_tiny_llama, "", ["directory"]),
        (make_tiny_llama, 3, ["directory", "3"]),
    ],
    ids=brief,
)
def test_what_cannot_be_saved(model, directory, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, directory = (value() if callable(value) else value for value in (model, directory))
    refused(lambda: relinear.save_pretrained(model, directory), *words)
    assert not list(tmp_path.iterdir())


def with_latents():
    model = make_tiny_llama()
    relinear.replace_(model, {"q_proj": relinear.HDPL(rank=4, blocks=2)})
    return model


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ("nope", ["a mapping", "'nope'"]),
        (None, ["a mapping", "None"]),
        ([relinear.activations.Clamp(-1, 1)], ["a mapping"]),
        ({"q_porj": relinear.activations.Clamp(-1, 1)}, ["'q_porj'", "q_proj"]),
        ({3: relinear.activations.Clamp(-1, 1)}, ["a non-empty string", "3"]),
        ({"q_proj": 3}, ["q_proj", "Clamp", "3"]),
        ({"q_proj": "clamp"}, ["q_proj", "'clamp'"]),
        ({"q_proj": [None]}, ["q_proj", "None"]),
    ],
    ids=brief,
)
def test_interventions_are_refused_at_the_call(edits, words):
    refused(lambda: relinear.activations.intervene(with_latents(), edits), *words)


def test_a_model_without_latents_is_refused_at_the_call():
    refused(lambda: relinear.activations.latents(make_tiny_llama()), "no operator with a latent")
    clamp = {"q_proj": relinear.activations.Clamp(-1, 1)}
    refused(lambda: relinear.activations.intervene(make_tiny_llama(), clamp), "no latent, gate or layer output")


@pytest.mark.parametrize("data", [None, 3], ids=brief)
def test_what_is_no_corpus(data, tmp_path):
    short = {"tokens": 256, "sequence_length": 32}
    model = make_tiny_llama()
    words = ["data must be texts", quoted(data)]
    unchanged(model, lambda model: relinear.distill_(model, {"q_proj": LOW}, data), *words)
    unchanged(model, lambda model: relinear.compress(model, data, keep=0.8, settings=short), *words)


@pytest.mark.parametrize("settings", [None, "corpus.txt", 3, LONG], ids=brief)
def test_data_without_settings(settings):
    refused(lambda: relinear.data.prepare_data(settings), "data settings: expected a mapping")


def test_data_settings_as_a_mapping():
    refused(lambda: relinear.data.prepare_data({"dta": "stdlib"}), "data settings", "did you mean 'data'")


class Nameless(OperatorConfig):
    """A setting of no kind."""


@pytest.mark.parametrize("given", ["x", None, LOW, int, nn.Linear], ids=brief)
def test_what_cannot_be_registered(given):
    refused(lambda: relinear.register(given), "register takes a subclass of OperatorConfig", quoted(given))
    refused(lambda: relinear.register(Nameless), "Nameless", "kind")


# The Contextually Guided Transformer


def cgt_config(**changes):
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    context = {"context_layer": 1, "context_size": 8, "context_heads": 2, "rank": 2, "templates": 2}
    return relinear.CGTConfig(**(sizes | context | {"bos_token_id": None, "eos_token_id": None} | changes))


@pytest.mark.parametrize(
    ("keyword", "words"),
    [
        ("dim_x", ["'dim_x'", "n_embd"]),
        ("ranks", ["did you mean 'rank'"]),
        ("context_dim", ["'context_size'"]),
        (LONG, []),
    ],
    ids=brief,
)
def test_unknown_settings_of_a_cgt(keyword, words):
    refused(lambda: cgt_config(**{keyword: 9}), "CGTConfig", *words)
    refused(lambda: cgt_config(**{keyword: 9}), "CGTConfig", error=TypeError)


def test_a_size_by_its_other_name_is_checked_too():
    refused(lambda: relinear.CGTConfig(hidden_size=50, n_head=12), "n_embd=50")
    assert relinear.CGTConfig(hidden_size=24, num_attention_heads=2).n_embd == 24


@pytest.mark.parametrize(
    "settings",
    [{"torch_dtype": "bfloat16"}, {"name_or_path": "x"}, {"num_labels": 3}, {"temperature": 0.5}, {"_attn": 1}],
    ids=brief,
)
def test_what_transformers_writes_is_no_unknown_setting(settings):
    cgt_config(**settings)


def test_a_saved_cgt_is_loaded_with_whatever_was_put_into_its_config(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = relinear.CGTForCausalLM(cgt_config()).eval()
    model.config.somebodys_note = "kept"
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.config.somebodys_note == "kept"
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)
    assert AutoConfig.from_pretrained(tmp_path, rank=3).rank == 3
    config, unused = AutoConfig.from_pretrained(tmp_path, nonsense=3, return_unused_kwargs=True)
    assert (config.rank, unused) == (2, {"nonsense": 3})
    assert relinear.CGTConfig(**cgt_config().to_dict()).to_dict() == cgt_config().to_dict()


@pytest.mark.parametrize(
    ("name", "near"), [("frozen_ctx", "frozen_context"), ("lables", "labels"), (LONG, "input_ids")]
)
def test_unknown_arguments_of_a_cgt(name, near):
    model = relinear.CGTForCausalLM(cgt_config()).eval()
    for call in (model, model.transformer, model.context):
        refused(lambda call=call: call(IDS, **{name: torch.zeros(1, 8)}), near)


def test_what_transformers_hands_to_a_cgt_is_no_unknown_argument():
    model = relinear.CGTForCausalLM(cgt_config()).eval()
    plain = model(IDS).logits
    for given in ({"token_type_ids": torch.zeros_like(IDS)}, {"output_attentions": True}, {"nothing": None}):
        torch.testing.assert_close(model(IDS, **given).logits, plain)
    assert model(IDS, labels=IDS, num_items_in_batch=4).loss > 0
    assert model.generate(IDS, max_new_tokens=3, do_sample=False).shape == (1, 8)


# Models and tokenizers by name


@pytest.mark.parametrize("name", ["tiny", "gpt2", "owner/name"])
def test_names_of_models(name, tmp_path):
    places = {"tiny": "preset", "gpt2": "hub", "owner/name": "hub"}
    assert locate_model(name) == places[name]
    assert locate_model(str(tmp_path)) == "directory"


def test_a_preset_that_is_a_directory_too_is_not_guessed_at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert locate_model("tiny") == "preset"
    (tmp_path / "tiny" / "config.json").write_text("{}")
    refused(lambda: locate_model("tiny"), "'tiny'", "write ./tiny")
    assert locate_model("./tiny") == locate_model("tiny", presets=False) == "directory"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tinyy", ["did you mean 'tiny'", "owner/name"]),
        ("./tiny", ["no such directory"]),
        ("a/b/c", ["no such directory"]),
        ("~/nowhere-at-all", ["no such directory"]),
        ("", []),
        (None, ["None"]),
        ("\0", []),
        (LONG, []),
        ("./" + LONG, []),
    ],
    ids=brief,
)
def test_names_of_no_model(name, words):
    refused(lambda: locate_model(name), *words, error=(ValueError, OSError))


@pytest.fixture
def no_network(monkeypatch):
    def asked(*args, **kwargs):
        raise AssertionError("a network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", asked)
    monkeypatch.setattr(socket.socket, "connect", asked)
    monkeypatch.setattr("huggingface_hub.utils.get_session", asked)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tinyy", ["unknown model 'tinyy'", "owner/name"]),
        ("./tiny", ["no such directory"]),
        ("~/nowhere-at-all", ["no such directory"]),
        ("", []),
        (None, ["a directory", "None"]),
        (3, ["a directory", "3"]),
        (LONG, []),
    ],
    ids=brief,
)
def test_a_checkpoint_of_no_name_asks_no_network(name, words, no_network):
    refused(lambda: relinear.from_pretrained(name), *words, error=(ValueError, OSError))


def test_a_file_is_no_checkpoint(tmp_path):
    (tmp_path / "file").touch()
    refused(lambda: relinear.from_pretrained(tmp_path / "file"), "is a file", error=NotADirectoryError)


def test_a_checkpoint_under_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    make_tiny_llama().save_pretrained(tmp_path / "saved")
    assert relinear.from_pretrained("~/saved").config.vocab_size == make_tiny_llama().config.vocab_size


def test_a_tokenizer_that_does_not_fit_the_model():
    model, tokenizer = make_tiny_llama(vocab_size=200), byte_tokenizer()
    text = ["one two three four"] * 40
    settings = {"tokens": 64, "validation_tokens": 32, "sequence_length": 16, "epochs": 1}
    for function in (
        lambda: relinear.perplexity(model, text, tokenizer),
        lambda: relinear.evaluate.lambada(model, tokenizer, text),
        lambda: relinear.distill_(model, {"q_proj": LOW}, text, tokenizer=tokenizer, settings=settings),
    ):
        refused(function, "tokenizer", "258", "200")
    assert not any(isinstance(module, Operator) for module in model.modules())


def test_a_padding_token_that_the_model_never_sees_does_no_harm():
    model, tokenizer = make_tiny_llama(vocab_size=257), byte_tokenizer()
    assert tokenizer.pad_token_id == 257
    assert relinear.perplexity(model, "one two three", tokenizer).tokens == 12


@pytest.mark.parametrize(
    ("kind", "setting"), [("ccl", "gate_depth"), ("rotor", "depth"), ("block_hadamard", "depth")], ids=brief
)
def test_layers_that_would_take_minutes_to_build(kind, setting):
    values = {"kind": kind, setting: 10_000_000}
    refused(lambda: relinear.OperatorConfig.from_dict(values), f"{setting} must be at most 1,000, got 10000000")
