"""Every operator; importing a file here registers its kind."""

from relinear.operators.block_hadamard import BlockHadamard
from relinear.operators.low_rank import LowRank
from relinear.operators.monarch import Monarch
from relinear.operators.output_gate import OutputGate
from relinear.operators.path_transponder import PathTransponder
from relinear.operators.transponder import Transponder

__all__ = ["BlockHadamard", "LowRank", "Monarch", "OutputGate", "PathTransponder", "Transponder"]
