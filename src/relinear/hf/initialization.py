"""Initialise operators and attached parts in a model of transformers.

transformers initialises the modules that it knows and marks them. Parts of relinear that are on the meta device are
initialised with the model (``init_weights``, or a state that lacks them); others are marked as initialised.
"""

from typing import Any

import torch
from torch import nn

from relinear.contract.operator import Operator
from relinear.contract.wrapper import Wrapper

#: transformers' own mark, of modules and of what was loaded
INITIALIZED = "_is_hf_initialized"


def initialize_(module: Any) -> None:
    """Initialise ``module`` if it is relinear's and was not loaded; a wrapped layer is initialised separately."""
    ours = isinstance(module, Operator) or type(module).__module__.partition(".")[0] == "relinear"
    if not ours or isinstance(module, Wrapper) or not callable(getattr(module, "reset_parameters", None)):
        return
    tensors = module.state_dict(keep_vars=True).values()
    loaded = [(tensor, tensor.detach().clone()) for tensor in tensors if getattr(tensor, INITIALIZED, False)]
    if len(loaded) < len(tensors):
        module.reset_parameters()
        with torch.no_grad():
            for tensor, value in loaded:
                tensor.copy_(value)


def mark_initialized_(part: nn.Module) -> None:
    """Mark ``part`` and all in it as initialised, unless it is on the meta device."""
    if not any(tensor.is_meta for tensor in part.state_dict(keep_vars=True).values()):
        for module in part.modules():
            setattr(module, INITIALIZED, True)
