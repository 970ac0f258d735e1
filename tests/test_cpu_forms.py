"""Portions of rows, products of blocks: equal to the plain form."""

import pytest
import torch

from cases import ccl_results
from relinear.functional.block_diagonal import block_diagonal
from relinear.kernels import forms
from relinear.kernels.cpu import block_diagonal as products
from relinear.kernels.cpu.portions import row_portions


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


def test_ccl_in_bfloat16(monkeypatch):
    """Outputs and gradients of the path that only large layers take, against the reference in double precision."""
    monkeypatch.setattr(forms, "FEWEST_ENTRIES", 1)
    results = ccl_results((torch.float64, torch.bfloat16), 24, 40)
    for exact, mine in zip(*results, strict=True):
        assert (mine.double() - exact).norm() < 5e-2 * exact.norm() + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_of_blocks_are_one_product_up_to_a_measured_number_of_tokens(dtype, monkeypatch):
    blocks, bias = torch.randn(4, 12, 8, dtype=dtype), torch.randn(48, dtype=dtype)
    single = torch.mm
    calls: list[int] = []
    monkeypatch.setattr(torch, "mm", lambda *given, **more: calls.append(1) or single(*given, **more))
    most = products.MOST_TOKENS_BATCHED.get(dtype, 0)
    for tokens in (1, most, most + 1):
        x = torch.randn(tokens, 64, dtype=dtype)[:, 16:48]  # rows of a wider matrix
        for weights, given in ((blocks, x), (blocks.mT, torch.randn(tokens, 48, dtype=dtype))):
            calls.clear()
            got = products.block_diagonal_product(given, weights)
            assert bool(calls) == (tokens > most)
            torch.testing.assert_close(got, block_diagonal(given, weights), atol=2e-2, rtol=2e-2)
            assert got.is_contiguous()
        torch.testing.assert_close(
            products.block_diagonal_product(x, blocks, bias), block_diagonal(x, blocks) + bias, atol=2e-1, rtol=2e-2
        )
