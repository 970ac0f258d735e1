"""Block-Hadamard and Monarch products against matrices built another way."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import relinear
from relinear.functional.block_diagonal import block_diagonal, block_diagonal_of, block_diagonal_to_dense
from relinear.functional.block_hadamard import block_hadamard_sizes, hadamard
from relinear.functional.monarch import monarch_dense, monarch_factors
from relinear.kernels import block_hadamard as kernel


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
    module = relinear.BlockHadamard(blocks=4).build(32, 48, dtype=torch.float64).fit_to_linear_(weight)
    identity = torch.eye(32, dtype=torch.float64)
    torch.testing.assert_close(module.blocks[0].detach(), block_diagonal_of(weight.weight @ hadamard(identity), 4))
    # Orthogonality of the residual to the subspace is what makes a fit the closest one.
    residual = hadamard(weight.weight - module.to_dense())
    assert block_diagonal_of(residual, 4).abs().max() < 1e-12


@pytest.mark.parametrize("shape", [(32, 48), (48, 32), (17, 9)])
def test_without_a_first_transform_depth_one_is_block_diagonal(shape) -> None:
    weight = torch.nn.Linear(*shape, dtype=torch.float64)
    module = relinear.BlockHadamard(blocks=4, mix_input=False).build(*shape, dtype=torch.float64).fit_to_linear_(weight)
    blocks = module.blocks[0].detach()
    padded = torch.zeros(4 * blocks.shape[1], 4 * blocks.shape[2], dtype=torch.float64)
    padded[: shape[1], : shape[0]] = weight.weight.detach()
    expected = block_diagonal_to_dense(block_diagonal_of(padded, 4))[: shape[1], : shape[0]]
    torch.testing.assert_close(module.to_dense().detach(), expected)
    x = torch.randn(3, shape[0], dtype=torch.float64)
    torch.testing.assert_close(module(x), x @ expected.T + weight.bias)


def test_without_a_first_transform_one_stands_between_two_products() -> None:
    module = relinear.BlockHadamard(blocks=4, depth=2, mix_input=False).build(16, 16, bias=False, dtype=torch.float64)
    first, second = (block_diagonal_to_dense(stage) for stage in module.blocks)
    identity = torch.eye(16, dtype=torch.float64)
    torch.testing.assert_close(module.to_dense(), second @ hadamard(identity) @ first)
    weight = torch.nn.Linear(16, 16, dtype=torch.float64)
    errors = []
    for depth in (1, 2, 3):
        torch.manual_seed(0)
        config = relinear.BlockHadamard(blocks=4, depth=depth, mix_input=False)
        fitted = config.build(16, 16, dtype=torch.float64).fit_to_linear_(weight)
        errors.append((fitted.to_dense() - weight.weight).norm().item())
    assert max(errors[1:]) < errors[0]


def test_deeper_fits_are_closer() -> None:
    weight = torch.nn.Linear(48, 32, dtype=torch.float64)
    errors = []
    for depth in (1, 2, 3):
        torch.manual_seed(0)
        module = relinear.BlockHadamard(blocks=4, depth=depth).build(48, 32, dtype=torch.float64).fit_to_linear_(weight)
        errors.append((module.to_dense() - weight.weight).norm().item())
    assert errors[1] < errors[0]
    assert errors[2] < errors[0]


def test_too_many_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks=20 .*at most 16"):
        relinear.BlockHadamard(blocks=20).build(16, 32)


def test_monarch_of_a_square_is_the_papers_product() -> None:
    size, m = 16, 4
    module = relinear.Monarch(blocks=m).build(size, size, bias=False, dtype=torch.float64)
    assert module.right.shape == module.left.shape == (m, m, m)
    permutation = torch.eye(size, dtype=torch.float64)[torch.arange(size).view(m, m).T.flatten()]
    left, right = (block_diagonal_to_dense(factor) for factor in (module.left, module.right))
    torch.testing.assert_close(module.to_dense(), permutation @ left @ permutation.T @ right)


def test_monarch_holds_the_fourier_transform() -> None:
    # Cooley-Tukey: with its inputs permuted, the transform of size m^2 is one Monarch matrix (Dao et al., Section 3).
    m = 4
    fourier = torch.fft.fft(torch.eye(m * m, dtype=torch.complex128))
    swapped = fourier.view(m * m, m, m).transpose(1, 2).reshape(m * m, m * m)
    subs = swapped.view(m, m, m, m).permute(1, 2, 0, 3)
    assert torch.linalg.svdvals(subs)[..., 1:].max() < 1e-12
    real = swapped.real.contiguous()  # cos(a + b), of rank 2
    torch.testing.assert_close(monarch_dense(*monarch_factors(real, m, 2), m * m, m * m), real)


def test_monarch_fit_cannot_be_improved() -> None:
    weight = torch.nn.Linear(20, 12, dtype=torch.float64)
    module = relinear.Monarch(blocks=4).build(20, 12, dtype=torch.float64).fit_to_linear_(weight)
    error = (module.to_dense() - weight.weight).square().sum()
    gradients = torch.autograd.grad(error, [module.left, module.right])
    assert max(g.abs().max().item() for g in gradients) < 1e-10
    subs = weight.weight.detach().view(3, 4, 4, 5).permute(1, 2, 0, 3)
    torch.testing.assert_close(error, torch.linalg.svdvals(subs)[..., 1:].square().sum())


def test_monarch_refuses_sizes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"rank=5 .*at most 4"):
        relinear.Monarch(blocks=4, rank=5).build(16, 32)
    with pytest.raises(ValueError, match=r"blocks=17 .*at most 16"):
        relinear.Monarch(blocks=17).build(16, 32)


def test_hadamard_matrices_are_made_once_and_never_under_a_mode(monkeypatch):
    made = []
    original = kernel.butterflies
    monkeypatch.setattr(kernel, "butterflies", lambda x: made.append(len(x)) or original(x))
    kernel._constant.cache_clear()
    x = torch.randn(3, 384)
    with torch.inference_mode():
        first = kernel.hadamard(x)
    y = x.clone().requires_grad_()
    kernel.hadamard(y).sum().backward()
    assert made == [16, 8]

    def faked():
        with FakeTensorMode() as mode:
            kernel.hadamard(mode.from_tensor(x))

    for inside in (
        lambda: torch.func.vmap(kernel.hadamard)(x),
        lambda: torch.func.grad(lambda x: kernel.hadamard(x).sum())(x),
        faked,
    ):
        made.clear()
        inside()
        assert made == [16, 8]
    assert torch.equal(kernel.hadamard(x), first)
    kernel._constant.cache_clear()
