"""Triton kernels in Triton's interpreter on the CPU, run by ``test_triton.py`` with TRITON_INTERPRET=1; or, with
RELINEAR_TEST_DEVICE=cuda and without that, compiled and on a GPU (``make gpu``)."""

from __future__ import annotations

import contextlib
import inspect
import os
from unittest import mock

import pytest
import torch
from torch import Tensor

import relinear
from conftest import mostly_slow
from relinear.kernels import cgt as kernels_cgt
from relinear.kernels import triton
from relinear.kernels.triton import cgt, rotor
from relinear.operators import rotor as operator
from triton_cases import CASES, LAYERS, Case, draw

DEVICE = os.environ.get("RELINEAR_TEST_DEVICE", "cpu")
CASES_BY_NAME = {case.name: case for case in CASES}

#: relative error against the reference in float64, of results and of gradients, some of which are sums that cancel;
#: in float16 that of the case
DTYPES = {torch.float32: 1e-5, torch.float16: None}

#: a case and some of its shapes: the interpreter takes seconds for one
ROWS = [pytest.param(case, case.small[:2], id=case.name) for case in CASES]
ROWS += [
    pytest.param(case, case.small[2:], id=f"{case.name}-others", marks=pytest.mark.slow)
    for case in CASES
    if case.small[2:]
]


def run(function, given: list, dtype: torch.dtype, training: bool = True) -> list[Tensor | None]:
    """Results, then in training the gradients of a random combination of them."""
    given = [a.to(dtype).clone().requires_grad_(training) if isinstance(a, Tensor) else a for a in given]
    results = function(*given)
    results = [r for r in (results if isinstance(results, tuple) else (results,)) if r is not None]
    if not training:
        return results
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(r.shape, generator=generator).half().to(DEVICE, dtype) for r in results]
    leaves = [a for a in given if isinstance(a, Tensor)]
    gradients = torch.autograd.grad(results, leaves, upstream, allow_unused=True)
    return [*(r.detach() for r in results), *gradients]


@pytest.fixture
def _poisoned():
    """Uninitialised memory is NaN, so that an element which a kernel forgets cannot pass."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("dtype", mostly_slow(DTYPES, torch.float32), ids=str)
@pytest.mark.parametrize(("case", "rows"), ROWS)
def test_kernel_equals_its_reference(case: Case, rows: tuple[tuple, ...], dtype: torch.dtype) -> None:
    assert list(inspect.signature(case.fast).parameters) == list(inspect.signature(case.reference).parameters)
    for shapes in rows:
        given = draw(shapes, dtype, DEVICE)
        actual, expected = (
            run(function, given, wide, case.training)
            for function, wide in ((case.fast, dtype), (case.reference, torch.float64))
        )
        assert len(actual) == len(expected)
        for ours, theirs in zip(actual, expected):
            assert (ours is None) == (theirs is None)
            if theirs is None:
                continue
            assert ours.shape == theirs.shape
            assert ours.dtype == dtype
            error = (ours.double() - theirs).norm() / theirs.norm().clamp_min(1e-3)
            assert error <= (DTYPES[dtype] or case.half), f"{shapes}: {error:.2g}"


@pytest.mark.parametrize("name", mostly_slow([case.name for case in CASES if case.training], "hdpl"))
def test_gradients_can_be_differentiated_again(name: str) -> None:
    """A penalty on gradients whose incoming gradient is constant, after which the result has been changed in place."""
    case = CASES_BY_NAME[name]

    def second(function, given: list, dtype: torch.dtype) -> list[Tensor]:
        given = [a.to(dtype).clone().requires_grad_() if isinstance(a, Tensor) else a for a in given]
        leaves = [a for a in given if isinstance(a, Tensor)]
        results = function(*(a.tanh() if a is leaves[0] else a for a in given))
        y = (results[0] if isinstance(results, tuple) else results).mul_(2)
        first = torch.autograd.grad(y.sum(), leaves, create_graph=True, allow_unused=True)
        penalty = sum(g.sin().sum() for g in first if g is not None)
        found = torch.autograd.grad(penalty, leaves, allow_unused=True)
        return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves)]

    for shapes in case.small[:2]:
        given = draw(shapes, torch.float32, DEVICE)
        expected = second(case.reference, given, torch.float64)
        scale = max(e.norm() for e in expected)
        for ours, theirs in zip(second(case.fast, given, torch.float32), expected):
            assert (ours.double() - theirs).norm() <= 1e-4 * scale, shapes


@pytest.mark.parametrize("name", mostly_slow(CASES_BY_NAME, "cgt"))
def test_kernel_compiles_as_a_whole(name: str) -> None:
    case = CASES_BY_NAME[name]
    given = draw(case.small[0], torch.float32, DEVICE)
    compiled = torch.compile(case.fast, fullgraph=True, backend="aot_eager", dynamic=False)
    both = (run(function, given, torch.float32, case.training) for function in (compiled, case.fast))
    for actual, expected in zip(*both, strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(actual, expected)


@pytest.fixture
def forced(monkeypatch):
    """Every call takes its Triton kernel, on the CPU too."""
    monkeypatch.setattr(triton, "DEVICE", DEVICE)
    monkeypatch.setattr(triton, "_inputs_unsupported", lambda *given: "")
    with mock.patch.object(triton, "MODE", "off"):
        yield


@pytest.mark.parametrize("name", LAYERS)
def test_layer_uses_its_kernel(name: str, forced, monkeypatch) -> None:
    """A layer gives the same with the kernel as without it, and does launch it where the choice is for it."""
    config, module, function, training = LAYERS[name]
    layer = config.build(32, 48, bias=True).to(DEVICE)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 5, 32, device=DEVICE)
    width = getattr(config, "context_dim", None)
    given = relinear.activations.context(torch.randn(2, 5, width, device=DEVICE)) if width else contextlib.nullcontext()

    def outcome():
        torch.manual_seed(0)
        with given, torch.set_grad_enabled(training):
            return run(layer, [x], torch.float32, training)

    expected = outcome()
    calls = []
    kernel = getattr(module, function)
    monkeypatch.setattr(module, function, lambda *given: (calls.append(function), kernel(*given))[1])
    with mock.patch.object(triton, "MODE", "force"):
        actual = outcome()
        assert calls == [function]
        if not training:
            with given:
                run(layer, [x], torch.float32)  # has no backward pass: torch's operations run
    assert calls == [function]
    torch.testing.assert_close(actual, expected)


NETWORKS = [{"activation": "gelu", "permute": False}, {"basis": "blade"}]


@pytest.mark.parametrize("settings", mostly_slow(NETWORKS, NETWORKS[0]), ids=str)
def test_hidden_steps_of_a_network_use_their_kernel(settings: dict, forced, monkeypatch) -> None:
    monkeypatch.setattr(operator, "supports_network", lambda *given: False)
    layer = relinear.Rotor(activate_entry=True, init_std=0.3, **settings).build(24, 32).to(DEVICE)
    x = torch.randn(2, 5, 24, device=DEVICE)
    expected = run(layer, [x], torch.float32)
    with torch.no_grad():
        given = layer.eval()(x)
    calls, kernel = [], rotor.rotor_step
    monkeypatch.setattr(rotor, "rotor_step", lambda *given: (calls.append(len(given)), kernel(*given))[1])
    with mock.patch.object(triton, "MODE", "force"):
        torch.testing.assert_close(run(layer.train(), [x], torch.float32), expected, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(layer.eval()(x), given, rtol=1e-4, atol=1e-5)
    assert len(calls) == 6


def test_modulator_of_the_cgt_uses_its_kernel_in_inference(forced, monkeypatch) -> None:
    given = draw(CASES_BY_NAME["cgt"].small[1], torch.float32, DEVICE)
    calls, kernel = [], cgt.modulate
    monkeypatch.setattr(cgt, "modulate", lambda *given: (calls.append(1), kernel(*given))[1])
    with torch.no_grad():
        expected = kernels_cgt.modulate(*given)
        with mock.patch.object(triton, "MODE", "force"):
            actual = kernels_cgt.modulate(*given)
    with mock.patch.object(triton, "MODE", "force"):
        run(kernels_cgt.modulate, given, torch.float32)
    assert calls == [1]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
