"""Low-rank products with an identity inside."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import relinear
from conftest import make_tiny_llama
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.functional.pivoted_low_rank import MAX_PIVOTED_ENTRY, pivoted_factors, pivoted_low_rank


@pytest.mark.parametrize("sizes", [(5, 12, 9), (12, 12, 20), (1, 4, 3), (40, 96, 40), (3, 3, 1)])
def test_the_product_stays_and_entries_are_bounded(sizes: tuple[int, int, int]) -> None:
    rank, inputs, outputs = sizes
    torch.manual_seed(0)
    down, up = torch.randn(rank, inputs).double(), torch.randn(outputs, rank).double()
    x = torch.randn(7, inputs).double()
    order, mix, left = pivoted_factors(down, up)
    assert sorted(order.tolist()) == list(range(inputs))
    assert mix.shape == (rank, inputs - rank)
    assert not mix.numel() or float(mix.abs().max()) <= MAX_PIVOTED_ENTRY
    assert torch.allclose(pivoted_low_rank(x, order, mix, left), x @ down.T @ up.T, atol=1e-10)


def test_factors_that_lack_rank_keep_their_product() -> None:
    torch.manual_seed(0)
    down = torch.randn(2, 10).double()
    down, up = torch.cat([down, down[:1]]), torch.randn(6, 3).double()
    x = torch.randn(4, 10).double()
    assert torch.allclose(pivoted_low_rank(x, *pivoted_factors(down, up)), x @ down.T @ up.T, atol=1e-10)


def test_the_same_map_as_low_rank_with_fewer_parameters_and_flops() -> None:
    torch.manual_seed(0)
    linear, a, g = torch.nn.Linear(30, 20), torch.randn(90, 30), torch.randn(90, 20)
    moments = CalibrationStatistics(a.T @ a / 90, g.T @ g / 90)
    x = torch.randn(5, 30)
    for rank in (1, 7, 20):
        plain = relinear.LowRank(rank=rank).convert(linear).fit_to_calibration_(linear, moments)
        pivoted = relinear.PivotedLowRank(rank=rank).convert(linear).fit_to_calibration_(linear, moments)
        assert torch.allclose(pivoted(x), plain(x), atol=1e-5)
        assert torch.allclose(pivoted.to_dense(), plain.to_dense(), atol=1e-5)
        sizes = [sum(p.numel() for p in m.parameters()) for m in (plain, pivoted)]
        assert sizes[0] - sizes[1] == rank**2
        assert plain.flops_per_token() - pivoted.flops_per_token() == 2 * rank**2
    assert torch.allclose(pivoted(x), linear(x), atol=1e-5)  # at full rank, and no larger than it
    assert sizes[1] == sum(p.numel() for p in linear.parameters())


def damaged(order: torch.Tensor) -> torch.Tensor:
    """An input twice, another one never: every index is in range."""
    order = order.clone()
    order[0] = order[1]
    return order


def test_an_order_that_is_no_permutation_is_refused_by_every_way_of_loading(tmp_path) -> None:
    model = make_tiny_llama()
    relinear.replace_(model, {"q_proj": relinear.PivotedLowRank(rank=4)})
    name = "model.layers.1.self_attn.q_proj"
    relinear.save_pretrained(model, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights[f"{name}.order"] = damaged(weights[f"{name}.order"])
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for load in (relinear.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=rf"weights of {name} are damaged: order must name each of the 32 inputs"):
            load(tmp_path)
    before = {key: value.clone() for key, value in model.get_submodule(name).state_dict().items()}
    with pytest.raises(RuntimeError, match=f"{name}: order must name each of the 32 inputs once"):
        model.load_state_dict(weights)
    assert all(torch.equal(value, before[key]) for key, value in model.get_submodule(name).state_dict().items())
