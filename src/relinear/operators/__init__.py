"""The operators. Importing a file here registers its kind; ``relinear`` exports every config by its name."""

from relinear.operators.block_hadamard import BlockHadamard as BlockHadamard
from relinear.operators.ccl import CCL as CCL
from relinear.operators.context_manager import ContextManager as ContextManager
from relinear.operators.hdpl import HDPL as HDPL
from relinear.operators.low_rank import LowRank as LowRank
from relinear.operators.monarch import Monarch as Monarch
from relinear.operators.output_gate import OutputGate as OutputGate
from relinear.operators.path_transponder import PathTransponder as PathTransponder
from relinear.operators.pivoted_low_rank import PivotedLowRank as PivotedLowRank
from relinear.operators.quantized import Quantized as Quantized
from relinear.operators.rotor import Rotor as Rotor
from relinear.operators.transponder import Transponder as Transponder

__all__ = sorted(
    name for name, value in globals().items() if isinstance(value, type) and value.__module__.startswith(__name__)
)
