"""relinear: replace, modulate and compose the linear layers of Transformers.

Everything a user needs is an attribute of this package; a name is public by the form ``import name as name``. Importing
it makes kinds known by their names, and models and the loader of checkpoints known to transformers.
"""

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import Any as _Any

import relinear.registration as _registration  # noqa: F401  # first: what is looked up by name
from relinear import clifford as clifford
from relinear.analysis.causality import check_causality as check_causality
from relinear.compress import CompressSettings as CompressSettings
from relinear.compress import compress as compress
from relinear.core.attachment import AttachmentConfig as AttachmentConfig
from relinear.core.aux import aux_losses as aux_losses
from relinear.core.config import register as register
from relinear.core.context import context as context
from relinear.core.inference import for_inference_ as for_inference_
from relinear.core.latents import Add as Add
from relinear.core.latents import Clamp as Clamp
from relinear.core.latents import Inject as Inject
from relinear.core.latents import Replace as Replace
from relinear.core.latents import intervene as intervene
from relinear.core.latents import latents as latents
from relinear.core.latents import moment_alignment as moment_alignment
from relinear.core.objective import ObjectiveConfig as ObjectiveConfig
from relinear.core.operator import NotLinearError as NotLinearError
from relinear.core.operator import Operator as Operator
from relinear.core.operator import OperatorConfig as OperatorConfig
from relinear.core.plugins import import_named as _import_named
from relinear.data import prepare_data as prepare_data
from relinear.distill import DistillSettings as DistillSettings
from relinear.distill import distill_ as distill_
from relinear.evaluate import lambada as lambada
from relinear.evaluate import lm_eval as lm_eval
from relinear.evaluate import perplexity as perplexity
from relinear.models import from_preset as from_preset
from relinear.models import preset_names as preset_names
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
from relinear.residual import DeepNorm as DeepNorm
from relinear.residual import LaurelLR as LaurelLR
from relinear.residual import LaurelPA as LaurelPA
from relinear.residual import LaurelRW as LaurelRW
from relinear.residual import LayerNormScaling as LayerNormScaling
from relinear.residual import PostLN as PostLN
from relinear.residual import ReZero as ReZero
from relinear.residual import SDPAGate as SDPAGate
from relinear.residual import SecondEmbedding as SecondEmbedding
from relinear.residual import residual_ as residual_
from relinear.residual import residual_methods as residual_methods
from relinear.surgery.checkpoint import from_pretrained as from_pretrained
from relinear.surgery.checkpoint import save_pretrained as save_pretrained
from relinear.surgery.fold import fold_ as fold_
from relinear.surgery.freeze import train_only_ as train_only_
from relinear.surgery.lora import lora_on_operators_ as lora_on_operators_
from relinear.surgery.placement import placement as placement
from relinear.surgery.placement import placement_names as placement_names
from relinear.surgery.plan import attach_ as attach_
from relinear.surgery.plan import plan as plan
from relinear.surgery.plan import replace_ as replace_
from relinear.surgery.saved_config import SavedConfig as SavedConfig
from relinear.surgery.summary import summary as summary
from relinear.system.allocator import tune_allocator as tune_allocator
from relinear.system.version import __version__ as __version__
from relinear.train.callbacks import LatentMoments as LatentMoments
from relinear.train.callbacks import read_moments as read_moments
from relinear.train.fit import fit as fit

#: what is imported above, of the rooms the algebra alone
__all__ = [name for name, value in list(globals().items()) if name[0] != "_" and not isinstance(value, _ModuleType)]
__all__ += ["__version__", "clifford"]

_import_named()


def __getattr__(name: str) -> _Any:
    """``relinear.bench`` after ``import relinear`` alone."""
    try:
        if not name.startswith("_"):
            return _import_module(f"relinear.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"relinear.{name}":
            raise
    raise AttributeError(f"module 'relinear' has no attribute {name!r}")
