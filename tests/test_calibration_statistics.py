"""Fits of a weight under second statistics: the exact low-rank one, descent for the rest, and what can go wrong."""

import copy

import pytest
import torch
from torch import nn

import relinear
from relinear.contract.calibration_statistics import CalibrationStatistics

IN, OUT = 24, 16


def moment(size: int, rank: int, seed: int) -> torch.Tensor:
    rows = torch.randn(rank, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rows.T @ rows / rank


def linear(inputs: int, outputs: int, dtype=torch.float64) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, dtype=dtype)


def by_definition(weight: torch.Tensor, statistics: CalibrationStatistics, rank: int) -> torch.Tensor:
    """G^(-1/2) [G^(1/2) W A^(1/2)]_R A^(-1/2) with both roots taken, for moments that can be inverted."""

    def root(m: torch.Tensor, power: float) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(m)
        return (vectors * values**power) @ vectors.T

    a, g = statistics.input_moment, statistics.gradient_moment
    u, s, v = torch.linalg.svd(root(g, 0.5) @ weight @ root(a, 0.5))
    return root(g, -0.5) @ (u[:, :rank] * s[:rank]) @ v[:rank] @ root(a, -0.5)


@pytest.mark.parametrize(("inputs", "outputs"), [(IN, OUT), (OUT, IN)])
def test_low_rank_solution_is_the_textbook_one(inputs: int, outputs: int) -> None:
    source = linear(inputs, outputs)
    statistics = CalibrationStatistics(moment(inputs, 200, 1), moment(outputs, 200, 2))
    for rank in (1, 5, min(inputs, outputs)):
        fitted = (
            relinear.LowRank(rank=rank)
            .build(inputs, outputs, dtype=torch.float64)
            .fit_to_calibration_(source, statistics)
        )
        expected = by_definition(source.weight.detach(), statistics, rank)
        # the small ridge keeps the two a little apart
        assert torch.allclose(fitted.to_dense(), expected, rtol=1e-4, atol=1e-4)
        best, got = (float(statistics.error(source.weight - w)) for w in (expected, fitted.to_dense()))
        assert got <= best * (1 + 1e-4) + 1e-6
        assert torch.equal(fitted.bias, source.bias)


@pytest.mark.parametrize(("inputs", "outputs"), [(IN, OUT), (OUT, IN)])
def test_energies_are_the_errors_of_every_rank(inputs: int, outputs: int) -> None:
    from relinear.functional.low_rank import weighted_spectrum

    weight, statistics = (
        linear(inputs, outputs).weight.detach(),
        CalibrationStatistics(moment(inputs, 99, 1), moment(outputs, 99, 2)),
    )
    spectrum = weighted_spectrum(weight, statistics.input_moment, statistics.gradient_moment, ridge=0)
    for rank in (1, 4, 9):
        down, up = spectrum.factors(weight, rank)
        assert float(statistics.error(weight - up @ down)) == pytest.approx(
            float(spectrum.energies[rank:].sum()), rel=1e-9
        )


@pytest.mark.parametrize("singular", ["inputs", "outputs", "both", "zero"])
@pytest.mark.parametrize(("inputs", "outputs"), [(IN, OUT), (OUT, IN)])
def test_singular_moments_give_finite_fits(singular: str, inputs: int, outputs: int) -> None:
    a = moment(inputs, 3 if singular in ("inputs", "both") else 99, 1)
    g = moment(outputs, 2 if singular in ("outputs", "both") else 99, 2)
    statistics = CalibrationStatistics(a * (singular != "zero"), g * (singular != "zero"))
    source = linear(inputs, outputs)
    fitted = relinear.LowRank(rank=3).build(inputs, outputs, dtype=torch.float64)
    fitted.fit_to_calibration_(source, statistics)
    assert bool(torch.isfinite(fitted.to_dense()).all())
    if singular in ("inputs", "both"):  # inputs of rank 3 are reproduced by a fit of rank 3
        assert float(statistics.error(source.weight - fitted.to_dense())) < 1e-3 * float(
            statistics.error(source.weight)
        )


def test_identity_moments_give_the_plain_fit() -> None:
    source = linear(IN, OUT)
    config = relinear.LowRank(rank=4)
    plain = config.build(IN, OUT, dtype=torch.float64).fit_to_linear_(source)
    fitted = config.build(IN, OUT, dtype=torch.float64).fit_to_calibration_(source, CalibrationStatistics.identity(IN))
    assert torch.allclose(fitted.to_dense(), plain.to_dense(), atol=1e-9)


@pytest.mark.parametrize(
    "config",
    [
        relinear.Monarch(blocks=4),
        relinear.BlockHadamard(blocks=4),
        relinear.Rotor(width=4, depth=0),
        relinear.LowRank(rank=3),
    ],
    ids=lambda c: c.kind,
)
def test_every_dense_operator_fits_better_under_the_moments_it_is_judged_by(config) -> None:
    source = linear(16, 16, torch.float32)
    statistics = CalibrationStatistics(moment(16, 40, 1) + 20 * moment(16, 1, 3), moment(16, 40, 2))
    torch.manual_seed(1)
    fitted = config.build(16, 16)
    plain = copy.deepcopy(fitted)
    if config.fits_weight:
        plain.fit_to_linear_(source)
    fitted.fit_to_calibration_(source, statistics)
    error = {
        name: float(statistics.error((source.weight - m.to_dense()).double()))
        for name, m in (("plain", plain), ("fitted", fitted))
    }
    assert error["fitted"] < 0.9 * error["plain"]
    assert torch.equal(fitted.bias, source.bias)


def test_a_wrappers_bias_is_the_layers() -> None:
    source = linear(16, 12, torch.float32)
    source.bias.data.mul_(30)
    statistics = CalibrationStatistics(moment(16, 40, 1).float())
    fitted = relinear.Transponder(contextual=False, base=relinear.LowRank(rank=4)).build(16, 12)
    fitted.fit_to_calibration_(source, statistics)
    alone = relinear.LowRank(rank=4).build(16, 12).fit_to_calibration_(source, statistics)
    torch.testing.assert_close(fitted.dense_bias(), source.bias)
    torch.testing.assert_close(fitted.to_dense(), alone.to_dense(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [(12, 16), (16, 12)])
def test_a_diagonal_gradient_moment_is_that_of_its_matrix(sizes) -> None:
    source, diagonal = linear(*sizes, torch.float32), torch.rand(sizes[1]) + 0.1
    for config in (relinear.LowRank(rank=4), relinear.PivotedLowRank(rank=4), relinear.Monarch(blocks=4)):
        fits = []
        for gradients in (diagonal, diagonal.diag()):
            torch.manual_seed(0)
            statistics = CalibrationStatistics(torch.eye(sizes[0]), gradients)
            fits.append(config.build(*sizes).fit_to_calibration_(source, statistics).to_dense())
        torch.testing.assert_close(*fits, rtol=1e-3, atol=1e-4)


def test_a_wrapper_checks_before_it_changes() -> None:
    wrapper = relinear.Transponder(base=relinear.LowRank(rank=4)).build(16, 16)
    before = copy.deepcopy(wrapper.state_dict())
    wrong = (None, 1), (CalibrationStatistics.identity(16), 0), (CalibrationStatistics.identity(8), 5)
    for statistics, steps in wrong:
        with pytest.raises(ValueError):
            wrapper.fit_to_calibration_(nn.Linear(16, 16), statistics, steps=steps)
    assert all(torch.equal(value, before[name]) for name, value in wrapper.state_dict().items())


def test_refusals() -> None:
    for dtype in (torch.float16, torch.int64):
        with pytest.raises(ValueError, match="float32 or float64"):
            CalibrationStatistics(torch.eye(3, dtype=dtype))
    with pytest.raises(ValueError, match="tokens must be a whole number"):
        CalibrationStatistics(torch.eye(3), tokens="many")  # type: ignore[arg-type]
    assert CalibrationStatistics.identity(3) != CalibrationStatistics.identity(3)
    hdpl = relinear.HDPL(rank=4, blocks=2).build(16, 16)
    before = copy.deepcopy(hdpl.state_dict())
    with pytest.raises(relinear.contract.NotLinearError, match="no dense matrix"):
        hdpl.fit_to_calibration_(nn.Linear(16, 16), CalibrationStatistics.identity(16))
    assert all(torch.equal(value, before[name]) for name, value in hdpl.state_dict().items())
    with pytest.raises(relinear.contract.NotLinearError, match="context of each token"):
        relinear.CCL(rank=4, context_dim=4, norm=False).build(16, 16).fit_to_calibration_(
            nn.Linear(16, 16), CalibrationStatistics.identity(16)
        )
    with pytest.raises(ValueError, match="steps must be at least 1"):
        relinear.LowRank(rank=2).build(16, 16).fit_to_calibration_(
            nn.Linear(16, 16), CalibrationStatistics.identity(16), steps=0
        )
    with pytest.raises(ValueError, match=r"sizes \(24, 16\) do not fit a layer of sizes \(16, 16\)"):
        relinear.LowRank(rank=2).build(16, 16).fit_to_calibration_(
            nn.Linear(16, 16), CalibrationStatistics(moment(24, 9, 0))
        )
    with pytest.raises(ValueError, match="square matrix"):
        CalibrationStatistics(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="NaN or infinite"):
        CalibrationStatistics(torch.full((2, 2), float("nan")))
    for given in ((None,), ([[1.0]],), (torch.eye(2), [1.0])):
        with pytest.raises(ValueError, match="moment must be a tensor"):
            CalibrationStatistics(*given)
    with pytest.raises(relinear.contract.operator.NotLinearError):
        relinear.HDPL(rank=4, blocks=2).build(16, 16).fit_to_calibration_(
            nn.Linear(16, 16), CalibrationStatistics.identity(16)
        )
