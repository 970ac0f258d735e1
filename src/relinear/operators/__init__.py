"""Every operator; importing a file here registers its kind."""

from relinear.operators.low_rank import LowRank
from relinear.operators.output_gate import OutputGate
from relinear.operators.path_transponder import PathTransponder
from relinear.operators.transponder import Transponder

__all__ = ["LowRank", "OutputGate", "PathTransponder", "Transponder"]
