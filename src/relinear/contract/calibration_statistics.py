"""Second moments of a layer's inputs and output gradients: what a fit needs to know of the data."""

# Legend: I in_features, O out_features

from __future__ import annotations

import dataclasses
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class CalibrationStatistics:
    """Hold what a fit needs of the calibration data: the second moments of a layer's inputs and output gradients.

    A fit W' of a weight W minimises tr(G (W - W') A (W - W')^T), which is the mean squared error of the outputs in the
    metric G over inputs whose second moment is A.

    Args:
        inputs: A (I, I), the mean of x x^T over tokens; symmetric, may be singular.
        outputs: G (O, O), the mean of g g^T of the loss's gradients at the output, or its diagonal (O,), as of a
            vocabulary; None stands for the identity.
        tokens: how many were seen; None if that is not known.
        kinds: A (I, I) of each kind of text, if there are several.
    """

    inputs: Tensor
    outputs: Tensor | None = None
    tokens: int | None = None
    kinds: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        for name, moment in (("inputs", self.inputs), ("outputs", self.outputs)):
            if moment is None:
                continue
            is_diagonal = moment is self.outputs and moment.ndim == 1
            if not is_diagonal and (moment.ndim != 2 or moment.shape[0] != moment.shape[1]):
                raise ValueError(f"moments of {name} must be a square matrix, got shape {tuple(moment.shape)}")
            if not bool(torch.isfinite(moment).all()):
                raise ValueError(f"moments of {name} hold values that are not finite; calibrate in another dtype")

    @classmethod
    def identity(cls, in_features: int, tokens: int | None = None) -> CalibrationStatistics:
        """Return statistics of white inputs, under which a fit minimises the Frobenius norm."""
        return cls(torch.eye(in_features, dtype=torch.float64), None, tokens)

    def check(self, in_features: int, out_features: int) -> None:
        """Raise ValueError unless these are the statistics of a layer of this size."""
        measured = self.inputs.shape[0], out_features if self.outputs is None else self.outputs.shape[0]
        if measured != (in_features, out_features):
            raise ValueError(f"statistics of sizes {measured} do not fit a layer of sizes {in_features, out_features}")

    def weighted(self, difference: Tensor) -> Tensor:
        """Return G D A of a difference D (O, I)."""
        weighted = difference @ self.inputs.to(difference)
        if self.outputs is None:
            return weighted
        outputs = self.outputs.to(difference)
        return outputs[:, None] * weighted if outputs.ndim == 1 else outputs @ weighted

    def error(self, difference: Tensor) -> Tensor:
        """Return tr(G D A D^T), a scalar, of a difference D = W - W' (O, I)."""
        return (self.weighted(difference) * difference).sum()


def descend_(operator: Any, weight: Tensor, statistics: CalibrationStatistics, steps: int) -> None:
    """Lower the error of ``operator``'s matrix against ``weight`` (O, I), in the precision of ``statistics``."""
    wide = deepcopy(operator).to(statistics.inputs.dtype).train()
    bias = wide.bias
    parameters = [p.requires_grad_(True) for p in wide.parameters() if p is not bias]
    weight = weight.detach().to(statistics.inputs)
    scale = float(statistics.error(weight)) or 1.0
    optimizer = torch.optim.LBFGS(parameters, max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        dense = wide.to_dense()
        with torch.no_grad():  # G D A is also the gradient, for which autograd would repeat the products
            difference = dense - weight
            weighted = statistics.weighted(difference) / scale
        dense.backward(2 * weighted)
        return (weighted * difference).sum()

    with torch.enable_grad():
        initial_error = float(optimizer.step(closure))
    with torch.no_grad():
        if float(statistics.error(weight - wide.to_dense())) / scale <= initial_error:  # NaN counts as worse
            for parameter, fitted in zip(operator.parameters(), wide.parameters(), strict=True):
                parameter.copy_(fitted)
