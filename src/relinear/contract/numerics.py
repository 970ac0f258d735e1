"""Bound rounding errors, and refuse NaN, in what a model computes."""

from typing import Any

import torch
from torch import Tensor, nn

from relinear.contract.input_checks import check_finite


def largest_epsilon(model: nn.Module) -> float:
    """Return the machine epsilon of the parameters of ``model``, the largest if dtypes differ: 2^-23 in float32."""
    return max(torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point())


def rounding_bound(model: nn.Module, values: Tensor) -> float:
    """Return by how much ``values`` of two runs of ``model`` may differ through rounding alone.

    This is the square root of the machine epsilon times the largest value: errors grow with depth, and the dtype of
    ``values`` may be wider than that of the layers.
    """
    return float(largest_epsilon(model) ** 0.5 * values.abs().max())


def check_no_nan(model: Any, values: Tensor, caller: str) -> None:
    """Raise ValueError if ``values``, computed by ``model``, contain NaN; names a weight that is not finite, if any."""
    if bool(values.isnan().any()):
        check_finite(model)
        raise ValueError(
            f"{caller}: {type(model).__name__} gives NaN though its weights are finite: compute in float32 or bfloat16"
        )
