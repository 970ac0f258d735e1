"""relinear: replace, modulate and compose the linear layers of Transformers.

Everything a user needs is an attribute of this package. Heavy rooms are imported on first use, so that
``import relinear`` stays light.
"""

from importlib import import_module
from typing import Any

from relinear import operators as _operators
from relinear import residual as _residual
from relinear.models import cgt_config as _cgt_config  # noqa: F401  registers the configuration with transformers
from relinear.models import head_bias as _head_bias  # noqa: F401  registers its kind, for checkpoints that name it
from relinear.surgery import checkpoint as _checkpoint  # noqa: F401  registers the loader with transformers

__version__ = "0.1.0"

# Public name -> the module that has it, imported on first use. One line a name, sorted by module.
_LAZY = {
    "check_causality": "relinear.analysis.causality",
    "clifford": "relinear.clifford",
    "from_preset": "relinear.models",
    "preset_names": "relinear.models",
    "CGTForCausalLM": "relinear.models.cgt",
    "CGTForRegression": "relinear.models.cgt",
    "CGTConfig": "relinear.models.cgt_config",
    "specialize": "relinear.models.specialize",
    "aux_losses": "relinear.core.aux",
    "context": "relinear.core.context",
    "for_inference_": "relinear.core.inference",
    "Add": "relinear.core.latents",
    "Clamp": "relinear.core.latents",
    "Inject": "relinear.core.latents",
    "Replace": "relinear.core.latents",
    "intervene": "relinear.core.latents",
    "latents": "relinear.core.latents",
    "moment_alignment": "relinear.core.latents",
    "from_pretrained": "relinear.surgery.checkpoint",
    "save_pretrained": "relinear.surgery.checkpoint",
    "compress": "relinear.compress",
    "CompressSettings": "relinear.compress",
    "distill_": "relinear.distill",
    "DistillSettings": "relinear.distill",
    "fold_": "relinear.surgery.fold",
    "train_only_": "relinear.surgery.freeze",
    "placement": "relinear.surgery.placement",
    "placement_names": "relinear.surgery.placement",
    "attach_": "relinear.surgery.plan",
    "plan": "relinear.surgery.plan",
    "replace_": "relinear.surgery.plan",
    "summary": "relinear.surgery.summary",
    "lambada": "relinear.evaluate",
    "lm_eval": "relinear.evaluate",
    "perplexity": "relinear.evaluate",
    "LatentMoments": "relinear.train.latents",
    "read_moments": "relinear.train.latents",
    "tune_allocator": "relinear.system.allocator",
}

for _room in (_operators, _residual):
    for _name in _room.__all__:
        globals()[_name] = getattr(_room, _name)

__all__ = ["__version__", *_operators.__all__, *_residual.__all__, *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'relinear' has no attribute {name!r}")
    module = import_module(_LAZY[name])
    value = module if _LAZY[name] == f"relinear.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))
