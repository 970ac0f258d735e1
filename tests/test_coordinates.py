"""Activations against width: the check tells a parametrisation whose activations grow from one that keeps them."""

import pytest
import torch

from relinear.testing import Coordinates, check_coordinates
from relinear.training import TrainSettings, build_model
from relinear.training.optim import build_optimizer


def maker(parametrization, **changes):
    def make_model(width, seed):
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": width // 16}
        settings = TrainSettings.load(
            {
                "model": "tiny",
                "model_overrides": sizes | {"num_hidden_layers": 1, "num_key_value_heads": width // 16},
                "learning_rate": 1e-2,
                "parametrization": parametrization,
                "parametrization_base_width": 32,
                "seed": seed,
            }
            | changes
        )
        model = build_model(settings)
        return model, build_optimizer(model, settings)

    return make_model


IDS = torch.randint(258, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("operator", [None, {"kind": "block_hadamard", "blocks": 4}], ids=["dense", "blocks"])
def test_growth_is_that_of_the_standard_alone(operator):
    standard, mup = (
        check_coordinates(maker(name, operators={"all-linear": operator}), [32, 128], IDS, steps=4, seeds=[0])
        for name in ("standard", "mup")
    )
    for kind, found in mup.items():
        assert standard[kind].scale[0] == found.scale[0], "the base width is the standard"
        assert [len(steps) for steps in found.scale] == [5, 5]
        assert found.change[0][0] == 0
        values = [steps[-1] for steps in found.scale]
        assert found.ratio == pytest.approx(max(values) / min(values))
        assert found.ratio < 2
    assert standard["logits"].ratio > 1.5 * mup["logits"].ratio
    assert max(found.ratio for found in standard.values()) > 2


def test_what_diverges_has_no_spread():
    found = check_coordinates(maker("mup", learning_rate=1e30), [32, 64], IDS, steps=2, seeds=[0])
    assert found["logits"].ratio is None
    assert Coordinates([[1.0, 2.0], [1.0, 5.0]], []).ratio == 2.5


def test_one_width_tells_nothing():
    with pytest.raises(ValueError, match="at least two widths"):
        check_coordinates(maker("mup"), [32, 32], IDS)
