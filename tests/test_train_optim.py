"""Parameter groups and schedules, held against formulas and against what was asked for."""

import math

import pytest
import torch

import relinear
from cases import CASES
from conftest import make_tiny_gpt2, make_tiny_llama
from relinear import LowRank, replace_
from relinear.contract.operator import ParamRole
from relinear.training import FitSettings
from relinear.training.optim import build_optimizer, build_schedule, parameter_groups, parameter_roles
from tiny_models import make_cgt

SETTINGS = FitSettings(steps=100, learning_rate=1e-2, warmup_steps=10, weight_decay=0.3)


def by_name(model, settings=SETTINGS):
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: group for group in parameter_groups(model, settings) for p in group["params"]}


@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_gpt2])
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_in_one_group_and_only_matrices_decay(make, tied):
    model = make(tied=tied)
    replace_(model, {"up_proj|c_fc|.*up_proj|.*c_fc": LowRank(rank=4)})
    groups = by_name(model)
    assert sorted(groups) == sorted(name for name, _ in model.named_parameters())
    for name, group in groups.items():
        embeds = any(part in name for part in ("embed_tokens", "wte", "wpe"))
        decays = not embeds and dict(model.named_parameters())[name].ndim > 1
        assert group["weight_decay"] == (0.3 if decays else 0.0), name
    assert sum(len(group["params"]) for group in parameter_groups(model, SETTINGS)) == len(list(model.parameters()))


@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_gpt2])
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_decay_where_that_is_asked_for_and_nothing_else_changes(make, tied):
    model = make(tied=tied)
    relinear.attach_(model, relinear.ContextManager(dim=8))
    before, after = by_name(model), by_name(model, SETTINGS.replace(decay_embeddings=True))
    changed = {name for name in before if before[name]["weight_decay"] != after[name]["weight_decay"]}
    assert changed == {n for n in before if any(part in n for part in ("embed_tokens", "wte", "wpe", "embedding"))}
    assert all(after[name]["weight_decay"] == 0.3 for name in changed)


def test_fan_in_is_that_of_the_product():
    model = make_tiny_gpt2()
    roles = parameter_roles(model)
    assert roles["transformer.h.0.mlp.c_fc.weight"].fan_in == 32  # Conv1D stores (in, out)
    assert roles["transformer.h.0.mlp.c_proj.weight"].fan_in == 128
    assert roles["transformer.wte.weight"].fan_in is None


def fan_ins(parameters, roles):
    return {name: role for name, role in roles.items() if role.fan_in is not None and parameters[name].ndim > 1}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_fan_in_scales_exactly_where_it_grows_with_the_layer(case):
    layers = [case.config.build(*(factor * size for size in case.shapes[0])) for factor in (1, 4)]
    narrow, wide = (fan_ins(dict(layer.named_parameters()), layer.param_roles()) for layer in layers)
    assert narrow.keys() == wide.keys()
    check_scaling(narrow, wide)


def check_scaling(narrow, wide):
    for name, role in wide.items():
        assert role.fan_in_scales == (role.fan_in > narrow[name].fan_in), name
        if role.fan_out is not None:
            assert role.fan_out_scales == (role.fan_out > narrow[name].fan_out), name


PARTS = [
    relinear.PathTransponder(),
    relinear.ContextManager(dim=8),
    relinear.ContextManager(dim=8, mixer="ema", source="embeddings"),
    relinear.ContextManager(dim=8, mixer="gru"),
    relinear.residual.SecondEmbedding(dim=8),
    relinear.residual.LaurelLR(rank=4),
    relinear.residual.LaurelPA(rank=4),
    relinear.residual.SDPAGate(per="channel"),
]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_so_it_does_in_attached_parts(part):
    models = [make_tiny_llama(hidden_size=size, intermediate_size=2 * size) for size in (32, 64)]
    for model in models:
        relinear.attach_(model, part)
    narrow, wide = (fan_ins(dict(model.named_parameters()), parameter_roles(model)) for model in models)
    assert any("relinear_" in name for name in wide)
    check_scaling(narrow, wide)


def test_so_it_does_in_a_cgt():
    sizes = [{}, {"n_embd": 48, "context_size": 24}]
    models = [make_cgt(**changes) for changes in sizes]
    narrow, wide = (fan_ins(dict(model.named_parameters()), parameter_roles(model)) for model in models)
    check_scaling(narrow, wide)
    assert wide["transformer.h.2.modulate_mlp.left"].fan_in == 5 * 2


def test_roles_of_operators_win():
    model = make_tiny_llama()
    replace_(model, {"q_proj": LowRank(rank=4)})
    operator = model.model.layers[0].self_attn.q_proj
    operator.param_roles = lambda: {"down": ParamRole(32, 3.0, False), "up": ParamRole(4)}
    groups = by_name(model)
    assert groups["model.layers.0.self_attn.q_proj.down"]["lr"] == pytest.approx(3e-2)
    assert groups["model.layers.0.self_attn.q_proj.down"]["weight_decay"] == 0
    assert groups["model.layers.0.self_attn.q_proj.up"]["lr"] == pytest.approx(1e-2)


def test_frozen_parameters_are_left_out():
    model = make_tiny_llama().requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameters"):
        parameter_groups(model, SETTINGS)
    model.lm_head.requires_grad_(True)
    assert list(by_name(model)) == ["lm_head.weight"]


def rates(settings):
    model = torch.nn.Linear(4, 4)
    optimizer = build_optimizer(model, settings)
    schedule = build_schedule(optimizer, settings)
    out = []
    for _ in range(settings.steps):
        out.append(max(group["lr"] for group in optimizer.param_groups))
        optimizer.step()
        schedule.step()
    return out


def test_schedules():
    peak, warmup, steps = 1e-2, 10, 100
    cosine = rates(SETTINGS.replace(schedule="cosine", min_lr_ratio=0.2))
    for step, rate in enumerate(cosine):
        falling = 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
        assert rate == pytest.approx(peak * (step / warmup if step < warmup else falling))
    noam = rates(SETTINGS.replace(schedule="noam"))
    for step, rate in enumerate(noam):
        assert rate == pytest.approx(peak * min(step / warmup, math.sqrt(warmup / step)) if step else 0)
    assert rates(SETTINGS.replace(schedule="constant")) == pytest.approx(
        [peak * min(1, s / warmup) for s in range(steps)]
    )
    onecycle = rates(SETTINGS.replace(schedule="onecycle"))
    assert onecycle[0] == pytest.approx(peak / 25)
    assert max(onecycle) == pytest.approx(peak, rel=1e-3)
    assert onecycle[-1] == pytest.approx(peak / 25 / 1e4)
    assert onecycle.index(max(onecycle)) in (warmup - 1, warmup)


@pytest.mark.parametrize("warmup", [None, 0, 1])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 8])
def test_one_cycle_of_few_steps_reaches_the_peak_and_comes_down(steps, warmup):
    if warmup is not None and warmup >= steps:
        pytest.skip("refused: the rise is to be shorter than the run")
    settings = FitSettings(steps=steps, learning_rate=1e-2, warmup_steps=warmup, schedule="onecycle")
    found = rates(settings)
    assert len(found) == steps
    assert all(0 < rate <= 1e-2 * (1 + 1e-9) for rate in found)
    if settings.warmup == 1 or steps == 1:
        assert found[0] == pytest.approx(1e-2)
    if steps > 1:
        assert found[-1] == pytest.approx(1e-2 / 25 / 1e4, rel=1e-3)
