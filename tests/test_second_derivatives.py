"""Derivatives beyond the first, torch's transforms and in-place operations: for every kernel and every operator.

Thresholds are lowered, so that small tensors take the implementations of large ones: autograd functions, C++ kernels.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from cases import CASES, KERNELS, Case, KernelCase, case_of_every_kind, leaves_of
from conftest import mostly_slow
from relinear.clifford import tables
from relinear.kernels import autograd, block_diagonal, native, pivoted_low_rank
from relinear.testing.conformance import assert_close, build, call, in_context, inputs

every_twin = pytest.mark.parametrize("twin", KERNELS, ids=lambda twin: twin.kind)

#: relative errors of second derivatives; single precision is that of the C++ kernels
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-3}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=["double", "single"])


@pytest.fixture(autouse=True)
def _any_size(monkeypatch):
    monkeypatch.setattr(pivoted_low_rank, "MIN_PERMUTED", 1)
    monkeypatch.setattr(native, "MIN_NATIVE_ENTRIES", 1)
    monkeypatch.setattr(native, "MIN_NETWORK_ENTRIES", 1)
    monkeypatch.setattr(block_diagonal, "MIN_SLICED", 1)
    monkeypatch.setattr(autograd, "MIN_RECOMPUTED", 1)


def tensors_of(results) -> list[Tensor]:
    return [r for r in (results if isinstance(results, tuple) else (results,)) if r is not None]


def rows_of(twin: KernelCase, dtype: torch.dtype):
    """The rows small enough for derivatives of derivatives."""
    for arguments in twin.arguments(dtype):
        first = leaves_of(arguments, dtype)[1][0]
        if 0 < first.numel() <= 1 << 14:
            yield arguments


# Kernels


@every_dtype
@every_twin
@pytest.mark.parametrize("power", [1, 2], ids=["constant", "varying"])
def test_a_gradient_penalty_is_that_of_the_reference(twin: KernelCase, power: int, dtype: torch.dtype) -> None:
    """With an incoming gradient that varies, and a constant one, where torch's ``once_differentiable`` is silent."""

    def second(function, arguments: tuple, dtype: torch.dtype) -> list[Tensor]:
        arguments, leaves = leaves_of(arguments, dtype)
        # the kernel's own inputs depend on one another, as an operator's may
        results = function(*(value.tanh() if value is leaves[0] else value for value in arguments))
        loss = sum((r**power).sum() for r in tensors_of(results))
        first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        penalty = sum(g.sin().sum() for g in first if g is not None)
        found = torch.autograd.grad(penalty, leaves, allow_unused=True)
        return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves)]

    count = 0
    for arguments in rows_of(twin, dtype):
        count += 1
        expected = second(twin.reference, arguments, torch.float64)
        scale = max(e.norm().item() for e in expected)
        for ours, theirs in zip(second(twin.fast, arguments, dtype), expected, strict=True):
            assert (ours.double() - theirs).norm().item() <= TOLERANCES[dtype] * max(scale, 1e-3)
    assert count


@every_dtype
@every_twin
def test_batched_and_forward_derivatives_of_kernels(twin: KernelCase, dtype: torch.dtype) -> None:
    """Many gradients in one backward pass, a map over a batch, tangents: as the reference has them."""
    arguments = next(rows_of(twin, dtype))
    if not isinstance(arguments[0], Tensor):
        pytest.skip("of parameters alone: there is no batch")
    arguments = [arguments[0][None].expand(3, *arguments[0].shape).contiguous(), *arguments[1:]]
    arguments[0][1:] += 1
    upstream = [torch.randn(2, *r.shape, dtype=r.dtype) for r in tensors_of(twin.reference(*_first(arguments)))]
    results = []
    for function in (twin.fast, twin.reference):
        x = arguments[0][0].clone().requires_grad_()
        outputs = tensors_of(function(x, *arguments[1:]))
        (batched,) = torch.autograd.grad(outputs, x, upstream, is_grads_batched=True)
        mapped = vmap(lambda x, function=function: tuple(tensors_of(function(x, *arguments[1:]))))(arguments[0])
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(arguments[0][0], arguments[0][1])
            tangents = [forward_ad.unpack_dual(y).tangent for y in tensors_of(function(dual, *arguments[1:]))]
        results.append([batched, *mapped, *tangents])
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, TOLERANCES[dtype])


def _first(arguments: list) -> list:
    return [arguments[0][0], *arguments[1:]]


@every_twin
def test_an_ordinary_backward_pass_leaves_the_reference_alone(twin: KernelCase, monkeypatch) -> None:
    monkeypatch.setattr(autograd, "MIN_RECOMPUTED", 1 << 17)
    monkeypatch.setattr(autograd, "_gradients_of", lambda *given: pytest.fail("asked the reference"))
    for dtype in TOLERANCES:
        arguments, leaves = leaves_of(next(rows_of(twin, dtype)), dtype)
        sum(r.sum() for r in tensors_of(twin.fast(*arguments))).backward()
        assert leaves[0].grad is not None


@every_dtype
@every_twin
def test_a_result_may_be_changed_in_place(twin: KernelCase, dtype: torch.dtype) -> None:
    def run(function, arguments: tuple, change, dtype: torch.dtype) -> list[Tensor]:
        arguments, leaves = leaves_of(arguments, dtype)
        y = change(tensors_of(function(*arguments))[0])
        found = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
        return [y.detach(), *(torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves))]

    def in_place(y: Tensor) -> Tensor:
        y += 1
        return torch.relu_(y.mul_(2))

    for arguments in rows_of(twin, dtype):
        expected = run(twin.reference, arguments, lambda y: torch.relu(2 * (y + 1)), torch.float64)
        for ours, theirs in zip(run(twin.fast, arguments, in_place, dtype), expected, strict=True):
            assert_close(ours, theirs, TOLERANCES[dtype])


# Operators


@case_of_every_kind
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_gradient_penalty_through_an_operator(case: Case, mode: str) -> None:
    """Linear -> tanh -> operator -> sum, against finite differences."""
    module = build(case, dtype=torch.float64).train(mode == "train")
    before = nn.Linear(4, module.in_features, dtype=torch.float64)
    points = torch.randn(3, 4, dtype=torch.float64)
    _, context = inputs(case, (3,), dtype=torch.float64)
    parameters = [*before.parameters(), *module.parameters()]

    def penalty() -> Tensor:
        x = points.clone().requires_grad_()
        y = call(module, before(x).tanh(), context)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return gradient.square().sum()

    found = torch.autograd.grad(penalty(), parameters, allow_unused=True)
    step = [torch.randn_like(p) for p in parameters]
    slope = sum((g * s).sum() for g, s in zip(found, step) if g is not None)
    values = []
    with torch.no_grad():
        for scale in (1e-6, -2e-6):
            for parameter, s in zip(parameters, step):
                parameter.add_(s, alpha=scale)
            with torch.enable_grad():
                values.append(penalty())
    numeric = (values[0] - values[1]) / 2e-6
    assert numeric.abs() > 1e-3
    assert (slope - numeric).abs() <= 1e-5 * numeric.abs()


@case_of_every_kind
@pytest.mark.parametrize("recorded", mostly_slow([True, False], True), ids=["grad", "no_grad"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_transforms_of_operators(case: Case, mode: str, recorded: bool) -> None:
    """``jvp``, ``jacrev``, ``vmap`` by inputs and by parameters, ``functional_call``: they agree and leave no trace."""
    module = build(case, dtype=torch.float64).train(mode == "train")
    x, context = inputs(case, (3,), dtype=torch.float64)
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def function(x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        torch.manual_seed(2)
        with in_context(context):
            return functional_call(module, parameters, (x,))

    with torch.set_grad_enabled(recorded):
        before = call(module, x, context)
        assert_close(function(x, parameters), before, 1e-12)
        # by the input
        towards = torch.randn_like(x)
        along = jvp(lambda x: function(x, parameters), (x,), (towards,))[1]
        matrix = jacrev(lambda x: function(x, parameters))(x)
        assert_close((matrix.flatten(2) * towards.flatten()).sum(-1), along, 1e-10)
        # by every parameter
        moves = {name: torch.randn_like(p) for name, p in parameters.items()}
        along = jvp(lambda p: function(x, p), (parameters,), (moves,))[1]
        matrices = jacrev(lambda p: function(x, p))(parameters)
        summed = sum((matrices[name].flatten(2) * moves[name].flatten()).sum(-1) for name in moves)
        assert_close(summed, along, 1e-10)
        # over a batch, of inputs and of parameters
        several = torch.stack([x, x + 1])
        mapped = vmap(lambda x: function(x, parameters), randomness="same")(several)
        assert_close(mapped, torch.stack([function(x, parameters) for x in several]), 1e-12)
        ensemble = {name: torch.stack([p, p + 0.1]) for name, p in parameters.items()}
        mapped = vmap(lambda p: function(x, p), randomness="same")(ensemble)
        members = [{name: p[at] for name, p in ensemble.items()} for at in range(2)]
        assert_close(mapped, torch.stack([function(x, member) for member in members]), 1e-12)
        assert_close(call(module, x, context), before, 0)


@case_of_every_kind
def test_gradients_of_gradients_in_torch_func(case: Case) -> None:
    module = build(case, dtype=torch.float64).eval()
    x, context = inputs(case, (2,), dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        return call(module, x.tanh(), context).sum()

    def squared(x: Tensor) -> Tensor:
        return torch.func.grad(function)(x).square().sum()

    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
    (expected,) = torch.autograd.grad(first.square().sum(), leaf)
    assert_close(torch.func.grad(squared)(x), expected, 1e-10)


@every_dtype
@case_of_every_kind
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_in_place_operations_after_an_operator(case: Case, recomputed: bool, dtype: torch.dtype) -> None:
    module = build(case, dtype=dtype)
    x, context = inputs(case, (3, 4), dtype=dtype)

    def run(change) -> list[Tensor | None]:
        leaf = x.clone().requires_grad_()

        def block(leaf: Tensor) -> Tensor:
            return change(call(module, leaf, context))

        y = checkpoint(block, leaf, use_reentrant=False) if recomputed else block(leaf)
        leaves = [leaf, *module.parameters()]
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)]

    def in_place(y: Tensor) -> Tensor:
        y += 1
        return torch.relu_(y)

    expected = run(lambda y: torch.relu(y + 1))
    for ours, theirs in zip(run(in_place), expected, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            assert_close(ours, theirs, 1e-12 if dtype == torch.float64 else 1e-5)


@case_of_every_kind
def test_what_a_transform_meets_first_outlives_it(case: Case) -> None:
    """Tables that every later call reads may be made inside the innermost of several transforms."""
    tables._on_device.cache_clear()
    module = build(case).eval()
    x, context = inputs(case, (2,))
    first, second = (torch.func.hessian(lambda x: call(module, x.tanh(), context).sum())(x) for _ in range(2))
    assert_close(second, first, 1e-6)
    x.requires_grad_()
    call(module, x, context).sum().backward()
    assert torch.isfinite(x.grad).all()


def test_a_penalty_under_autocast() -> None:
    """The reference runs outside of autocast, on what autocast gave the kernel."""
    for case in CASES:
        module = build(case).eval()
        x, context = inputs(case, (4,))
        found = []
        for autocast in (contextlib.nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16)):
            leaf = x.clone().requires_grad_()
            with autocast:
                y = call(module, leaf.tanh(), context)
                (first,) = torch.autograd.grad(y.float().sum(), leaf, create_graph=True)
                found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
        assert_close(found[1], found[0], 0.3)
