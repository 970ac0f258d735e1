"""relinear: replace, modulate and compose the linear layers of Transformers.

This package exports what most programs need. The rest is in its subpackages: ``relinear.residual``, ``.activations``,
``.surgery``, ``.models``, ``.data``, ``.training``, ``.distill``, ``.compression``, ``.evaluate``, ``.analysis``,
``.explore``, ``.compare``, ``.bench``; for authors of operators ``.contract``, ``.functional``, ``.clifford`` and
``.testing``. Names imported as ``import name as name`` are public. Importing the package registers kinds of operators
and attachments, and registers models and the loader of checkpoints with transformers.
"""

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import Any as _Any

import relinear.registration as _registration  # noqa: F401  # first: registers what is looked up by name
from relinear import activations as activations
from relinear import analysis as analysis
from relinear import clifford as clifford
from relinear import contract as contract
from relinear import data as data
from relinear import evaluate as evaluate
from relinear import residual as residual
from relinear.analysis.causality import check_causality as check_causality
from relinear.compression import compress as compress
from relinear.contract.config import register as register
from relinear.contract.inference import for_inference_ as for_inference_
from relinear.contract.operator import Operator as Operator
from relinear.contract.operator import OperatorConfig as OperatorConfig
from relinear.contract.plugins import import_from_environment as _import_named
from relinear.deprecated import MOVED as _MOVED
from relinear.deprecated import find_moved_modules as _find_moved_modules
from relinear.deprecated import moved as _moved
from relinear.distill import distill_ as distill_
from relinear.evaluate import perplexity as perplexity
from relinear.models import from_preset as from_preset
from relinear.models.cgt import CGTConfig as CGTConfig
from relinear.models.cgt import CGTForCausalLM as CGTForCausalLM
from relinear.models.cgt import CGTForRegression as CGTForRegression
from relinear.models.cgt.specialize import specialize as specialize
from relinear.operators import CCL as CCL
from relinear.operators import HDPL as HDPL
from relinear.operators import BlockHadamard as BlockHadamard
from relinear.operators import ContextManager as ContextManager
from relinear.operators import LowRank as LowRank
from relinear.operators import Monarch as Monarch
from relinear.operators import OutputGate as OutputGate
from relinear.operators import PathTransponder as PathTransponder
from relinear.operators import PivotedLowRank as PivotedLowRank
from relinear.operators import Quantized as Quantized
from relinear.operators import Rotor as Rotor
from relinear.operators import Transponder as Transponder
from relinear.surgery.checkpoint import from_pretrained as from_pretrained
from relinear.surgery.checkpoint import save_pretrained as save_pretrained
from relinear.surgery.fold import fold_ as fold_
from relinear.surgery.plan import attach_ as attach_
from relinear.surgery.plan import plan as plan
from relinear.surgery.plan import replace_ as replace_
from relinear.surgery.saved_config import SavedConfig as SavedConfig
from relinear.surgery.summary import summary as summary
from relinear.system.version import __version__ as __version__
from relinear.training.fitting import fit as fit
from relinear.training.run import train as train

__all__ = [name for name, value in list(globals().items()) if name[0] != "_" and not isinstance(value, _ModuleType)]
__all__ += ["__version__", "activations", "analysis", "clifford", "contract", "data", "evaluate", "residual"]

_find_moved_modules()
_import_named()


def __getattr__(name: str) -> _Any:
    """Return a submodule, such as ``relinear.bench``, that is not imported yet, or a name that has moved."""
    if name in _MOVED:
        return _moved(name)
    try:
        if not name.startswith("_"):
            return _import_module(f"relinear.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"relinear.{name}":
            raise
    raise AttributeError(f"module 'relinear' has no attribute {name!r}")
