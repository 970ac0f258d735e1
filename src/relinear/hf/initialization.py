"""Initialise operators and attached parts inside transformers models.

transformers initialises modules and marks them as initialised. relinear's parts are marked when they are created,
except on the meta device, where they are initialised with the model (``init_weights``, or keys missing on loading).
"""

from typing import Any

import torch
from torch import nn

from relinear.contract.operator import Operator
from relinear.contract.wrapper import Wrapper

#: mark on modules that an attachment of another package added
PART_MARK = "_is_relinear_part"
#: transformers' mark on modules, and on tensors that were loaded
INITIALIZED = "_is_hf_initialized"


def initialize_(module: Any) -> None:
    """Initialise an operator or part, except for loaded tensors; submodules of a wrapper are initialised separately."""
    is_ours = isinstance(module, Operator) or package_of(module) == "relinear" or hasattr(module, PART_MARK)
    reset = getattr(module, "reset_parameters", None)
    tensors = list(module.state_dict(keep_vars=True).values()) if is_ours else []
    if isinstance(module, Wrapper):
        reset, tensors = module.reset_own_parameters, list(module._parameters.values())
    if not is_ours or not callable(reset):
        return
    loaded = [(tensor, tensor.detach().clone()) for tensor in tensors if getattr(tensor, INITIALIZED, False)]
    if len(loaded) < len(tensors):
        reset()
        with torch.no_grad():
            for tensor, value in loaded:
                tensor.copy_(value)


def package_of(value: object) -> str:
    """Return the package that defines the class of ``value``."""
    return type(value).__module__.partition(".")[0]


def mark_initialized_(part: nn.Module) -> None:
    """Mark ``part`` and its submodules as initialised, unless it is on the meta device."""
    if not any(tensor.is_meta for tensor in part.state_dict(keep_vars=True).values()):
        for module in part.modules():
            setattr(module, INITIALIZED, True)
