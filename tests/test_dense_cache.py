"""Inference through the cached dense matrix: the same outputs, and never a stale matrix."""

import copy

import pytest
import torch
from torch import nn

import relinear
from relinear.core import dense_cache
from relinear.kernels.choice import LARGEST_DENSE, prefers_dense

X = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(
    params=[relinear.LowRank(rank=4), relinear.BlockHadamard(blocks=4), relinear.Monarch(blocks=4)], ids=str
)
def operator(request):
    operator = request.param.build(16, 16).eval()
    assert prefers_dense(request.param.kind, 16, 16, torch.float32, 5)
    with torch.no_grad():
        operator(X)
    assert operator.__dict__["_dense_cache"] is not None
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


def test_an_optimiser_step_is_seen(operator):
    optimizer = torch.optim.SGD(operator.parameters(), lr=1.0)
    structured_loss = operator(X).square().sum()
    structured_loss.backward()
    before = cached(operator)
    optimizer.step()
    assert not torch.allclose(cached(operator), before)
    torch.testing.assert_close(cached(operator), structured(operator), atol=1e-4, rtol=1e-4)


def test_training_and_copies_do_not_use_it(operator):
    other = copy.deepcopy(operator)
    assert other.__dict__["_dense_cache"] is None
    assert not any("_dense" in key for key in operator.state_dict())
    operator.train()
    operator.__dict__["_dense_cache"] = None
    cached(operator)
    assert operator.__dict__["_dense_cache"] is None


def test_the_table_keeps_large_layers_structured():
    for kind, by_dtype in LARGEST_DENSE.items():
        for dtype in by_dtype:
            assert not prefers_dense(kind, 8192, 8192, dtype, 4096)
    assert not prefers_dense("unknown", 8, 8, torch.float32, 1)


@pytest.mark.parametrize("bias", [True, False])
def test_single_tokens_in_half_precision_are_matrix_vector_products(bias, monkeypatch):
    monkeypatch.setattr(dense_cache, "VECTOR_ENTRIES", 1)
    operator = relinear.LowRank(rank=4).build(12, 20, bias=bias, dtype=torch.bfloat16).eval()
    vectors = []
    monkeypatch.setattr(torch, "mv", lambda *a, mv=torch.mv: vectors.append(1) or mv(*a))
    monkeypatch.setattr(torch, "addmv", lambda *a, addmv=torch.addmv: vectors.append(1) or addmv(*a))
    for shape in ((12,), (1, 1, 12), (2, 12)):
        x = torch.randn(*shape, dtype=torch.bfloat16)
        with torch.no_grad():
            y = operator(x)
        assert y.shape == (*shape[:-1], 20)
        torch.testing.assert_close(y, operator(x).detach(), atol=3e-2, rtol=3e-2)
    assert len(vectors) == 2
