"""Every kernel against its reference, each row of ``cases.KERNELS``; which implementation of it runs, and the log."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import logging
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

import relinear
from cases import KERNELS, KernelCase, leaves_of
from conftest import mostly_slow
from relinear import kernels
from relinear.kernels import (
    autograd,
    block_diagonal,
    context_manager,
    implementations,
    native,
    pivoted_low_rank,
    triton,
)
from relinear.kernels.implementations import Call, Implementation, environment_choice


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).norm().item() <= tolerance * max(expected.norm().item(), 1e-3)


def twins_on_disk() -> list[tuple]:
    """(reference, kernel) of every function of ``kernels`` with one of the same name in ``functional``."""
    found = []
    for path in Path(next(iter(kernels.__path__))).glob("*.py"):
        if not (path.parents[1] / "functional" / path.name).is_file() or path.stem == "__init__":
            continue
        fast, slow = (importlib.import_module(f"relinear.{room}.{path.stem}") for room in ("kernels", "functional"))
        pairs = [(getattr(slow, name, f), f) for name, f in inspect.getmembers(fast, inspect.isfunction)]
        found += [(reference, f) for reference, f in pairs if reference is not f]  # the same where both import it
    return found


def test_every_twin_is_in_the_table() -> None:
    listed = [(case.reference, case.fast) for case in KERNELS]
    found = twins_on_disk()
    assert found
    missing = [
        f"{kernel.__module__}.{kernel.__name__}" for reference, kernel in found if (reference, kernel) not in listed
    ]
    assert not missing, f"no row of cases.KERNELS for {missing}"
    assert len(listed) == len(found), "a row of cases.KERNELS pairs functions of different names"


@pytest.fixture
def any_size(monkeypatch) -> None:
    """Small tensors take the implementations of large ones."""
    monkeypatch.setattr(pivoted_low_rank, "MIN_PERMUTED", 1)
    monkeypatch.setattr(context_manager, "MIN_IN_PARTS", 1)
    monkeypatch.setattr(native, "MIN_NATIVE_ENTRIES", 1)
    monkeypatch.setattr(block_diagonal, "MIN_SLICED", 1)
    monkeypatch.setattr(autograd, "MIN_RECOMPUTED", 1)


@pytest.mark.parametrize("case", KERNELS, ids=lambda case: case.kind)
def test_kernel_equals_its_reference(case: KernelCase, any_size) -> None:
    assert list(inspect.signature(case.fast).parameters) == list(inspect.signature(case.reference).parameters)

    def run(function, arguments):
        arguments, leaves = leaves_of(arguments, torch.float64)
        results = function(*arguments)
        results = [r for r in (results if isinstance(results, tuple) else (results,)) if r is not None]
        generator = torch.Generator().manual_seed(0)
        loss = sum((r * torch.randn(r.shape, generator=generator, dtype=r.dtype)).sum() for r in results)
        return [r.detach() for r in results], torch.autograd.grad(loss, leaves, allow_unused=True)

    count = 0
    for arguments in case.arguments(torch.float64):
        count += 1
        expected = run(case.reference, arguments)
        # Uninitialised memory is filled with NaN in deterministic mode: an element a kernel forgets cannot pass.
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            actual = run(case.fast, arguments)
        finally:
            torch.use_deterministic_algorithms(False)
        for ours, theirs in zip(actual, expected):
            assert len(ours) == len(theirs)
            for a, e in zip(ours, theirs):
                assert (a is None) == (e is None)
                if e is not None:
                    assert_close(a, e, case.tolerance)
    assert count


class OnGPU(Tensor):
    device, shape = torch.device("cuda"), torch.Size()


def on_a_gpu(tokens: int = 1, width: int = 8) -> Call:
    """A call of a kernel with nothing but x, which looks like one on a GPU."""
    call = Call(torch.zeros(0, dtype=torch.bfloat16).as_subclass(OnGPU))
    call.device, call.size = triton.DEVICE, tokens * width
    return call


def test_no_kernel_of_a_gpu_inside_a_transform(monkeypatch) -> None:
    monkeypatch.setattr(triton, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton, "failed_check", lambda kind, device, dtype: "")
    chosen = []

    def ask(x: Tensor) -> Tensor:
        chosen.append(not triton.unsupported_reason(on_a_gpu(), "hdpl", 1, outputs=lambda call: 8))
        return x

    ask(torch.zeros(2))
    torch.vmap(ask)(torch.zeros(2))
    with torch.autograd.forward_ad.dual_level():
        ask(torch.zeros(2))
    assert chosen == [True, False, False]


@pytest.fixture
def any_inputs(monkeypatch) -> None:
    monkeypatch.setattr(triton, "HAS_TRITON", True)
    monkeypatch.setattr(triton, "_inputs_unsupported", lambda *given: "")
    monkeypatch.setattr(triton, "DEVICE", "cpu")


def test_kernels_of_a_gpu_run_where_they_were_the_faster_form(any_inputs, monkeypatch) -> None:
    monkeypatch.setattr(triton, "failed_check", lambda *given: "")

    def runs(kernel, tokens: int, width: int) -> bool:
        given = types.SimpleNamespace(shape=(width, width), numel=lambda: 1)
        call = on_a_gpu(tokens, width)
        call.x.shape = (tokens, width)
        call.arguments = (call.x, *[given] * 10)
        return not importlib.import_module(f"relinear.kernels.{kernel}")._triton_unsupported(call)

    with torch.no_grad():
        assert [runs("transponder", 4096, width) for width in (2048, 4096)] == [True, False]
        assert runs("cgt", 4096, 2048)
    assert not runs("cgt", 4096, 2048)  # it has no backward pass
    assert runs("transponder", 4096, 4096)  # a training step
    assert not runs("hdpl", 65536, 8192)
    with mock.patch.object(triton, "MODE", "force"):
        with torch.no_grad():
            assert runs("transponder", 4096, 4096)
        assert not runs("cgt", 4096, 2048)


def test_kernels_of_a_gpu_can_be_forced_and_turned_off(any_inputs, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(triton, "failed_check", lambda *given: asked.append(given) or "off by 1")
    call = Call(torch.zeros(2, dtype=torch.float16))
    with mock.patch.object(triton, "MODE", "force"):
        assert not triton.unsupported_reason(call, "hdpl", 1, outputs=lambda call: 8)
    with mock.patch.object(triton, "MODE", "off"):
        assert triton.unsupported_reason(call, "hdpl", 1, outputs=lambda call: 8) == "RELINEAR_TRITON=0"
    assert not asked
    assert triton.unsupported_reason(call, "hdpl", 1, outputs=lambda call: 8) == "off by 1"
    assert asked == [("hdpl", "cpu", torch.float16)]
    with pytest.raises(ValueError, match=r"RELINEAR_TRITON='yes' .* 'force'"):
        environment_choice("RELINEAR_TRITON", "yes", triton.MODES)


def logged_by(caplog, run) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="relinear.kernels"):
        run()
    return [record.getMessage() for record in caplog.records if record.name == "relinear.kernels"]


@pytest.mark.parametrize("case", KERNELS, ids=lambda case: case.kind)
def test_implementations_are_logged_once_a_shape_with_reasons(case: KernelCase, caplog, monkeypatch) -> None:
    monkeypatch.setattr(implementations, "_logged", set())
    arguments = next(iter(case.arguments(torch.float64)))
    lines = logged_by(caplog, lambda: case.fast(*arguments))
    assert not logged_by(caplog, lambda: case.fast(*arguments))
    assert len(lines) == len(set(lines))
    for line in lines:
        assert "float64, cpu)" in line
        assert "C++;" not in line


def test_a_form_is_told_with_what_spoke_against_the_others(caplog, monkeypatch) -> None:
    monkeypatch.setattr(implementations, "_logged", set())
    layer = relinear.HDPL(rank=4, blocks=2).build(8, 8)
    lines = logged_by(caplog, lambda: layer(torch.randn(3, 8)))
    reasons = "not Triton: not on an NVIDIA GPU; not C++ for a few rows: sampled; not on slices: too few numbers"
    assert f"hdpl (3 x 8, float32, cpu): reference; {reasons}" in lines
    small = logged_by(caplog, lambda: layer(torch.randn(4, 8)))
    assert any("(4 x 8," in line for line in small)


def test_nobody_is_told_by_default(monkeypatch) -> None:
    monkeypatch.setattr(implementations, "log_choice", lambda *given: pytest.fail("told"))
    relinear.HDPL(rank=4, blocks=2).build(8, 8)(torch.randn(3, 8)).sum().backward()


def test_forms_are_tried_in_order_and_asked_with_the_facts_of_one_call() -> None:
    asked: list[Call] = []

    def unsupported(call: Call) -> str:
        asked.append(call)
        return "" if call.arguments[1] == 2 else "no two"

    @implementations.dispatch(
        Implementation("first", lambda call: "never", lambda *given: "first"),
        Implementation("second", unsupported, lambda *given: ("second", given)),
    )
    def kernel(x: Tensor, number: int, more: int = 5) -> tuple:
        """Say who ran, and with what."""
        return "itself", (x, number, more)

    x = torch.zeros(3, 4)
    assert kernel(x, 2) == ("second", (x, 2, 5))
    assert kernel(x, more=1, number=7) == ("itself", (x, 7, 1))
    assert (asked[0].x is x, asked[0].rows, asked[0].grad, asked[0].plain) == (True, 3, True, True)
    assert [len(call.arguments) for call in asked] == [3, 3]
    assert kernel.__doc__.startswith("Say who")
    for wrong in ({"nobody": 1}, {}):
        with pytest.raises(TypeError):
            kernel(x, **wrong)


def test_a_small_hdpl_step_asks_and_calls_little() -> None:
    """At 64 tokens Python's part of a step counts for as much as its arithmetic; torch's own functions count, too."""
    layer, x = relinear.HDPL(rank=128, blocks=8).build(512, 512), torch.randn(64, 512, requires_grad=True)
    called = []

    def profile(frame, event, argument) -> None:
        # parameters are looked up by a call of Python, as in every module
        if event == "call" and frame.f_code.co_name != "__getattr__":
            called.append((Path(frame.f_code.co_filename).is_relative_to(source), frame.f_code.co_name))

    source = Path(relinear.__file__).parent
    layer(x).sum().backward()
    layer.clear_auxiliary_losses()  # as a model does before every forward
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        layer(x).sum().backward()
    finally:
        sys.setprofile(before)
    assert len(called) <= 40, called
    own = [name for ours, name in called if ours]
    assert len(own) <= 21, own
    assert 0 < sum("unsupported" in name for name in own) <= 6


def test_telling_breaks_no_compiled_graph(caplog) -> None:
    layer = relinear.HDPL(rank=4, blocks=2).build(8, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert logged_by(caplog, lambda: compiled(torch.randn(3, 8))) == []


KINDS = ["low_rank", "pivoted_low_rank", "monarch", "block_hadamard", "hdpl", "transponder"]


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "pivoted_low_rank", "transponder"))
def test_a_layer_in_bfloat16_breaks_no_compiled_graph(kind: str) -> None:
    """Nothing is asked of the processor in a graph: that reads files, which cannot be traced."""
    layer = relinear.contract.operator.OperatorConfig.read(kind).build(64, 64).bfloat16()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert compiled(torch.randn(3, 64, dtype=torch.bfloat16)).shape == (3, 64)


def test_gradients_of_many_rows_in_bfloat16_are_summed_in_float32(monkeypatch) -> None:
    """Sums over portions of rows would be rounded at each one: 2 % of the bias's gradient."""
    monkeypatch.setattr(autograd, "BACKWARD_PORTION", autograd.BACKWARD_PORTION // 32)
    layer = relinear.Transponder(rank=2).build(16, 64, bias=True).bfloat16()
    x, upstream = torch.randn(16384, 16).bfloat16(), (torch.rand(16384, 64) * 0.1 + 0.5).bfloat16()
    exact = copy.deepcopy(layer).float()
    layer(x).backward(upstream)
    exact(x.float()).backward(upstream.float())
    for name in ("weight", "bias"):
        want = getattr(exact.base, name).grad
        assert (getattr(layer.base, name).grad.float() - want).norm() < 3e-3 * want.norm(), name


@pytest.mark.parametrize(("asked", "told"), [("kernels", True), ("forms", True), ("", False)])
def test_the_environment_asks_for_the_log(asked: str, told: bool, monkeypatch, capsys) -> None:
    """When the module is imported: here again, under another name."""
    log = implementations.LOG
    monkeypatch.setenv("RELINEAR_LOG", asked)
    monkeypatch.setattr(implementations, "_logged", set())
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", log.propagate)
    before = log.level
    spec = importlib.util.spec_from_file_location("imported_again", implementations.__file__)
    monkeypatch.setitem(sys.modules, "imported_again", again := importlib.util.module_from_spec(spec))
    try:
        spec.loader.exec_module(again)
        relinear.HDPL(rank=4, blocks=2).build(8, 8)(torch.randn(3, 8))
    finally:
        log.setLevel(before)
    assert ("relinear.kernels: hdpl (3 x 8, float32, cpu): reference" in capsys.readouterr().err) == told


def test_a_wrong_wish_in_the_environment_is_refused() -> None:
    with pytest.raises(
        ValueError, match="RELINEAR_LOG='form' in the environment, expected one of '0', 'kernels', 'forms'"
    ):
        implementations.environment_choice(
            "RELINEAR_LOG", "form", {"": False, "0": False, "kernels": True, "forms": True}
        )


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kind", ["hdpl", "low_rank", "pivoted_low_rank", "monarch", "block_hadamard", "rotor", "transponder"]
)
def test_large_inputs_under_autocast(kind: str, given: torch.dtype) -> None:
    """Forms for large inputs lower what they are given, as autocast does for the reference."""
    settings = {"hdpl": ":rank=16,blocks=8", "low_rank": ":rank=16", "pivoted_low_rank": ":rank=16"}.get(kind, "")
    operator = relinear.contract.operator.OperatorConfig.read(kind + settings).build(256, 256)
    x = torch.randn(1024, 256).to(given)
    for training in (False, True):
        operator.train(training)
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(training):
            y = operator(x)
        assert y.dtype == torch.bfloat16
        if training:
            y.float().square().mean().backward()
            assert all(p.grad is None or p.grad.isfinite().all() for p in operator.parameters())
        elif kind != "rotor":
            whole = operator(x.float())
            assert (y.float() - whole).norm() < 0.02 * whole.norm()
