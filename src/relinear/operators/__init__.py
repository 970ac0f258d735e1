"""Every operator; importing a file here registers its kind."""

from relinear.operators.low_rank import LowRank

__all__ = ["LowRank"]
