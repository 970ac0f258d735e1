"""Inference through the dense matrix that ``for_inference_`` keeps: the same outputs, and only there."""

import copy
import sys

import pytest
import torch
from torch import nn

import relinear
from relinear.contract.inference import ParameterCache
from relinear.operators import monarch
from relinear.system import machine

X = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(
    params=[relinear.LowRank(rank=4), relinear.BlockHadamard(blocks=4), relinear.Monarch(blocks=4)], ids=str
)
def operator(request):
    operator = relinear.for_inference_(request.param.build(16, 16))
    assert sys.modules[type(request.param).__module__]._DENSE_LIMITS.prefers(16, 16, torch.float32, 5)
    with torch.no_grad():
        operator(X)
    assert "dense" in operator.parameter_cache._state[2]
    return operator


def structured(operator):
    """The output with gradients recorded, which never goes through the cache."""
    return operator(X).detach()


def cached(operator):
    with torch.no_grad():
        return operator(X)


def test_same_output(operator):
    torch.testing.assert_close(cached(operator), structured(operator), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        lambda op: (next(op.parameters()).data.mul_(2), op.eval()),
        lambda op: nn.init.ones_(next(op.parameters())),
        lambda op: op.load_state_dict({k: v + 1 for k, v in op.state_dict().items()}),
        lambda op: op.load_state_dict({k: v + 1 for k, v in op.state_dict().items()}, assign=True),
        lambda op: op.bfloat16().float(),
        lambda op: setattr(op, "bias", nn.Parameter(torch.ones(16))),
        lambda op: op.reset_parameters(),
    ],
    ids=["data", "in place", "load", "assign", "cast", "replace", "reset"],
)
def test_a_changed_parameter_is_seen(operator, change):
    change(operator)
    torch.testing.assert_close(cached(operator), structured(operator), atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("change", [lambda t: t.copy_(t.flip(0)), None], ids=["in place", "replaced"])
@pytest.mark.parametrize(
    ("config", "name"),
    [(relinear.PivotedLowRank(rank=8), "order"), (relinear.Quantized(bits=4), "codes")],
    ids=["pivoted", "quantized"],
)
def test_a_changed_buffer_is_seen(config, name, change):
    layer, x = relinear.for_inference_(config.build(64, 64).eval()), torch.randn(1, 64)
    layer(x)
    buffer = getattr(layer, name)
    if change is None:
        setattr(layer, name, buffer.flip(0).clone())
    else:
        change(buffer)
    want = nn.functional.linear(x, layer.to_dense())
    assert (layer(x) - want).norm() < 0.05 * want.norm()


def test_an_optimiser_step_is_seen(operator):
    optimizer = torch.optim.SGD(operator.parameters(), lr=1.0)
    structured_loss = operator(X).square().sum()
    structured_loss.backward()
    before = cached(operator)
    optimizer.step()
    assert not torch.allclose(cached(operator), before)
    torch.testing.assert_close(cached(operator), structured(operator), atol=1e-4, rtol=1e-4)


def test_only_where_it_was_asked_for(operator):
    for other in (copy.deepcopy(operator), operator.config.build(16, 16).eval(), operator.train()):
        cached(other)
        assert other.parameter_cache is None


@pytest.mark.parametrize("level", [torch.no_grad, torch.inference_mode])
def test_what_is_kept_knows_nothing_of_autocast_and_inference_mode(operator, level):
    before = cached(operator)
    relinear.for_inference_(operator)
    with torch.autocast("cpu", torch.bfloat16), level():
        operator(X)
    assert torch.equal(cached(operator), before)
    weight, _ = operator.parameter_cache._state[2]["dense"]
    assert not weight.is_inference()


def test_large_layers_stay_structured(operator):
    limits = sys.modules[type(operator).__module__]._DENSE_LIMITS
    for dtype in limits.limits:
        assert not limits.prefers(8192, 8192, dtype, 4096)


@pytest.mark.parametrize(("features", "dense"), [({"amx_bf16"}, True), ({"avx512_bf16"}, False)], ids=str)
def test_bounds_of_bfloat16_are_of_processors_that_multiply_on_tiles(features, dense, monkeypatch):
    monkeypatch.setattr(machine, "cpu_features", lambda: frozenset(features))
    assert monarch._DENSE_LIMITS.prefers(1024, 1024, torch.bfloat16, 1024) == dense
    assert not monarch._DENSE_LIMITS.prefers(1024, 1024, torch.float32, 1024)


@torch.no_grad()
def test_a_layer_too_large_for_a_dense_matrix_looks_nothing_up(monkeypatch):
    layer = relinear.for_inference_(relinear.LowRank(rank=8).build(1024, 1024).eval())
    monkeypatch.setattr(ParameterCache, "get", lambda *given: pytest.fail("looked up"))
    assert layer(torch.randn(1, 1024)).shape == (1, 1024)
