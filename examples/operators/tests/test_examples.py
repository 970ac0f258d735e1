"""Every operator: relinear's conformance suite, and its matrices and fits against numpy, scipy or an exact case."""

import numpy as np
import pytest
import scipy.linalg
import torch
from relinear_examples.blast import Blast
from relinear_examples.block_low_rank import BlockLowRank
from relinear_examples.btt import BTT
from relinear_examples.butterfly import Butterfly
from relinear_examples.circulant import Circulant
from relinear_examples.cola import CoLA
from relinear_examples.kronecker import Kronecker
from relinear_examples.sparse_low_rank import SparseLowRank
from relinear_examples.tensor_train import TensorTrain
from relinear_examples.toeplitz import Toeplitz
from torch import Tensor, nn

from relinear import LowRank
from relinear.contract.calibration_statistics import CalibrationStatistics, fit_by_lbfgs_
from relinear.contract.linear_layers import linear_of
from relinear.testing import Case, OperatorConformance


class TestExamples(OperatorConformance):
    cases = (
        Case(config=Blast(rank=3, blocks=4), lossless_config=Blast(rank=16, blocks=4), exact_tolerance=1e-8),
        Case(config=BlockLowRank(rank=3, blocks=4), lossless_config=BlockLowRank(rank=16, blocks=4)),
        Case(config=BTT(rank=2), lossless_config=BTT(rank=4)),
        Case(config=Butterfly()),
        Case(config=Circulant(block=4), lossless_config=Circulant(block=1)),
        Case(config=Circulant(block=5), lossless_config=Circulant(block=1), variant="padded"),
        Case(config=CoLA(rank=4), linear=False),
        Case(config=Kronecker(rank=2), lossless_config=Kronecker(rank=16)),
        Case(config=SparseLowRank(rank=3, density=0.1), lossless_config=SparseLowRank(rank=16)),
        Case(config=TensorTrain(rank=3), lossless_config=TensorTrain(rank=16)),
        Case(config=Toeplitz(rank=1)),
    )


def built(config, inputs=12, outputs=20):
    return config.build(inputs, outputs, bias=False, dtype=torch.float64)


def fitted(config, weight: Tensor):
    """The operator's best fit of a matrix."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.float64)
    linear.weight = nn.Parameter(weight)
    return built(config, *weight.T.shape).fit_to_linear_(linear)


SIZES = (
    Blast(rank=3, blocks=4),
    BlockLowRank(rank=2, blocks=4),
    BTT(rank=2),
    Circulant(block=4),
    Kronecker(rank=3),
    SparseLowRank(rank=3, density=0.01),
    TensorTrain(rank=3),
    Toeplitz(rank=2),
)
EXACT = (BTT(rank=2), Circulant(block=4), Kronecker(rank=3), TensorTrain(rank=3))


@pytest.mark.parametrize("config", EXACT, ids=lambda config: config.kind)
def test_what_has_the_structure_is_fitted_exactly(config) -> None:
    layer = built(config)
    weight = layer.to_dense().detach()
    assert torch.linalg.norm(fitted(config, weight).to_dense() - weight) < 1e-10 * torch.linalg.norm(weight)


@pytest.mark.parametrize("config", [*SIZES, Butterfly(), CoLA(rank=32)], ids=lambda config: config.kind)
def test_outputs_have_the_variance_of_the_inputs(config) -> None:
    torch.manual_seed(0)
    outputs = torch.cat([built(config, 96, 192)(torch.randn(64, 96, dtype=torch.float64)) for _ in range(40)])
    assert 0.85 < outputs.std() < 1.15


@pytest.mark.parametrize(
    "config",
    [Butterfly(), Circulant(block=2), Kronecker(rank=8), TensorTrain(rank=8), Toeplitz(rank=2)],
    ids=lambda c: c.kind,
)
def test_many_tokens_go_through_the_matrix_and_few_through_the_structure(config) -> None:
    layer, x = built(config), torch.randn(400, 12, dtype=torch.float64, requires_grad=True)
    assert layer.gains_by_composing(x)
    assert not layer.gains_by_composing(x[:2])
    y, expected = layer(x), layer.product(x)
    torch.testing.assert_close(y, expected)
    slopes = [torch.autograd.grad(out.square().sum(), [x, *layer.parameters()]) for out in (y, expected)]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("config", SIZES, ids=lambda config: config.kind)
def test_sizes_save_parameters_and_grow(config) -> None:
    counts = [sum(p.numel() for p in built(size, 96, 192).parameters()) for size in config.candidates(96, 192)]
    assert len(counts) > 2
    assert max(counts) < 96 * 192
    doubled = config.scaled(96, 192, 2.0)
    now, then = (sum(p.numel() for p in built(one, 96, 192).parameters()) for one in (config, doubled))
    assert 1.6 * now < then < 2.4 * now


def test_kronecker_is_numpy_s() -> None:
    layer = built(Kronecker(rank=2))
    left, right = layer.left.detach().numpy(), layer.right.detach().numpy()
    expected = sum(np.kron(a, b) for a, b in zip(left, right, strict=True))
    np.testing.assert_allclose(layer.to_dense().detach().numpy(), expected, atol=1e-14)


def test_the_nearest_kronecker_product_is_that_of_the_power_method() -> None:
    """The best A for a given B, then the best B for that A, until nothing moves: no decomposition is needed."""
    weight = torch.randn(20, 12, dtype=torch.float64)
    blocks = weight.reshape(4, 5, 3, 4)
    right = torch.randn(5, 4, dtype=torch.float64)
    for _ in range(2000):
        left = torch.einsum("pqij,qj->pi", blocks, right) / right.square().sum()
        right = torch.einsum("pqij,pi->qj", blocks, left) / left.square().sum()
    found = fitted(Kronecker(rank=1), weight).to_dense().detach()
    torch.testing.assert_close(found, torch.kron(left, right), atol=1e-8, rtol=0)


def test_btt_of_rank_one_is_relinear_s_monarch() -> None:
    from relinear import Monarch

    weight = torch.randn(16, 16, dtype=torch.float64)
    monarch = fitted(Monarch(blocks=4, rank=1), weight).to_dense()
    torch.testing.assert_close(fitted(BTT(rank=1), weight).to_dense(), monarch)


def test_tensor_train_is_a_product_of_core_slices() -> None:
    layer = built(TensorTrain(rank=3), 12, 18)
    first, middle, last = (core.detach().numpy() for core in layer.cores())
    dense = layer.to_dense().detach().numpy().reshape(3, 2, 3, 2, 2, 3)
    for p, q, r, i, j, k in np.ndindex(dense.shape):
        np.testing.assert_allclose(dense[p, q, r, i, j, k], first[p, i] @ middle[:, q, j] @ last[:, r, k], atol=1e-14)


def test_the_error_of_tt_svd_is_within_its_bound() -> None:
    """Oseledets 2011, theorem 2.2: at most the root of the summed tails of both unfoldings."""
    weight = torch.randn(18, 12, dtype=torch.float64)
    tensor = weight.reshape(3, 2, 3, 2, 2, 3).permute(0, 3, 1, 4, 2, 5).numpy()
    unfolded = [tensor.reshape(6, -1), tensor.reshape(-1, 9)]
    tails = [scipy.linalg.svdvals(matrix)[3:] for matrix in unfolded]
    error = torch.linalg.norm(fitted(TensorTrain(rank=3), weight).to_dense() - weight).item()
    assert max(np.linalg.norm(tail) for tail in tails) - 1e-9 <= error <= np.linalg.norm(np.concatenate(tails)) + 1e-9


def test_a_block_is_scipy_s_circulant() -> None:
    layer = built(Circulant(block=6), 6, 6)
    kernel = layer.kernel.detach().numpy()[0, 0]
    np.testing.assert_allclose(layer.to_dense().detach().numpy(), scipy.linalg.circulant(kernel), atol=1e-14)


@pytest.mark.parametrize("block", [4, 5])
def test_the_nearest_circulant_is_that_of_least_squares(block: int) -> None:
    """Against a solver that is given every basis matrix, with blocks that are cut off, too."""
    weight = torch.randn(20, 12, dtype=torch.float64)
    layer = fitted(Circulant(block=block), weight)
    shape = layer.kernel.shape
    basis = []
    for one in torch.eye(layer.kernel.numel(), dtype=torch.float64):
        layer.kernel.data = one.view(shape)
        basis.append(layer.to_dense().detach().flatten())
    basis = torch.stack(basis, 1).numpy()
    best, *_ = np.linalg.lstsq(basis, weight.flatten().numpy(), rcond=None)
    np.testing.assert_allclose(
        fitted(Circulant(block=block), weight).to_dense().detach().flatten(), basis @ best, atol=1e-12
    )


def test_the_turns_of_block_low_rank_only_gain() -> None:
    """Better than either part alone, and nearly exact where the matrix is the sum of both."""
    torch.manual_seed(0)
    weight = torch.randn(48, 32, dtype=torch.float64)
    error = torch.linalg.norm(fitted(BlockLowRank(rank=4, blocks=4), weight).to_dense() - weight)
    outside = weight - torch.block_diag(
        *weight.unflatten(0, (4, -1)).unflatten(2, (4, -1)).diagonal(0, 0, 2).permute(2, 0, 1)
    )
    assert error < np.linalg.norm(scipy.linalg.svdvals(outside)[4:])
    assert error < np.linalg.norm(scipy.linalg.svdvals(weight)[4:])
    both = built(BlockLowRank(rank=1, blocks=8), 32, 48).to_dense().detach()
    assert torch.linalg.norm(fitted(BlockLowRank(rank=1, blocks=8), both).to_dense() - both) < 0.01 * both.norm()


def test_blast_gains_on_low_rank_and_holds_block_diagonal_matrices() -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 32, dtype=torch.float64)
    error = torch.linalg.norm(fitted(Blast(rank=6, blocks=4), weight).to_dense() - weight)
    assert error < 0.97 * np.linalg.norm(scipy.linalg.svdvals(weight)[6:])
    layer = built(Blast(rank=6, blocks=4), 32, 48)
    layer.mix.data = torch.eye(4, dtype=torch.float64)[..., None].expand(4, 4, 6)
    tiles = [up @ down for up, down in zip(layer.up, layer.down, strict=True)]
    torch.testing.assert_close(layer.to_dense(), torch.block_diag(*tiles))


def test_hadamard_and_fourier_like_matrices_are_butterflies() -> None:
    """Products of butterfly factors of any entries are found again, Hadamard matrices among them."""
    hadamard = torch.from_numpy(scipy.linalg.hadamard(16).astype(np.float64))
    torch.testing.assert_close(fitted(Butterfly(), hadamard).to_dense(), hadamard)
    torch.manual_seed(0)
    weight = built(Butterfly(), 32, 32).to_dense().detach()
    torch.testing.assert_close(fitted(Butterfly(), weight).to_dense(), weight)


def test_the_places_of_a_sparse_matrix_are_kept_and_checked() -> None:
    layer = built(SparseLowRank(rank=2, density=0.1))
    with torch.no_grad():
        layer.up.zero_()
    assert torch.equal(layer.to_dense().flatten().nonzero().flatten(), layer.places)
    state = layer.state_dict()
    other = built(SparseLowRank(rank=2, density=0.1))
    other.load_state_dict(state)
    assert torch.equal(other.to_dense(), layer.to_dense())
    with pytest.raises(RuntimeError, match="places must rise"):
        other.load_state_dict(state | {"places": state["places"].flip(0)})


def test_the_turns_of_sparse_low_rank_only_gain() -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 32, dtype=torch.float64)
    error = torch.linalg.norm(fitted(SparseLowRank(rank=4, density=0.2), weight).to_dense() - weight)
    assert error < 0.95 * np.linalg.norm(scipy.linalg.svdvals(weight)[4:])


def test_toeplitz_matrices_and_their_inverses_have_displacement_rank_two() -> None:
    rng = np.random.default_rng(0)
    toeplitz = scipy.linalg.toeplitz(rng.normal(size=12) + 8 * np.eye(12)[0], rng.normal(size=12))
    for matrix in (toeplitz, np.linalg.inv(toeplitz)):
        found = fitted(Toeplitz(rank=2), torch.from_numpy(matrix)).to_dense().detach()
        np.testing.assert_allclose(found.numpy(), matrix, atol=1e-10)


def test_every_matrix_is_toeplitz_like_at_full_rank() -> None:
    weight = torch.randn(20, 12, dtype=torch.float64)
    torch.testing.assert_close(fitted(Toeplitz(rank=20), weight).to_dense(), weight)


def test_a_layer_of_displacement_rank_one_is_scipy_s_product() -> None:
    layer = built(Toeplitz(rank=1), 7, 7)
    outer, inner = layer.outer.detach().numpy()[0], layer.inner.detach().numpy()[0]
    skew = scipy.linalg.toeplitz(inner, np.concatenate(([inner[0]], -inner[:0:-1])))
    expected = scipy.linalg.circulant(outer) @ skew
    np.testing.assert_allclose(layer.to_dense().detach().numpy(), expected, atol=1e-12)


def skewed_statistics(inputs: int, outputs: int) -> CalibrationStatistics:
    """Of data whose directions differ a thousandfold, so that a plain fit is a poor one."""
    torch.manual_seed(0)
    x = torch.randn(200, inputs, dtype=torch.float64) @ torch.diag(torch.logspace(0, -3, inputs).double())
    g = torch.randn(200, outputs, dtype=torch.float64) @ torch.diag(torch.logspace(0, -3, outputs).double())
    return CalibrationStatistics(x.T @ x / 200, g.T @ g / 200)


@pytest.mark.parametrize("config", [Blast(rank=4), BlockLowRank(rank=4), SparseLowRank(rank=4)], ids=lambda c: c.kind)
def test_what_holds_a_matrix_of_low_rank_is_never_worse_under_statistics(config) -> None:
    weight, statistics = torch.randn(48, 32, dtype=torch.float64), skewed_statistics(32, 48)
    best, mine = (part.build(32, 48, bias=False, dtype=torch.float64) for part in (LowRank(rank=4), config))
    best.fit_to_calibration_(linear_of(weight), statistics)
    mine.fit_to_calibration_(linear_of(weight), statistics, steps=3)
    errors = [statistics.error(weight - layer.to_dense().detach()).item() for layer in (mine, best)]
    assert errors[0] < errors[1]


def test_btt_is_exact_where_moments_say_nothing_between_sub_blocks() -> None:
    """Against descents from many starts, none of which comes below the closed form."""
    weight, statistics = torch.randn(48, 32, dtype=torch.float64), skewed_statistics(32, 48)
    at_inputs, at_outputs = (
        torch.arange(32) // 8,
        torch.arange(48) % 8,
    )  # the first index of inputs, the second of outputs
    inputs = statistics.input_moment * (at_inputs[:, None] == at_inputs)
    statistics = CalibrationStatistics(inputs, statistics.gradient_moment * (at_outputs[:, None] == at_outputs))
    layer = BTT(rank=2).build(32, 48, bias=False, dtype=torch.float64)
    with torch.no_grad():
        for name, value in layer.begin(weight, statistics).items():
            layer.get_parameter(name).copy_(value)
    closed = statistics.error(weight - layer.to_dense().detach()).item()
    for seed in range(3):
        torch.manual_seed(seed)
        other = BTT(rank=2).build(32, 48, bias=False, dtype=torch.float64)
        fit_by_lbfgs_(other, weight, statistics, 300)
        assert statistics.error(weight - other.to_dense().detach()).item() > closed * (1 - 1e-4)
