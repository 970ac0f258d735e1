"""Calibration statistics of a layer: the second moments of its inputs and of its output gradients."""

# Legend: I in_features, O out_features

from __future__ import annotations

import dataclasses
from copy import deepcopy
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from relinear.contract.config import check_value
from relinear.deprecated import with_attributes_of_0_2
from relinear.settings.messages import quoted


@with_attributes_of_0_2
@dataclasses.dataclass(frozen=True, eq=False)
class CalibrationStatistics:
    """The second moments of a layer's inputs and output gradients on the calibration data.

    A fit W' of a weight W minimises tr(G (W - W') A (W - W')^T), which is the mean squared error of the outputs in the
    metric G over inputs whose second moment is A.

    Attributes:
        input_moment: A (I, I), the mean of x x^T over tokens; symmetric, may be singular.
        gradient_moment: G (O, O), the mean of g g^T over the loss's gradients g at the output, or its diagonal (O,);
            None is I.
        tokens: number of calibration tokens, 0 for an expert that saw none; None if unknown.
        input_moments_by_text: A (I, I) of each kind of calibration text, if there are several.
    """

    input_moment: Tensor
    gradient_moment: Tensor | None = None
    tokens: int | None = None
    input_moments_by_text: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        for name in ("input_moment", "gradient_moment"):
            moment = getattr(self, name)
            if moment is None and name == "gradient_moment":
                continue
            if not isinstance(moment, Tensor):
                raise ValueError(f"statistics: {name} must be a tensor, got {quoted(moment)}")
            is_diagonal = name == "gradient_moment" and moment.ndim == 1
            if not is_diagonal and (moment.ndim != 2 or moment.shape[0] != moment.shape[1]):
                raise ValueError(f"statistics: {name} must be a square matrix, got shape {tuple(moment.shape)}")
            if moment.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"statistics: {name} must be in float32 or float64, got {moment.dtype}")
            if not bool(torch.isfinite(moment).all()):
                raise ValueError(f"statistics: {name} has NaN or infinite values; calibrate in another dtype")
        check_value("statistics: tokens", self.tokens, Annotated[int, Field(ge=0)] | None)
        if any(getattr(moment, "shape", None) != self.input_moment.shape for moment in self.input_moments_by_text):
            raise ValueError("statistics: input_moments_by_text must be tensors of the shape of input_moment")

    @classmethod
    def identity(cls, in_features: int, tokens: int | None = None) -> CalibrationStatistics:
        """Return the statistics of white inputs, for which a fit minimises the Frobenius norm."""
        return cls(torch.eye(in_features, dtype=torch.float64), None, tokens)

    def check(self, in_features: int, out_features: int) -> None:
        """Raise ValueError unless the statistics have a layer's sizes."""
        gradients = self.gradient_moment
        sizes = self.input_moment.shape[0], out_features if gradients is None else gradients.shape[0]
        if sizes != (in_features, out_features):
            raise ValueError(f"statistics of sizes {sizes} do not fit a layer of sizes {in_features, out_features}")

    def weighted(self, difference: Tensor) -> Tensor:
        """Return G D A for a difference D (O, I): half the gradient of ``error``."""
        weighted = difference @ self.input_moment.to(difference)
        if self.gradient_moment is None:
            return weighted
        gradients = self.gradient_moment.to(difference)
        return gradients[:, None] * weighted if gradients.ndim == 1 else gradients @ weighted

    def error(self, difference: Tensor) -> Tensor:
        """Return the scalar tr(G D A D^T) for a difference D = W - W' (O, I)."""
        return (self.weighted(difference) * difference).sum()


def fit_by_lbfgs_(operator: Any, weight: Tensor, statistics: CalibrationStatistics, steps: int) -> None:
    """Fit ``operator``'s dense matrix to ``weight`` (O, I) by L-BFGS, in the precision of ``statistics``.

    The parameters stay if the error rises or is NaN.
    """
    high_precision = deepcopy(operator).to(statistics.input_moment).train()
    bias = high_precision.bias
    parameters = [p.requires_grad_(True) for p in high_precision.parameters() if p is not bias]
    weight = weight.detach().to(statistics.input_moment)
    scale = float(statistics.error(weight)) or 1.0
    optimizer = torch.optim.LBFGS(parameters, max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        dense = high_precision.to_dense()
        with torch.no_grad():  # G D A gives the error and the gradient; autograd would compute it again
            difference = dense - weight
            weighted = statistics.weighted(difference) / scale
        dense.backward(2 * weighted)
        return (weighted * difference).sum()

    with torch.enable_grad():
        initial_error = float(optimizer.step(closure))
    with torch.no_grad():
        if float(statistics.error(weight - high_precision.to_dense())) / scale <= initial_error:  # NaN counts as worse
            for parameter, fitted in zip(operator.parameters(), high_precision.parameters(), strict=True):
                parameter.copy_(fitted)
