"""plan, replace_, attach_, summary: what is chosen, what is refused, and that a refusal changes nothing."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import relinear
from relinear.contract.linear_layers import dense_weight
from relinear.operators.low_rank import LowRankLinear
from relinear.settings.patterns import patterns_of
from relinear.surgery.states import flat_states, load_states_, replace_with_states_
from surgery_helpers import IDS, LOW, gpt2, llama, replaced


@pytest.mark.parametrize(
    ("mapping", "options", "expected"),
    [
        ({"q_proj": LOW}, {}, {f"model.layers.{i}.self_attn.q_proj" for i in range(3)}),
        ({"self_attn.q_proj": LOW}, {"layers": [0, -1]}, {f"model.layers.{i}.self_attn.q_proj" for i in (0, 2)}),
        ({"q_proj": LOW}, {"layers": 1}, {"model.layers.1.self_attn.q_proj"}),
        ({"model.layers.1.mlp.up_proj": LOW}, {}, {"model.layers.1.mlp.up_proj"}),
        (
            {r".*\.mlp\.(gate|up)_proj": LOW},
            {"layers": range(1)},
            {f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up")},
        ),
        ({"gate_proj": None, r".*\.0\.mlp\..*": LOW}, {}, {f"model.layers.0.mlp.{p}_proj" for p in ("up", "down")}),
        (
            {"k_proj": LOW, "v_proj": LOW},
            {"exclude": "v_proj", "filter_fn": lambda module, name: ".2." not in name},
            {f"model.layers.{i}.self_attn.k_proj" for i in range(2)},
        ),
    ],
)
def test_selection(mapping, options, expected):
    model = llama()
    report = relinear.replace_(model, mapping, **options)
    assert replaced(model) == expected
    assert report.parameters == sum(p.numel() for p in model.parameters())


def test_all_linear_leaves_the_head():
    for model, count in ((llama(), 21), (gpt2(), 8)):
        relinear.replace_(model, {"all-linear": LOW})
        assert len(replaced(model)) == count
        assert isinstance(model.get_output_embeddings(), nn.Linear)


def test_first_match_wins():
    model = llama()
    relinear.replace_(model, {r".*\.0\..*q_proj": relinear.LowRank(rank=2), "q_proj": LOW})
    ranks = [layer.self_attn.q_proj.config.rank for layer in model.model.layers]
    assert ranks == [2, 4, 4]


@pytest.mark.parametrize("make", [lambda: llama(num_key_value_heads=2), gpt2], ids=["llama", "gpt2"])
def test_full_rank_fit_keeps_the_logits(make):
    model = make()
    with torch.no_grad():
        before = model(IDS).logits
        relinear.replace_(model, {"all-linear": relinear.LowRank(rank=16)}, init="from_weight")
        torch.testing.assert_close(model(IDS).logits, before, atol=1e-5, rtol=1e-4)


def test_conv1d_that_is_not_square_is_read_transposed():
    model = gpt2()
    source = model.transformer.h[0].attn.c_attn
    assert isinstance(source, Conv1D)
    relinear.replace_(model, {"c_attn": relinear.LowRank(rank=16)}, init="from_weight")
    operator = model.transformer.h[0].attn.c_attn
    assert (operator.in_features, operator.out_features) == (16, 48)
    torch.testing.assert_close(operator.to_dense(), dense_weight(source), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("mapping", "options", "message"),
    [
        ({"q_prj": LOW}, {}, r"'q_prj' matches no module; did you mean 'q_proj'"),
        ({r".*\.qq_proj": LOW}, {}, "matches no module"),
        ({"mlp": LOW}, {}, "a LlamaMLP, which cannot be replaced"),
        ({"(": LOW}, {}, "not a valid regular expression"),
        ({"": LOW}, {}, "non-empty string"),
        ({}, {}, "non-empty dict"),
        ({"q_proj": 3}, {}, "'q_proj': expected operator settings"),
        ({"q_proj": LOW}, {"layers": [3]}, "layer 3 does not exist: the model has 3 layers"),
        ({"q_proj": LOW}, {"layers": []}, "nothing to replace"),
        ({"q_proj": LOW}, {"exclude": ".*"}, "nothing to replace"),
        ({"q_proj": LOW}, {"init": "zero"}, "init must be one of 'fresh' or 'from_weight'"),
        ({"q_proj": LOW, "v_proj": relinear.LowRank(rank=9)}, {}, r"layers.0.self_attn.v_proj: rank=9 exceeds"),
    ],
)
def test_refusals_change_nothing(mapping, options, message):
    model = llama()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        relinear.replace_(model, mapping, **options)
    assert not replaced(model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not hasattr(model.config, "quantization_config")


def test_a_tied_head_is_refused_and_stays_tied_otherwise():
    model = llama(tied=True)
    with pytest.raises(ValueError, match=r"lm_head shares its weight with model.embed_tokens.weight"):
        relinear.replace_(model, {"lm_head": LOW})
    relinear.replace_(model, {"q_proj": LOW})
    assert model.lm_head.weight is model.model.embed_tokens.weight
    relinear.replace_(llama(tied=False), {"lm_head": LOW})


def test_a_root_that_is_a_linear_layer_is_refused():
    with pytest.raises(
        ValueError, match=r"call Transponder\(rank=2, .*init='identity'\)\.convert\(linear, init='fresh'\)"
    ):
        relinear.replace_(nn.Linear(8, 8), {".*": relinear.Transponder(rank=2, init="identity")})


def test_a_warning_names_the_line_that_asked():
    model, large = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), relinear.LowRank(rank=8)
    with pytest.warns(UserWarning, match="times as many") as of_plan:
        relinear.plan(model, {"0": large}).apply_()
    with pytest.warns(UserWarning, match="times as many") as of_replace:
        relinear.replace_(model, {"1": large})
    assert of_plan[0].filename == of_replace[0].filename == __file__


def test_every_alias_is_rewritten_and_counted_once():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = self.first

        def forward(self, x):
            return self.second(self.first(x))

    model = Shared()
    report = relinear.replace_(model, {"second": relinear.LowRank(rank=2)})
    assert model.first is model.second
    assert isinstance(model.first, LowRankLinear)
    assert report.parameters == 2 * 16 + 8
    relinear.fold_(model, verbose=False)
    assert type(model.first) is nn.Linear
    assert model.first is model.second


def test_a_layer_that_reads_the_weight_of_its_linear_is_refused():
    attention = nn.MultiheadAttention(8, 2)
    with pytest.raises(ValueError, match="NonDynamicallyQuantizableLinear, which cannot be replaced"):
        relinear.replace_(attention, {"out_proj": LOW})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_mode_and_requires_grad_are_kept(dtype):
    model = llama().to(dtype).requires_grad_(False)
    relinear.replace_(model, {"up_proj": LOW}, init="from_weight")
    operator = model.model.layers[0].mlp.up_proj
    assert {p.dtype for p in operator.parameters()} == {dtype}
    assert not any(p.requires_grad for p in operator.parameters())
    assert not operator.training
    assert model(IDS).logits.dtype == dtype


def test_meta_model():
    with torch.device("meta"):
        model = llama()
    report = relinear.replace_(model, {"all-linear": LOW})
    assert all(p.is_meta for p in model.parameters())
    assert report.parameters < report.parameters_before


def test_quantized_models_are_refused():
    model = llama()
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    model.is_quantized = True
    with pytest.raises(ValueError, match="quantized"):
        relinear.replace_(model, {"q_proj": LOW})


def test_plan_changes_nothing_and_prints_every_layer():
    model = llama()
    plan = relinear.plan(model, {"q_proj": LOW}, layers=[0, 1])
    assert not replaced(model)
    assert [r.name for r in plan.replacements] == [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    assert "model.layers.1.self_attn.q_proj: Linear -> LowRank(rank=4)" in str(plan)


def test_replacing_an_operator_again():
    model = llama()
    relinear.replace_(model, {"q_proj": LOW})
    report = relinear.replace_(model, {"q_proj": relinear.LowRank(rank=2)}, init="from_weight")
    assert model.model.layers[0].self_attn.q_proj.config.rank == 2
    row = next(row for row in report.rows if row.name.endswith("0.self_attn.q_proj"))
    assert (row.parameters_before, row.parameters) == (4 * 32, 2 * 32)


def test_summary_totals_are_those_of_the_model():
    model = gpt2()
    dense = relinear.summary(model)
    assert dense.parameters == dense.parameters_before == sum(p.numel() for p in model.parameters())
    matrices = sum(dense_weight(m).numel() for m in model.modules() if isinstance(m, nn.Linear | Conv1D))
    assert dense.flops_per_token == 2 * matrices
    after = relinear.replace_(model, {"c_fc": LOW})
    assert after.parameters_before == dense.parameters
    assert after.flops_before == dense.flops_per_token
    assert after.flops_per_token == dense.flops_per_token - 2 * 2 * (16 * 64 - 4 * (16 + 64))
    assert "transformer.h.{0..1}.mlp.c_fc (x2)" in str(after)


def test_what_a_token_uses_of_an_operator_that_routes_is_shown(monkeypatch):
    monkeypatch.setattr(relinear.operators.low_rank.LowRankLinear, "inactive_per_token", lambda self: (100, 200))
    model = gpt2()
    table = relinear.replace_(model, {"c_fc": LOW})
    assert (table.inactive_parameters, table.inactive_flops) == (200, 400)
    active, total = table.parameters - 200, table.flops_per_token + 400
    assert f"{table.parameters:,} ({active:,} active)" in str(table)
    assert f"{table.flops_per_token:,} ({total:,} in all)" in str(table)
    assert "active" not in str(relinear.summary(gpt2()))


def test_fold_gives_a_stock_model_back():
    for model, kind in ((llama(), nn.Linear), (gpt2(), Conv1D)):
        relinear.replace_(model, {"all-linear": LOW}, init="from_weight")
        with torch.no_grad():
            before = model(IDS).logits
        report = relinear.fold_(model, {"input_ids": IDS}, verbose=False)
        assert report.max_logit_difference < 1e-5
        assert not replaced(model)
        assert sum(isinstance(m, kind) for m in model.modules()) >= len(report.folded) > 0
        assert not hasattr(model.config, "quantization_config")
        torch.testing.assert_close(model(IDS).logits, before, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="nothing to fold"):
        relinear.fold_(llama())


def test_a_plan_of_a_model_that_has_changed_is_refused():
    model = llama()
    plan = relinear.plan(model, {"q_proj": LOW})
    plan.apply_()
    operator = model.model.layers[0].self_attn.q_proj
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj is another layer .* plan again"):
        plan.apply_()
    assert model.model.layers[0].self_attn.q_proj is operator


def test_planned_operators_are_put_in_place_with_known_states():
    first, second = llama(), llama()
    relinear.replace_(first, {"q_proj": LOW})
    states = flat_states({name: first.get_submodule(name) for name in replaced(first)})
    assert states.keys() <= first.state_dict().keys()
    replace_with_states_(second, relinear.plan(second, {"q_proj": LOW}).replacements, states)
    second.load_state_dict({k: v for k, v in first.state_dict().items() if k not in states}, strict=False)
    assert torch.equal(first(IDS).logits, second(IDS).logits)


def test_states_are_loaded_into_parameters_of_their_own():
    """Another model may hold the old ones; what is tied in this one stays tied, on the device and with the flag."""
    one, other, twin = (nn.Linear(4, 4) for _ in range(3))
    twin.weight = one.weight.requires_grad_(False)
    other.weight = one.weight
    model, before = nn.Sequential(one, twin), other.weight.clone()
    load_states_(model, ["0"], {"0.weight": torch.ones(4, 4), "0.bias": torch.zeros(4)})
    assert torch.equal(other.weight, before)
    assert one.weight is twin.weight
    assert torch.equal(one.weight, torch.ones(4, 4))
    assert not one.weight.requires_grad


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "operator", ["quantized", "low_rank:rank=4", "pivoted_low_rank:rank=4", "block_hadamard", "transponder", "monarch"]
)
def test_weights_that_are_not_finite_are_fitted_to_by_name_or_not_at_all(operator, value):
    model = llama()
    up = model.model.layers[1].mlp.up_proj
    up.weight.data[0, 0] = value
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight holds values that are not finite"):
        relinear.replace_(model, {"up_proj": operator}, init="from_weight")
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    relinear.replace_(model, {"up_proj": operator}, layers=0, init="from_weight")
    if operator != "transponder":
        config = relinear.contract.OperatorConfig.read(operator)
        with pytest.raises(ValueError, match="weight holds values that are not finite"):
            config.build(up.in_features, up.out_features).fit_to_linear_(up)


def test_names_of_layers_as_few_patterns():
    names, others = ["a.b.c", "a.b.d", "a.x", "head"], ["a.layers.0.q", "a.bb"]
    assert patterns_of(names, others) == ["a.b.c", "a.b.d", "a.x", "head"]
    assert patterns_of(names, ["a.layers.0.q"]) == ["a.b.*", "a.x", "head"]
    assert patterns_of(["vision.a.b", "vision.c"], others) == ["vision.*"]


class FixedLinear(relinear.Operator):
    """A fixed permutation: a buffer, and nothing to learn."""

    def create(self, **kw):
        self.register_buffer("matrix", torch.empty(self.out_features, self.in_features, **kw))

    def reset_parameters(self):
        self.matrix.copy_(torch.eye(self.in_features).roll(1, 0))

    def forward(self, x):
        return x @ self.matrix.T

    def to_dense(self):
        return self.matrix

    def flops_per_token(self):
        return 2 * self.matrix.numel()


@relinear.register
class Fixed(relinear.OperatorConfig):
    kind = "fixed_permutation"
    module_class = FixedLinear


def test_an_operator_without_parameters_is_replaced_and_folded() -> None:
    model = llama().eval()
    for _ in range(2):
        relinear.replace_(model, {"q_proj": Fixed()})
    relinear.for_inference_(model)
    before = model(IDS).logits
    relinear.fold_(model, verbose=False)
    torch.testing.assert_close(model(IDS).logits, before)
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear


class Scale(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.full((size,), 2.0))

    def scaled(self, module, args, output):
        return output * module.relinear_scale.gain


@relinear.register
class ScaledEmbedding(relinear.contract.AttachmentConfig):
    kind = "scaled_embedding"

    def attach(self, model):
        table = model.get_input_embeddings()
        table.add_module("relinear_scale", Scale(model.config.hidden_size))
        table.register_forward_hook(table.relinear_scale.scaled)


def test_an_attached_part_stays_in_the_layer_that_is_replaced(tmp_path) -> None:
    model = llama().eval()
    relinear.attach_(model, ScaledEmbedding())
    before = model(IDS).logits
    relinear.replace_(model, {"embed_tokens": "quantized:bits=8"}, init="from_weight")
    model.model.embed_tokens.relinear_scale.gain.data.fill_(3.0)
    changed = model(IDS).logits
    assert not torch.equal(changed, before)
    relinear.save_pretrained(model, tmp_path)
    assert torch.equal(relinear.from_pretrained(tmp_path).eval()(IDS).logits, changed)
    relinear.fold_(model, verbose=False)
    torch.testing.assert_close(model(IDS).logits, changed, rtol=1e-3, atol=1e-3)
    assert model.model.embed_tokens.relinear_scale.gain.eq(3.0).all()


def test_a_part_without_a_check_is_attached_once() -> None:
    model = llama()
    relinear.attach_(model, ScaledEmbedding())
    with pytest.raises(ValueError, match="has a scaled_embedding already"):
        relinear.attach_(model, ScaledEmbedding())


@pytest.mark.parametrize("names", ["up", ("upp",), ("config",), ("up.weigth",)])
def test_declared_names_are_checked(names) -> None:
    layer = type("Misdeclared", (LowRankLinear,), {"finite_fan_in": names})(LOW, 8, 8)
    with pytest.raises(ValueError, match=r"finite_fan_in(: no parameter| must be a tuple)"):
        layer.param_roles()


def test_parts_have_names_that_surgery_leaves_alone() -> None:
    class Misnamed(ScaledEmbedding):
        def attach(self, model):
            model.model.embed_tokens.add_module("scale", Scale(4))

    model = llama()
    with pytest.raises(ValueError, match=r"embed_tokens\.scale must have a name that begins with relinear_"):
        relinear.attach_(model, relinear.register(type("Misnamed", (Misnamed,), {"kind": "misnamed"}))())


def test_a_wrapper_that_does_not_say_its_bias_is_not_folded() -> None:
    class TwiceLinear(relinear.contract.Wrapper):
        def forward(self, x):
            return 2 * self.base(x)

        def to_dense(self):
            return 2 * self.base_dense()[0]

        def flops_per_token(self):
            return self.base_flops_per_token()

    @relinear.register
    class Twice(relinear.contract.WrapperConfig):
        kind = "twice"
        module_class = TwiceLinear

    for bias in (False, True):
        model = nn.Sequential(nn.Linear(4, 4, bias=bias))
        relinear.replace_(model, {"0": Twice()})
        report = relinear.fold_(model, verbose=False)
        assert report.folded == (() if bias else ("0",))
