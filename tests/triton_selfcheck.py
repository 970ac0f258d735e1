"""The first use of Triton kernels on a device, in Triton's interpreter; run by ``test_triton.py``."""

from __future__ import annotations

import dataclasses
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch.utils.checkpoint import checkpoint

import relinear
from conftest import mostly_slow
from relinear.kernels import kernel_selfcheck
from relinear.kernels import triton as choice
from relinear.kernels.triton import cgt, rotor, transponder
from relinear.kernels.triton.samples import SAMPLES, largest_error

DTYPE = torch.float16  # the interpreter multiplies bits of bfloat16


@triton.jit
def _shut_gate(hidden, scalar, rank_at, RANK: tl.constexpr):
    """In place of a scalar gate: one that depends on nothing."""
    return tl.sum(hidden, 1) * 0 + 1


@triton.jit
def _without_tokens(values, RANK: tl.constexpr, PAD: tl.constexpr):
    """In place of the sum over templates: a product of shapes that do not fit."""
    return tl.dot(values, tl.zeros((2 * PAD, PAD), tl.float32))


@pytest.fixture(autouse=True)
def _at_first(monkeypatch):
    for kind, sample in SAMPLES.items():  # the interpreter takes its time
        monkeypatch.setitem(SAMPLES, kind, dataclasses.replace(sample, argument_lists=sample.argument_lists[:1]))
    kernel_selfcheck._known.clear()
    yield
    kernel_selfcheck._known.clear()


@pytest.fixture
def count(monkeypatch) -> list:
    """Grows with every check that runs a kernel."""
    checks: list = []
    check = kernel_selfcheck._check
    monkeypatch.setattr(kernel_selfcheck, "_check", lambda *given: (checks.append(given), check(*given))[1])
    return checks


@pytest.mark.parametrize("kind", mostly_slow(SAMPLES, "cgt"))
def test_kernels_that_are_right_are_used(kind: str, count) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert not kernel_selfcheck.failed_check(kind, "cpu", DTYPE)
        assert not kernel_selfcheck.failed_check(kind, "cpu", DTYPE)
    assert len(count) == 1


def test_a_wrong_kernel_gives_way_to_torch_and_warns_once(monkeypatch, count) -> None:
    monkeypatch.setattr(choice, "DEVICE", "cpu")
    monkeypatch.setattr(choice, "_inputs_unsupported", lambda *given: "")
    monkeypatch.setattr(transponder, "_scalar_gate", _shut_gate)
    layer = relinear.Transponder().build(32, 48).to(DTYPE)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(5, 32, dtype=DTYPE)
    with mock.patch.object(choice, "MODE", "off"):
        expected = layer(x)
    with mock.patch.object(choice, "MODE", "force"):
        assert not torch.allclose(layer(x), expected, atol=0.2)
    with pytest.warns(
        UserWarning, match="transponder is not used in torch.float16 on cpu: .* off by .*RELINEAR_TRITON"
    ):
        assert torch.equal(layer(x), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(layer(x), expected)
    assert len(count) == 1


@pytest.mark.parametrize("kind", ["transponder", "hdpl"])
def test_rows_that_were_never_written_are_not_lost_in_the_norm_of_the_whole(kind: str) -> None:
    sample = SAMPLES[kind]

    def without_the_last_rows(*given):
        results = sample.reference(*given)
        several = isinstance(results, tuple)
        whole = [torch.cat([one[:-2], one[-2:] * 0]) for one in (results if several else (results,))]
        return tuple(whole) if several else whole[0]

    def of(function) -> float:
        given = dataclasses.replace(sample, module=SimpleNamespace(kernel=function), function="kernel")
        return largest_error(given, sample.argument_lists[0], torch.bfloat16, "cpu")

    assert of(sample.reference) < kernel_selfcheck.TOLERANCES[torch.bfloat16] < of(without_the_last_rows)


def test_a_kernel_that_does_not_compile_gives_way(monkeypatch) -> None:
    monkeypatch.setattr(cgt, "_across", _without_tokens)
    with pytest.warns(UserWarning, match="cgt is not used .* it fails with"):
        assert "it fails with" in kernel_selfcheck.failed_check("cgt", "cpu", DTYPE)


def test_not_a_number_is_not_right(monkeypatch) -> None:
    kernel = rotor.sandwich_windows
    monkeypatch.setattr(rotor, "sandwich_windows", lambda *given: kernel(*given) * float("nan"))
    with pytest.warns(UserWarning, match="off by inf"):
        assert kernel_selfcheck.failed_check("rotor", "cpu", DTYPE)


def test_without_memory_to_check_it_a_kernel_is_not_used(monkeypatch) -> None:
    def full(*given):
        raise torch.OutOfMemoryError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(rotor, "sandwich_windows", full)
        with pytest.warns(UserWarning, match="it fails with OutOfMemoryError"):
            assert kernel_selfcheck.failed_check("rotor", "cpu", DTYPE)
    kernel_selfcheck._known.clear()
    assert not kernel_selfcheck.failed_check("rotor", "cpu", DTYPE)


def test_what_the_caller_has_set_is_no_part_of_the_check() -> None:
    """Inside inference mode, checkpointing, autocast and fake tensors the first use is the same."""
    x = torch.randn(3, 2, 4, requires_grad=True)

    def use(x):
        assert not kernel_selfcheck.failed_check("cgt", "cpu", DTYPE)
        return x.sin() * x

    checkpoint(use, x, use_reentrant=False).sum().backward()
    kernel_selfcheck._known.clear()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        use(x)
    kernel_selfcheck._known.clear()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        use(x)


def test_compilers_take_the_verdict_for_a_constant() -> None:
    def run(x):
        return x + 1 if kernel_selfcheck.failed_check("cgt", str(x.device), x.dtype) else x * 2

    x = torch.randn(4, dtype=DTYPE)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), x * 2)
