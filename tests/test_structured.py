"""Block-Hadamard and Monarch products against matrices built another way."""

import math

import pytest
import torch

import relinear
from relinear.functional.block_diagonal import block_diagonal, block_diagonal_of, block_diagonal_to_dense
from relinear.functional.block_hadamard import block_hadamard_sizes, hadamard


@pytest.mark.parametrize("size", [1, 2, 7, 8, 12, 24, 64])
def test_hadamard_is_the_kronecker_power(size: int) -> None:
    matrix, power = torch.ones(1, 1, dtype=torch.float64), size & -size
    while matrix.shape[0] < power:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)) / math.sqrt(2)
    matrix = torch.kron(matrix, torch.eye(size // power, dtype=torch.float64))
    x = torch.randn(3, size, dtype=torch.float64)
    torch.testing.assert_close(hadamard(x), x @ matrix)
    torch.testing.assert_close(hadamard(hadamard(x)), x)


def test_block_diagonal_forms_agree() -> None:
    blocks = torch.randn(3, 4, 5, dtype=torch.float64)
    x = torch.randn(2, 15, dtype=torch.float64)
    dense = block_diagonal_to_dense(blocks)
    torch.testing.assert_close(block_diagonal(x, blocks), x @ dense.T)
    torch.testing.assert_close(block_diagonal_of(dense, 3), blocks)


@pytest.mark.parametrize("shape", [(576, 1536), (17, 9), (9, 17), (30, 30), (64, 64)])
@pytest.mark.parametrize("blocks", [1, 3, 4, 6, 8])
def test_every_output_sees_every_input_at_depth_one(shape, blocks: int) -> None:
    module = relinear.BlockHadamard(blocks=blocks).build(*shape)
    assert (module.to_dense() != 0).all()
    (width, _), *_ = block_hadamard_sizes(*shape, blocks, 1)
    assert width % blocks == 0
    assert width & -width >= blocks


def test_usual_widths_are_not_padded() -> None:
    assert block_hadamard_sizes(576, 1536, 8, 2) == [(576, 576), (576, 1536)]
    assert sum(p.numel() for p in relinear.BlockHadamard(blocks=8).build(576, 1536, bias=False).parameters()) == 110592


def test_fit_is_the_projection_onto_the_blocks() -> None:
    weight = torch.nn.Linear(32, 48, dtype=torch.float64)
    module = relinear.BlockHadamard(blocks=4).build(32, 48, dtype=torch.float64).from_linear(weight)
    identity = torch.eye(32, dtype=torch.float64)
    torch.testing.assert_close(module.blocks[0].detach(), block_diagonal_of(weight.weight @ hadamard(identity), 4))
    # Orthogonality of the residual to the subspace is what makes a fit the closest one.
    residual = hadamard(weight.weight - module.to_dense())
    assert block_diagonal_of(residual, 4).abs().max() < 1e-12


def test_deeper_fits_are_closer() -> None:
    weight = torch.nn.Linear(48, 32, dtype=torch.float64)
    errors = []
    for depth in (1, 2, 3):
        torch.manual_seed(0)
        module = relinear.BlockHadamard(blocks=4, depth=depth).build(48, 32, dtype=torch.float64).from_linear(weight)
        errors.append((module.to_dense() - weight.weight).norm().item())
    assert errors[1] < errors[0]
    assert errors[2] < errors[0]


def test_too_many_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks=20 .*at most 16"):
        relinear.BlockHadamard(blocks=20).build(16, 32)
