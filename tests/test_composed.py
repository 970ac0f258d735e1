"""Training steps of small linear operators through a dense matrix that is composed for them: the structured results."""

import copy
import itertools
import math
import sys

import pytest
import torch

import relinear
from relinear.kernels import block_hadamard as kernel
from relinear.kernels.cpu.dense import Dense

CONFIGS = [
    relinear.LowRank(rank=4),
    relinear.PivotedLowRank(rank=5),
    relinear.Monarch(blocks=4),
    relinear.Monarch(blocks=3, rank=2),
    relinear.BlockHadamard(blocks=4),
    relinear.BlockHadamard(blocks=3, depth=2),
    relinear.BlockHadamard(blocks=4, depth=3, mix_input=False),
]
MODULES = [sys.modules[cls.__module__] for cls in dict.fromkeys(type(config) for config in CONFIGS)]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=str)
SIZES = [(12, 20), (20, 12), (16, 16), (7, 9)]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}


@pytest.fixture
def composed(monkeypatch):
    """Whatever the size: composed where it is possible. The number of matrices that were composed is counted."""
    always = Dense("any", {}, dict.fromkeys(TOLERANCES, ((0, math.inf),)))
    for module in MODULES:
        monkeypatch.setattr(module, "_DENSE", always)
    counted = []
    for cls in {type(config).module_class for config in CONFIGS}:
        monkeypatch.setattr(cls, "to_dense", lambda self, dense=cls.to_dense: counted.append(1) or dense(self))
    return counted


def structured(monkeypatch, layer, *given):
    with monkeypatch.context() as patched:
        for module in MODULES:
            patched.setattr(module, "_DENSE", Dense("any", {}))
        return results(layer, *given)


def results(layer, x, upstream):
    """The output and the gradients of the input and of all parameters."""
    x = x.detach().requires_grad_()
    y = layer(x)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], upstream)]


def close(mine, theirs, dtype):
    for own, other in zip(mine, theirs, strict=True):
        assert own.shape == other.shape
        assert own.dtype == other.dtype
        assert (own.double() - other.double()).norm() <= TOLERANCES[dtype] * other.double().norm() + 1e-12


@every_config
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize(("leading", "bias"), [((2, 3), True), ((), False), ((0,), True), ((1,), False)])
def test_outputs_and_gradients(config, inputs, outputs, leading, bias, dtype, composed, monkeypatch):
    layer = config.build(inputs, outputs, bias=bias).to(dtype)
    x = torch.randn(*leading, 2 * inputs, dtype=dtype)[..., ::2]  # strided
    upstream = torch.randn(outputs, dtype=dtype).expand(*leading, outputs)
    mine = results(layer, x, upstream)
    assert composed
    composed.clear()
    theirs = structured(monkeypatch, layer, x, upstream)
    assert not composed
    close(mine, theirs, dtype)


@every_config
def test_a_gradient_that_is_expanded(config, composed, monkeypatch):
    layer, x = config.build(12, 20), torch.randn(5, 12)
    close(results(layer, x, torch.ones(()).expand(5, 20)), results(layer, x, torch.ones(5, 20)), torch.float32)
    assert composed


@every_config
def test_no_memory_is_read_that_nobody_wrote(config, composed):
    layer, x, upstream = config.build(12, 20), torch.randn(5, 12), torch.randn(5, 20)
    want = results(layer, x, upstream)
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    try:
        found = results(layer, x, upstream)
    finally:
        torch.use_deterministic_algorithms(False)
    close(found, want, torch.float32)


@every_config
def test_second_derivatives(config, composed):
    layer = config.build(7, 9).double()
    names, values = zip(*layer.named_parameters(), strict=True)
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)

    def run(x, *values):
        layers = copy.deepcopy(layer)
        for name, value in zip(names, values, strict=True):
            owner, _, last = name.rpartition(".")
            part = layers.get_submodule(owner)
            del part._parameters[last]
            part._parameters[last] = value
        return layers(x)

    given = [value.detach().clone().requires_grad_() for value in values]
    assert torch.autograd.gradcheck(run, (x, *given))
    assert torch.autograd.gradgradcheck(run, (x, *given))
    assert composed


@every_config
def test_under_autocast(config, composed, monkeypatch):
    layer, x, upstream = config.build(12, 20), torch.randn(5, 12), torch.randn(5, 20)
    exact = structured(monkeypatch, layer, x, upstream)
    with torch.autocast("cpu", torch.bfloat16):
        mine = results(layer, x, upstream.bfloat16())
    assert composed
    assert mine[0].dtype == torch.bfloat16
    close([t.float() for t in mine], exact, torch.bfloat16)


@every_config
def test_under_autocast_outputs_are_those_of_a_linear_layer_in_every_form(config):
    layer = config.build(12, 20)
    for training, grad, rows in itertools.product((True, False), (True, False), (1, 5)):
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
            assert layer.train(training)(torch.randn(rows, 12)).dtype == torch.bfloat16


@every_config
def test_where_operations_are_seen_the_structured_form_runs(config, composed):
    torch.compiler.reset()
    layer, x = config.build(12, 20), torch.randn(5, 12)
    y = layer(x)
    composed.clear()
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x), y)
    torch.testing.assert_close(torch.func.vmap(layer)(x), y)
    torch.func.jvp(layer, (x,), (x,))
    with torch.no_grad():
        torch.testing.assert_close(layer(x), y)
    torch.testing.assert_close(layer.eval()(x), y)
    assert not composed


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("config", [c for c in CONFIGS if c.kind == "block_hadamard"], ids=str)
def test_the_matrix_of_block_hadamard_layers(config, inputs, outputs, monkeypatch):
    """Against the reference, also where a transform is too large for its matrix to be kept."""
    layer = config.build(inputs, outputs).double()
    given = layer.blocks(), inputs, config.mix_input
    want = kernel.reference.block_hadamard_dense(*given)
    torch.testing.assert_close(kernel.block_hadamard_dense(*given), want)
    monkeypatch.setattr(kernel, "LARGEST_MATRIX", 1)
    torch.testing.assert_close(kernel.block_hadamard_dense(*given), want)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module._DENSE.kind)
def test_what_is_small_alone_is_composed(module):
    dense = module._DENSE
    for dtype in dense.composed:
        x = torch.empty(64, 64, dtype=dtype)
        assert dense.in_training(64, 64, x)
        assert not dense.in_training(2048, 2048, torch.empty(64, 2048, dtype=dtype))
        with torch.no_grad():
            assert not dense.in_training(64, 64, x)
    assert not dense.in_training(64, 64, torch.empty(64, 64, dtype=torch.float64))
