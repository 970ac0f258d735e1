"""Initialise operators and attached parts inside transformers models.

transformers initialises modules and marks them as initialised. relinear's parts are marked when they are created,
except on the meta device, where they are initialised with the model (``init_weights``, or keys missing on loading).
"""

from typing import Any

import torch
from torch import nn

from relinear.contract.operator import Operator
from relinear.contract.wrapper import Wrapper

#: transformers' mark on modules, and on tensors that were loaded
INITIALIZED = "_is_hf_initialized"


def initialize_(module: Any) -> None:
    """Initialise relinear's ``module``, except for loaded tensors; a wrapped layer is initialised separately."""
    is_ours = isinstance(module, Operator) or type(module).__module__.partition(".")[0] == "relinear"
    if not is_ours or isinstance(module, Wrapper) or not callable(getattr(module, "reset_parameters", None)):
        return
    tensors = module.state_dict(keep_vars=True).values()
    loaded = [(tensor, tensor.detach().clone()) for tensor in tensors if getattr(tensor, INITIALIZED, False)]
    if len(loaded) < len(tensors):
        module.reset_parameters()
        with torch.no_grad():
            for tensor, value in loaded:
                tensor.copy_(value)


def mark_initialized_(part: nn.Module) -> None:
    """Mark ``part`` and its submodules as initialised, unless it is on the meta device."""
    if not any(tensor.is_meta for tensor in part.state_dict(keep_vars=True).values()):
        for module in part.modules():
            setattr(module, INITIALIZED, True)
