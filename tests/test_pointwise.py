"""Compiled pointwise chains: chosen for large tensors alone, equal to the eager form, and never in the way."""

import warnings

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from relinear.kernels import pointwise, transponder
from relinear.kernels.chunks import row_chunks


@pytest.fixture
def any_size(monkeypatch):
    monkeypatch.setattr(pointwise, "MIN_ENTRIES", 1)


def test_rows_are_covered_once():
    x = torch.zeros(10, 3)
    covered = torch.cat([torch.arange(10)[rows] for rows in row_chunks(x, 9)])
    assert covered.tolist() == list(range(10))
    assert len(row_chunks(x, 9)) == 4
    assert row_chunks(x[:0]) == [slice(0, 0)]


def test_only_large_real_tensors_on_a_cpu(any_size):
    x = torch.zeros(4)
    assert pointwise.fuses_pointwise(x) == pointwise._has_compiler()
    assert not pointwise.fuses_pointwise(x.to("meta"))
    with FlopCounterMode(display=False):  # a mode sees operations, which a compiled chain would hide
        assert not pointwise.fuses_pointwise(x)


def test_small_tensors_are_left_alone():
    assert not pointwise.fuses_pointwise(torch.zeros(pointwise.MIN_ENTRIES - 1))


def test_a_failing_compiler_means_the_eager_form_and_one_warning(monkeypatch):
    def fail(*args):
        raise torch._dynamo.exc.TorchDynamoException("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: fail)
    run = pointwise.compiled.__wrapped__(torch.neg)
    with pytest.warns(UserWarning, match="RELINEAR_COMPILE_KERNELS=0"):
        assert run(torch.ones(1)) == -1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(torch.ones(1)) == -1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_gates_are_the_eager_ones(dtype, any_size, monkeypatch):
    if not pointwise._has_compiler():
        pytest.skip("no C++ compiler")
    generator = torch.Generator().manual_seed(0)
    shapes = (37, 24), (37, 8), (24, 8), (1, 8)
    results = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(transponder, "fuses_pointwise", lambda x: False)
        generator.manual_seed(0)
        drawn = [torch.randn(*shape, generator=generator) for shape in shapes]
        given = [t.to(dtype).requires_grad_() for t in drawn[:2]] + [t.requires_grad_() for t in drawn[2:]]
        y = transponder._Modulate.apply(*given)
        results.append([y, *torch.autograd.grad(y.square().sum(), given)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=2e-2)
