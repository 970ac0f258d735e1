"""Every operator; importing a file here registers its kind."""

from relinear.operators.block_hadamard import BlockHadamard
from relinear.operators.low_rank import LowRank
from relinear.operators.monarch import Monarch

__all__ = ["BlockHadamard", "LowRank", "Monarch"]
