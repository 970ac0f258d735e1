"""Every fast kernel against the reference of the same signature: each row of ``cases.TWINS``."""

from __future__ import annotations

import inspect
import types

import pytest
import torch
from torch import Tensor

from cases import TWINS, Twin
from relinear.kernels import choice


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).norm().item() <= tolerance * max(expected.norm().item(), 1e-3)


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.kind)
def test_kernel_equals_its_reference(twin: Twin) -> None:
    assert list(inspect.signature(twin.fast).parameters) == list(inspect.signature(twin.reference).parameters)

    def run(function, arguments):
        arguments = [
            a.clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments
        ]
        results = function(*arguments)
        results = [r for r in (results if isinstance(results, tuple) else (results,)) if r is not None]
        generator = torch.Generator().manual_seed(0)
        loss = sum((r * torch.randn(r.shape, generator=generator, dtype=r.dtype)).sum() for r in results)
        leaves = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
        return [r.detach() for r in results], torch.autograd.grad(loss, leaves, allow_unused=True)

    count = 0
    for arguments in twin.arguments(torch.float64):
        count += 1
        expected = run(twin.reference, arguments)
        # Uninitialised memory is filled with NaN in deterministic mode: an element a kernel forgets cannot pass.
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            actual = run(twin.fast, arguments)
        finally:
            torch.use_deterministic_algorithms(False)
        for ours, theirs in zip(actual, expected):
            assert len(ours) == len(theirs)
            for a, e in zip(ours, theirs):
                assert (a is None) == (e is None)
                if e is not None:
                    assert_close(a, e, twin.tolerance)
    assert count


def test_no_kernel_of_a_gpu_inside_a_transform(monkeypatch) -> None:
    monkeypatch.setattr(choice, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    x = types.SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, numel=lambda: 8)
    chosen = [choice.prefers_triton(x)]
    torch.vmap(lambda t: (chosen.append(choice.prefers_triton(x)), t)[1])(torch.zeros(2))
    with torch.autograd.forward_ad.dual_level():
        chosen.append(choice.prefers_triton(x))
    assert chosen == [True, False, False]
