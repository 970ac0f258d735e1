"""A sparse matrix on random places beside one of low rank (SLTrain: Han et al. 2024, arXiv 2406.02214).

W = U V + S with S nonzero on a given share of the places. As the authors do, the matrix is made anew in every pass and
multiplied as a whole: what is saved is memory for weights, gradients and the optimiser, not time. Fitted by turns.
"""

# Legend: I in_features, O out_features, R rank, N places of the sparse matrix

from __future__ import annotations

import torch
from torch import Tensor

from relinear import register
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear_examples.structured import RankedConfig, StructuredLinear, low_rank_under, with_low_rank

__all__ = ["SparseLowRank", "SparseLowRankLinear"]


class SparseLowRankLinear(StructuredLinear):
    """y = (U V + S) x + bias.

    Parameters ``down`` V (R, I), ``up`` U (O, R), ``values`` of S (N,); the table ``places`` (N,) holds where these are
    in the flattened matrix.
    """

    finite_fan_in = ("up",)
    finite_fan_out = ("down",)

    def tensors(self):
        rank, inputs, outputs = self.config.rank, self.in_features, self.out_features
        half = 0.5**0.5  # of the variance comes from either
        return {
            "down": ((rank, inputs), inputs**-0.5),
            "up": ((outputs, rank), half * rank**-0.5),
            "values": (self.tables()["places"], half * (self.config.density * inputs) ** -0.5),
        }

    def tables(self):
        return {"places": max(1, round(self.config.density * self.in_features * self.out_features))}

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if not self.places.is_meta:
            drawn = torch.randperm(self.in_features * self.out_features, device=self.places.device)
            self.places.copy_(drawn[: len(self.places)].sort().values)

    def product(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.to_dense())

    def to_dense(self) -> Tensor:
        dense = self.up @ self.down
        return dense.flatten().index_add(0, self.places, self.values.to(dense.dtype)).view_as(dense)

    def fit(self, weight: Tensor) -> dict[str, Tensor]:
        def sparse(matrix: Tensor) -> Tensor:
            kept = torch.zeros_like(matrix).flatten()
            return kept.index_copy(0, self.places, matrix.flatten()[self.places]).view_as(matrix)

        rest, down, up = with_low_rank(weight, self.config.rank, sparse)
        return {"down": down, "up": up, "values": rest.flatten()[self.places]}

    def problem_with_values(self, values):
        """Say what is wrong with a table of places that is loaded."""
        places = values.get("places")
        if not isinstance(places, Tensor) or places.is_meta or places.shape != self.places.shape:
            return None
        rising = bool((places[1:] > places[:-1]).all())
        if rising and places[0] >= 0 and places[-1] < self.in_features * self.out_features:
            return None
        return f"places must rise from 0 to below {self.in_features * self.out_features:,}, and do not"

    def begin(self, weight: Tensor, statistics: CalibrationStatistics) -> dict[str, Tensor]:
        """The best matrix of low rank alone: the descent can only gain on it."""
        down, up = low_rank_under(weight, self.config.rank, statistics)
        return {"down": down, "up": up, "values": torch.zeros_like(self.values)}

    def flops_per_token(self) -> int:
        """Those of the whole matrix; making it is once a pass, whatever the number of tokens."""
        return 2 * self.in_features * self.out_features


@register
class SparseLowRank(RankedConfig):
    """A matrix of low rank plus a sparse one on fixed random places. R (I + O) + density I O parameters.

    Args:
        rank: R of the first; at most min(in_features, out_features).
        density: the share of places that the second fills, above 0 and at most 1.
    """

    kind = "sparse_low_rank"
    module_class = SparseLowRankLinear

    density: float = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.density, bool) or not isinstance(self.density, int | float) or not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {self.density!r}")

    def full_rank(self, in_features: int, out_features: int) -> int:
        return min(in_features, out_features)
