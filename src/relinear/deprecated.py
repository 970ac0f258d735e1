"""Public names that have moved. The old place works for one version, with a DeprecationWarning."""

import warnings
from importlib import import_module
from typing import Any

_HOMES = {
    "relinear.activations": "Add Clamp Inject context intervene latents moment_alignment",
    "relinear.compress": "CompressSettings",
    "relinear.contract": "AttachmentConfig NotLinearError ObjectiveConfig aux_losses",
    "relinear.data": "prepare_data",
    "relinear.distill": "DistillSettings",
    "relinear.evaluate": "lambada lm_eval",
    "relinear.models": "preset_names",
    "relinear.residual": "DeepNorm LaurelLR LaurelPA LaurelRW LayerNormScaling PostLN ReZero SDPAGate SecondEmbedding "
    "residual_ residual_methods",
    "relinear.surgery": "lora_on_operators_ placement placement_names train_only_",
    "relinear.system.allocator": "tune_allocator",
    "relinear.train": "LatentMoments read_moments",
}
#: name in ``relinear`` -> (module that it is in now, its name there)
MOVED = {name: (module, name) for module, names in _HOMES.items() for name in names.split()}
MOVED["Replace"] = ("relinear.activations", "Patch")


def moved(name: str) -> Any:
    """Return what ``relinear.<name>``, one of ``MOVED``, is now, and warn on behalf of the caller's caller."""
    module, new = MOVED[name]
    warnings.warn(f"relinear.{name} has moved: from {module} import {new}", DeprecationWarning, stacklevel=3)
    return getattr(import_module(module), new)
