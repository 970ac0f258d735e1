"""The C++ kernels against double precision: odd sizes, strided gradients, extreme numbers; and life without them."""

import subprocess
import sys

import pytest
import torch

import relinear
from cases import ccl_results
from relinear.functional import transponder as reference
from relinear.kernels import ccl, native, transponder

#: of bfloat16 outputs and of single-precision ones, relative in the Frobenius norm
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture
def any_size(monkeypatch):
    monkeypatch.setattr(native, "MIN_ENTRIES", 1)
    if not native.runs_native(torch.zeros(1)):
        pytest.skip("no C++ compiler, or RELINEAR_COMPILE_KERNELS=0")


def close(mine, exact, dtype):
    assert (mine.double() - exact.double()).norm() <= TOLERANCES[dtype] * exact.double().norm() + 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scalar", [True, False], ids=["both-gates", "channel-gate"])
@pytest.mark.parametrize("rank", [1, 4, 7, 16])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(37, 24, 40), (1, 3, 1), (50, 70, 1030)])
def test_modulated_output_and_gradients(tokens, inputs, outputs, rank, scalar, dtype, any_size):
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(*shape, generator=generator) for shape in
             [(tokens, outputs), (tokens, inputs), (rank, inputs), (outputs, rank), (1, rank)]]  # fmt: skip
    drawn[2] /= inputs**0.5
    given = [t.to(dtype) for t in drawn[:3]] + [drawn[3], drawn[4] if scalar else None]
    exact = [None if t is None else t.double().requires_grad_() for t in given]
    given = [None if t is None else t.requires_grad_() for t in given]
    upstream = torch.randn(1, outputs, generator=generator).to(dtype).expand(tokens, outputs)  # strided
    results = []
    for modulate, tensors in ((transponder.modulate, given), (reference.modulate, exact)):
        y = modulate(*tensors)
        leaves = [t for t in tensors if t is not None]
        results.append([y, *torch.autograd.grad(y, leaves, upstream.to(y.dtype))])
    for mine, theirs in zip(*results, strict=True):
        close(mine, theirs, dtype)


def test_the_kernels_are_what_runs(any_size, monkeypatch):
    """A modulated layer and a CCL layer reach the kernels, forward and backward."""
    reached = []

    class Spy:
        def __getattr__(self, name):
            reached.append(name)
            return getattr(torch.ops.relinear_cpu, name)

    for module in (transponder, ccl):
        monkeypatch.setattr(module, "kernels", Spy)
    relinear.Transponder(rank=4).build(24, 40)(torch.randn(37, 24)).sum().backward()
    with relinear.context(torch.randn(37, 6)):
        relinear.CCL(rank=8, context_dim=6).build(24, 40)(torch.randn(37, 24)).sum().backward()
    assert {"modulate", "modulate_backward", "gate", "gate_backward"} <= set(reached)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ccl_output_and_gradients(dtype, any_size):
    results = ccl_results((torch.float64, dtype), 24, 41)
    for exact, mine in zip(*results, strict=True):
        assert (mine.double() - exact).norm() <= (5e-2 if dtype == torch.bfloat16 else 1e-5) * exact.norm() + 1e-6


def test_sigmoid_of_extreme_numbers(any_size):
    logits = torch.tensor([[-1e38, -87.5, -30.0, -1e-8, 0.0, 1e-8, 30.0, 1e38, torch.inf, -torch.inf, torch.nan]])
    ones, zeros = torch.ones_like(logits), torch.zeros(logits.shape[1])
    out = torch.empty_like(logits)
    native.kernels().gate(out, ones, logits, zeros)
    torch.testing.assert_close(out, torch.sigmoid(logits), rtol=1e-6, atol=1e-37, equal_nan=True)
    near = torch.linspace(-90, 90, 20001)[None]
    out = torch.empty_like(near)
    native.kernels().gate(out, torch.ones_like(near), near, torch.zeros(near.shape[1]))
    torch.testing.assert_close(out.double(), torch.sigmoid(near.double()), rtol=3e-7, atol=1e-37)


def test_bfloat16_is_rounded_to_nearest_and_keeps_what_is_not_a_number(any_size):
    values = torch.randn(1, 4096).bfloat16()
    values[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    logits = torch.zeros_like(values)
    out = torch.empty_like(values)
    native.kernels().gate(out, values, logits, torch.full((4096,), 0.25).bfloat16())
    expected = (values.double() * torch.sigmoid(torch.tensor(0.25).double())).bfloat16()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": torch.zeros(3)}, "bias must be a contiguous"),
        ({"value": torch.zeros(4, 5).double()}, "value must be a float32 or bfloat16"),
        ({"logits": torch.zeros(5, 4).T}, "logits must be a contiguous"),
    ],
)
def test_wrong_tensors_are_refused(change, message, any_size):
    given = {"out": torch.empty(4, 5), "value": torch.zeros(4, 5), "logits": torch.zeros(4, 5), "bias": torch.zeros(5)}
    with pytest.raises(RuntimeError, match=message):
        native.kernels().gate(*(given | change).values())


def test_small_and_other_tensors_take_torch_operations():
    assert not native.runs_native(torch.zeros(native.MIN_ENTRIES - 1))
    assert not native.runs_native(torch.zeros(native.MIN_ENTRIES, dtype=torch.float64))
    assert not native.runs_native(torch.zeros(native.MIN_ENTRIES, device="meta"))


def in_a_new_process(code, **environment):
    import os

    run = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], env=os.environ | environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return run.stdout.strip(), run.stderr


LARGE = "import torch; from relinear.kernels import native; print(native.runs_native(torch.zeros(native.MIN_ENTRIES)))"


def test_a_broken_compiler_means_torch_operations_and_a_warning(tmp_path):
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    cache = str(tmp_path / "cache")
    printed, errors = in_a_new_process(LARGE, CXX=str(broken), TORCH_EXTENSIONS_DIR=cache)
    assert printed == "False"
    assert "RELINEAR_COMPILE_KERNELS=0" in errors


def test_the_kernels_can_be_turned_off(tmp_path):
    printed, errors = in_a_new_process(LARGE, RELINEAR_COMPILE_KERNELS="0", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert printed == "False"
    assert "UserWarning" not in errors
    assert not list(tmp_path.iterdir())
