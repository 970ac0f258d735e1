"""CCL: the paper's counts, its overhead at its own vocabulary, and the baselines of its Section 4.2."""

import numpy as np
import pytest
import torch
from torch import nn

import relinear
from conftest import make_tiny_gpt2
from relinear import contract
from relinear.compare.recipe import read_recipe
from relinear.compare.settings import CompareSettings
from relinear.functional.ccl import ccl as functional_ccl

VOCABULARY = 50_257


def paper_model(width: int, operator=None, manager=None):
    """A model of the paper, without memory: (its report by ``relinear.summary``, its parameters)."""
    with torch.device("meta"):
        model = relinear.from_preset(f"gpt2-ccl-{width}")
        if manager is not None:
            relinear.attach_(model, manager)
        if operator is not None:
            relinear.replace_(model, {"mlp.c_fc": operator, "mlp.c_proj": operator})
    return relinear.summary(model), sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("mixer", "parameters"),
    # A manager of the current token alone and one with moving averages both round to the paper's 10.29 million.
    [("token", 10_287_505), ("ema", 10_291_793), ("gru", 10_300_049)],
)
def test_both_the_token_and_the_moving_averages_fit_the_papers_count(mixer: str, parameters: int) -> None:
    _, counted = paper_model(64, relinear.CCL(rank=64), relinear.ContextManager(dim=64, mixer=mixer))
    assert counted == parameters
    assert (round(counted / 1e6, 2) == 10.29) == (mixer != "gru")


def flops_by_hand(width: int) -> int:
    """Products of a dense model, two for a multiply-add: per layer 12 width^2 (attention 4, MLP 8), and the head."""
    return 2 * (6 * 12 * width**2 + width * VOCABULARY)


def test_the_overhead_at_the_papers_own_vocabulary_is_eight_percent() -> None:
    """The paper prints 7 MFLOPs for both and an increase of less than 0.1 %; its dense figures are ours."""
    for width, printed in ((64, 7), (256, 35), (512, 89)):
        dense, _ = paper_model(width)
        assert dense.flops_per_token == flops_by_hand(width)
        assert round(dense.flops_per_token / 1e6) == printed

    # of each layer's two matrices of 64 x 256: two products with rank 64, a gate network of one hidden layer, and gates
    def layer(i: int, o: int) -> int:
        return 2 * 64 * (i + o) + 2 * (64 * 64 + 64 * (64 + o)) + 64 + o

    manager = 2 * 2 * 64 * 64
    by_hand = flops_by_hand(64) + 6 * (layer(64, 256) + layer(256, 64) - 2 * 2 * 64 * 256) + manager
    ccl, _ = paper_model(64, relinear.CCL(rank=64), relinear.ContextManager(dim=64))
    assert ccl.flops_per_token == by_hand == 7_582_464
    assert round(100 * (by_hand / flops_by_hand(64) - 1), 1) == 8.0
    # Gates read off the context by one matrix, and half of the rank: the least that still is CCL is not 0.1 % either.
    least, _ = paper_model(64, relinear.CCL(rank=32, gate_depth=0), relinear.ContextManager(dim=64))
    assert least.flops_per_token > 1.001 * flops_by_hand(64)


@pytest.mark.parametrize("mixer", ["token", "ema"])
def test_the_default_context_is_a_function_of_the_current_token(mixer: str) -> None:
    model = make_tiny_gpt2()
    relinear.attach_(model, relinear.ContextManager(dim=8, mixer=mixer))
    seen = []
    base = model.transformer
    ids = torch.tensor([[5, 7, 5, 9, 7, 5]])
    seen = base.relinear_context.contexts(base, {"input_ids": ids, "use_cache": False})[0]
    same = torch.equal(seen[0], seen[2]) and torch.equal(seen[2], seen[5]) and torch.equal(seen[1], seen[4])
    assert same == (mixer == "token")


def by_hand(layer, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """The two baselines from their words: a softmax over templates, each of them a low-rank map of its own."""
    config = layer.config
    hidden = context
    for part in layer.trunk:
        hidden = nn.functional.gelu(hidden @ part.weight.T + part.bias)
    probabilities = torch.softmax(hidden @ layer.basis_gate.weight.T + layer.basis_gate.bias, -1)
    features = x @ layer.basis.T
    if layer.norm is not None:
        features = nn.functional.layer_norm(features, features.shape[-1:], layer.norm.weight, layer.norm.bias)
    size = config.rank // config.templates
    outputs = []
    for token in range(len(x)):
        order = probabilities[token].argsort(descending=True)
        used = order[: config.selected] if config.composition == "selection" else order
        y = layer.bias.clone()
        for e in used:
            part = slice(e * size, (e + 1) * size)
            y = y + probabilities[token, e] * (layer.mix[:, part] @ features[token, part])
        if layer.output_gate is not None:
            y = y * torch.sigmoid(layer.output_gate.weight @ hidden[token] + layer.output_gate.bias)
        outputs.append(y)
    return torch.stack(outputs)


@pytest.mark.parametrize("gate_bias", [True, False])
@pytest.mark.parametrize(
    ("entry", "basis_gate", "output_gate"),
    [("ccl", True, True), ("ccl-no-output-gate", True, False), ("ccl-no-basis-gate", False, True), ("static", 0, 0)],
)
def test_each_arm_of_table_4_is_the_equations(entry, basis_gate, output_gate, gate_bias) -> None:
    """Eq. 1 to 4 and Figure 3 in numpy, with the gates left out that the recipe's entry leaves out."""
    (config,) = {*CompareSettings.load(read_recipe("ccl")).settings_of(entry).operator_configs.values()}
    layer = config.replace(rank=6, context_dim=5, gate_bias=gate_bias).build(7, 9, dtype=torch.float64)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    value = {name: parameter.detach().numpy() for name, parameter in layer.named_parameters()}
    assert ("basis_gate.weight" in value, "output_gate.weight" in value) == (basis_gate, output_gate)
    x, context = torch.randn(20, 7, dtype=torch.float64), torch.randn(20, 5, dtype=torch.float64)
    h = x.numpy() @ value["basis"].T
    centered = h - h.mean(-1, keepdims=True)
    h = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * value["norm.weight"] + value["norm.bias"]

    def gate(name: str) -> np.ndarray | float:
        if f"{name}.weight" not in value:
            return 1.0
        phi = nn.functional.gelu(context @ layer.trunk[0].weight.T + layer.trunk[0].bias).detach().numpy()
        return 1 / (1 + np.exp(-(phi @ value[f"{name}.weight"].T + value[f"{name}.bias"])))

    y, opened, bias = (h * gate("basis_gate")) @ value["mix"].T, gate("output_gate"), value["bias"]
    expected = (y + bias) * opened if gate_bias else y * opened + bias
    with relinear.activations.context(context):
        torch.testing.assert_close(layer(x), torch.tensor(expected))
    features = nn.functional.gelu(context @ layer.trunk[0].weight.T + layer.trunk[0].bias) if layer.trunk else None
    gates = [getattr(part, name, None) for part in (layer.basis_gate, layer.output_gate) for name in ("weight", "bias")]
    norm = layer.norm.weight, layer.norm.bias
    reference = functional_ccl(x, features, layer.basis, layer.mix, layer.bias, *norm, *gates, gate_bias)
    torch.testing.assert_close(reference, torch.tensor(expected))


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("output_gate", [True, False])
@pytest.mark.parametrize(("composition", "selected"), [("remixing", 1), ("selection", 1), ("selection", 2)])
def test_selection_and_remixing_are_mixtures_of_low_rank_maps(composition, selected, output_gate, norm) -> None:
    settings = {"composition": composition, "selected": selected, "output_gate": output_gate, "norm": norm}
    layer = relinear.CCL(rank=12, context_dim=5, templates=4, **settings).build(7, 9, dtype=torch.float64)
    nn.init.normal_(layer.bias)
    x, context = torch.randn(20, 7, dtype=torch.float64), torch.randn(20, 5, dtype=torch.float64)
    with relinear.activations.context(context):
        y = layer(x)
        gates = layer.gates()
        if not norm:
            dense = (layer.to_dense() @ x[..., None])[..., 0] + layer.dense_bias()
            torch.testing.assert_close(dense, y)
    torch.testing.assert_close(y, by_hand(layer, x, context))
    groups = gates["basis"].unflatten(-1, (4, 3))
    assert torch.equal(groups, groups[..., :1].expand_as(groups))
    assert ((groups[..., 0] > 0).sum(-1) == (selected if composition == "selection" else 4)).all()


def test_selection_is_balanced_as_in_the_switch_transformer() -> None:
    """E sum_e f_e P_e (Fedus et al., 2022, Eq. 4 to 6): f_e the share of tokens routed to e, P_e its mean chance."""
    layer = relinear.CCL(rank=8, context_dim=5, templates=4, composition="selection", balance=0.5).build(6, 6)
    context = torch.randn(50, 5)
    with relinear.activations.context(context):
        layer(torch.randn(50, 6))
        hidden = nn.functional.gelu(context @ layer.trunk[0].weight.T + layer.trunk[0].bias)
        probabilities = torch.softmax(hidden @ layer.basis_gate.weight.T + layer.basis_gate.bias, -1)
    routed = nn.functional.one_hot(probabilities.argmax(-1), 4).float().mean(0)
    expected = 0.5 * 4 * (routed * probabilities.mean(0)).sum()
    torch.testing.assert_close(layer.auxiliary_losses()["balance"], expected)
    torch.testing.assert_close(layer.metrics()["busiest"], routed.max())
    (gradient,) = torch.autograd.grad(layer.auxiliary_losses()["balance"], layer.basis_gate.weight)
    assert gradient.abs().max() > 0
    for other in ({"balance": 0.0}, {"composition": "remixing"}):
        layer = relinear.CCL(rank=8, context_dim=5, templates=4, **({"composition": "selection"} | other)).build(6, 6)
        with relinear.activations.context(context):
            layer(torch.randn(50, 6))
        assert layer.auxiliary_losses() == {}


def test_the_balance_of_templates_hangs_neither_on_padding_nor_on_batches() -> None:
    """Sequences of several lengths: alone, padded on either side with a mask, and in batches of two."""
    torch.manual_seed(0)
    model = relinear.from_preset("tiny", num_hidden_layers=1).train()
    relinear.attach_(model, relinear.ContextManager(dim=6))
    gate = relinear.CCL(rank=8, context_dim=6, templates=4, composition="selection", balance=1.0)
    relinear.replace_(model, {"up_proj": gate})
    rows, lengths = torch.randint(258, (4, 12)), (12, 5, 9, 2)

    def balance(ids, labels, **inputs) -> torch.Tensor:
        model(ids, labels=labels, **inputs)
        (loss,), (busiest,) = (
            contract.auxiliary_losses_of(model).values(),
            relinear.contract.auxiliary_losses.operator_metrics(model).values(),
        )
        return torch.stack([loss, busiest])

    alone = [balance(row[None, :n], row[None, :n])[0] for row, n in zip(rows, lengths)]
    expected = sum(value * (n - 1) for value, n in zip(alone, lengths)) / sum(n - 1 for n in lengths)
    mask = torch.arange(12) < torch.tensor(lengths)[:, None]
    labels = rows.masked_fill(~mask, -100)
    whole = balance(rows, labels, attention_mask=mask)
    torch.testing.assert_close(whole[0], expected)
    torch.testing.assert_close(balance(rows.masked_fill(~mask, 7), labels), whole)  # by the labels alone
    weights = [sum(n - 1 for n in lengths[at : at + 2]) for at in (0, 2)]
    parts = [balance(rows[at : at + 2], labels[at : at + 2])[0] for at in (0, 2)]
    torch.testing.assert_close(sum(w * part for w, part in zip(weights, parts)) / sum(weights), expected)


def test_a_weight_goes_into_templates_that_are_mixed_and_not_into_those_that_are_selected() -> None:
    weight = nn.Linear(8, 8, dtype=torch.float64)
    config = relinear.CCL(rank=8, context_dim=5, templates=4, norm=False, composition="remixing")
    layer = config.build(8, 8, dtype=torch.float64).fit_to_linear_(weight)
    x = torch.randn(6, 8, dtype=torch.float64)
    with relinear.activations.context(torch.randn(6, 5, dtype=torch.float64)):
        torch.testing.assert_close(layer(x), weight(x))
    with pytest.raises(ValueError, match="part of the basis"):
        config.replace(composition="selection").build(8, 8).fit_to_linear_(nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"composition": "experts"}, "composition must be one of"),
        ({"composition": "remixing", "templates": 5}, "templates=5 does not divide rank=64"),
        ({"composition": "selection", "selected": 9}, "selected=9 exceeds templates=8"),
        ({"composition": "selection", "basis_gate": False}, "replaces the basis gate"),
        ({"balance": -1.0}, "balance"),
    ],
)
def test_wrong_settings(settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        relinear.CCL(**settings)


def test_the_papers_recipe_has_its_models_and_its_budget() -> None:
    recipe = CompareSettings.load(read_recipe("ccl-paper"))
    counts = {}
    for name in recipe.entries:
        run = recipe.settings_of(name)
        assert run.steps * run.batch_size * run.data.sequence_length == 20_480_000
        assert (run.schedule, run.optimizer) == ("onecycle", "adamw")
        with torch.device("meta"):
            model = relinear.from_preset(run.model, **run.model_overrides)
            for attachment in run.attachment_configs:
                relinear.attach_(model, attachment)
            if run.operator_configs:
                relinear.replace_(model, run.operator_configs)
        counts[name] = sum(p.numel() for p in model.parameters())
    assert (counts["base-64"], counts["base-256"], counts["base-512"]) == (6_787_281, 30_537_297, 70_461_521)
    assert counts["base-64-spread"] == counts["base-64"]
    assert (counts["ccl-64"], counts["ccl-64-ema"]) == (10_287_505, 10_291_793)
    assert counts["selection"] == counts["remixing"] < counts["no-output-gate"]
