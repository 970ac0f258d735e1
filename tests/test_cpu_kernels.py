"""Portions of rows, and what goes through them."""

import pytest
import torch

import relinear
from cases import ccl_results
from relinear import functional
from relinear.bench.run import DEFAULT_OPERATORS
from relinear.functional.block_diagonal import block_diagonal_of
from relinear.functional.block_hadamard import hadamard as butterflies
from relinear.kernels import block_hadamard, ccl, implementations, native, products
from relinear.kernels.autograd import row_portions
from relinear.kernels.block_diagonal import block_gradient, block_product


def test_rows_are_covered_once():
    x = torch.zeros(10, 3)
    covered = torch.cat([torch.arange(10)[rows] for rows in row_portions(x, 36)])
    assert covered.tolist() == list(range(10))
    assert len(row_portions(x, 36)) == 4
    assert row_portions(x[:0]) == [slice(0, 0)]


def test_large_portions_are_of_whole_multiples_of_rows():
    x = torch.zeros(4096, 8)
    portions = row_portions(x, 683 * 32)  # a sixth
    assert [rows.stop - rows.start for rows in portions] == [704] * 5 + [576]
    assert row_portions(x, 4096 * 32) == [slice(0, 4096)]
    assert torch.cat([torch.arange(4096)[rows] for rows in portions]).tolist() == list(range(4096))


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch without oneDNN")
def test_products_by_onednn_are_torchs_of_any_strides(monkeypatch):
    monkeypatch.setattr(products, "has_narrow_products", lambda: True)
    x, weight, bias = torch.randn(70, 48), torch.randn(40, 24), torch.randn(40)
    for left, right in (
        (x[:, ::2], weight),
        (x[:, 24:], torch.randn(24, 40).T),
        (x[:, :24], torch.randn(40, 48)[:, ::2]),
    ):
        exact = left.double() @ right.double().T
        torch.testing.assert_close(products.matrix_product(left, right), exact.float(), rtol=1e-4, atol=1e-4)
        biased = products.matrix_product(left, right, bias)
        torch.testing.assert_close(biased, (exact + bias).float(), rtol=1e-4, atol=1e-4)
    y = torch.randn(70, 40)[:, 5:25]
    expected = (x.double().T @ y.double()).float()
    torch.testing.assert_close(products.transposed_product(x, y), expected, rtol=1e-4, atol=1e-4)
    blocks, total = torch.randn(4, 10, 12), torch.randn(70, 40)
    exact = x.double() @ torch.block_diag(*blocks.double()).T
    torch.testing.assert_close(block_product(x, blocks), exact.float(), rtol=1e-4, atol=1e-4)
    expected = (total + exact).float()
    torch.testing.assert_close(block_product(x, blocks, total), expected, rtol=1e-4, atol=1e-4)
    assert products.matrix_product(x.bfloat16(), torch.randn(8, 48).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_block_products_copy_nothing(dtype, monkeypatch):
    """An einsum and its gradient copy inputs and results in bfloat16."""
    monkeypatch.setattr(products, "has_narrow_products", lambda: False)
    x, grad, total = (torch.randn(128, width, dtype=dtype) for width in (64, 96, 96))
    blocks, given = torch.randn(4, 24, 16, dtype=dtype), total.clone()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        block_product(x, blocks, total)
        to_x, to_blocks = block_product(grad, blocks.mT), block_gradient(grad, x, blocks)
    assert not {event.key for event in profile.key_averages()} & {"aten::copy_", "aten::clone", "aten::contiguous"}
    dense, close = torch.block_diag(*blocks).double(), {"rtol": 0.02, "atol": 0.2}
    torch.testing.assert_close(total.double(), given.double() + x.double() @ dense.T, **close)
    torch.testing.assert_close(to_x.double(), grad.double() @ dense, **close)
    torch.testing.assert_close(to_blocks.double(), block_diagonal_of(grad.double().T @ x.double(), 4), **close)


#: storage that a training step keeps beside parameters, input and output included, relative to a dense layer's
OPERATORS = {operator: 1.3 for operator in DEFAULT_OPERATORS if operator != "quantized"}
#: two dense products, of which both are needed; a sandwich, whose first product takes longer again than it saves
OPERATORS |= {"output_gate": 2.01, "rotor:width=1,depth=0": 1.55, "rotor:depth=0": 1.3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_step_keeps_little_more_than_a_dense_one(operator, dtype, monkeypatch):
    monkeypatch.setattr(implementations, "fast_bfloat16", lambda: True)  # else CCL takes the reference, in float32
    layer = relinear.contract.operator.OperatorConfig.read(operator).build(1024, 1024, bias=False).to(dtype)
    x, stored = torch.randn(1024, 1024, dtype=dtype, requires_grad=True), {}
    parameters = {tensor.untyped_storage().data_ptr() for tensor in layer.state_dict().values()}

    def pack(tensor):
        if (storage := tensor.untyped_storage()).data_ptr() not in parameters:
            stored[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    context = relinear.activations.context(torch.randn(1024, 64, dtype=dtype))
    with context, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    pack(x), pack(y)
    assert sum(size for _, size in stored.values()) <= OPERATORS[operator] * 2 * x.nbytes


def test_ccl_in_bfloat16(monkeypatch):
    """Outputs and gradients of the path that only large layers take, against the reference in double precision."""
    monkeypatch.setattr(native, "MIN_NATIVE_ENTRIES", 1)
    monkeypatch.setattr(implementations, "fast_bfloat16", lambda: True)
    results = ccl_results((torch.float64, torch.bfloat16), 24, 40)
    for exact, mine in zip(*results, strict=True):
        assert (mine.double() - exact).norm() < 5e-2 * exact.norm() + 1e-6


def test_float32_where_bfloat16_is_emulated(monkeypatch):
    """The reference in single precision runs, and the transform that adds instead of multiplying: bit for bit."""
    monkeypatch.setattr(implementations, "fast_bfloat16", lambda: False)
    x, features, basis, mix = (torch.randn(*shape).bfloat16() for shape in ((5, 64), (5, 8), (4, 64), (16, 4)))
    gates = features.new_ones(4, 8), features.new_ones(4), features.new_ones(16, 8), features.new_ones(16)
    given = x.requires_grad_(), features, basis, mix, None, None, None, *gates
    assert torch.equal(ccl.ccl(*given), functional.ccl.ccl(*given))
    assert torch.equal(block_hadamard.hadamard(x), butterflies(x))
    monkeypatch.setattr(implementations, "fast_bfloat16", lambda: True)
    assert not torch.equal(ccl.ccl(*given), functional.ccl.ccl(*given))
    assert not torch.equal(block_hadamard.hadamard(x), butterflies(x))
