"""The operators. Importing a file here registers its kind; ``relinear`` exports every config by its name."""

from relinear.operators.block_hadamard import BlockHadamard
from relinear.operators.ccl import CCL
from relinear.operators.context_manager import ContextManager
from relinear.operators.hdpl import HDPL
from relinear.operators.low_rank import LowRank
from relinear.operators.monarch import Monarch
from relinear.operators.output_gate import OutputGate
from relinear.operators.path_transponder import PathTransponder
from relinear.operators.pivoted_low_rank import PivotedLowRank
from relinear.operators.quantized import Quantized
from relinear.operators.rotor import Rotor
from relinear.operators.transponder import Transponder

__all__ = [
    "CCL",
    "HDPL",
    "BlockHadamard",
    "ContextManager",
    "LowRank",
    "Monarch",
    "OutputGate",
    "PathTransponder",
    "PivotedLowRank",
    "Quantized",
    "Rotor",
    "Transponder",
]
