"""Modules that hold an operator's parameters without being layers.

An operator that computes several parts in one kernel never calls them as layers. They must not be ``nn.Linear``: PEFT
would put adapters on layers that are never called, and quantizers would replace them. Yet they must be modules:
accelerate's offloading loads weights before a module's call and removes them after it. So each part is a small module
with the parameter names of a layer, and calling it returns its parameters.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from relinear.contract.module_state import GLOBAL_HOOKS


def add_parameters(module: nn.Module, kw: dict[str, Any], /, **shapes: tuple[int, ...] | None) -> None:
    """Register an uninitialised parameter for each name and shape, or None for the shape None."""
    for name, shape in shapes.items():
        module.register_parameter(name, None if shape is None else nn.Parameter(torch.empty(*shape, **kw)))


class AffineParameters(nn.Module):
    """``weight`` and ``bias`` of an affine map (or of a norm): ``weight, bias = part()``.

    Initialised as in ``nn.Linear`` and ``nn.LayerNorm``.

    Args:
        shape: shape of the weight.
        bias: whether there is a bias, as long as the weight's first dimension.
        device, dtype: where and as what both are made.
    """

    bias: nn.Parameter | None

    def __init__(self, *shape: int, bias: bool = True, device=None, dtype=None) -> None:
        super().__init__()
        kw = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(*shape, **kw))
        self.register_parameter("bias", nn.Parameter(torch.empty(shape[0], **kw)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise both as torch's layers do."""
        if self.weight.ndim > 1:
            nn.Linear.reset_parameters(self)  # type: ignore[arg-type]
            return
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def __call__(self) -> tuple[Any, Any]:
        """Return (weight, bias); skip the slow ``nn.Module.__call__`` unless there are hooks."""
        attributes, parameters = self.__dict__, self._parameters
        hooked = attributes["_forward_hooks"] or attributes["_forward_pre_hooks"] or attributes["_backward_hooks"]
        if hooked or attributes["_backward_pre_hooks"] or "forward" in attributes or any(GLOBAL_HOOKS):
            return super().__call__()
        if "weight" not in parameters or "bias" not in parameters:  # sharded, pruned or parametrised
            return super().__call__()
        return parameters["weight"], parameters["bias"]

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Return (weight, bias)."""
        return self.weight, self.bias

    def extra_repr(self) -> str:
        return f"{', '.join(map(str, self.weight.shape))}, bias={self.bias is not None}"


class ListedParameters(nn.ParameterList):
    """A list of parameters: ``first, second = part()``."""

    __call__ = nn.Module.__call__  # nn.ParameterList's own raises an error

    def forward(self) -> list[Tensor]:
        """Return the parameters."""
        return list(self)


def are_affine_parameters(parts: Iterable[nn.Module | None]) -> bool:
    """Return whether all ``parts`` that are not None are exactly ``AffineParameters``.

    A module that replaced one may compute its tensors in every call, so they must not be cached.
    """
    return all(part is None or type(part) is AffineParameters for part in parts)


def are_parameters(module: nn.Module, *names: str) -> bool:
    """Return whether ``names`` are parameters of ``module`` (or None) rather than computed by a parametrisation."""
    return module._parameters.keys() >= set(names)
