"""What inference may compute once from parameters that do not change."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Self

import torch
from torch import Tensor, nn

__all__ = ["CachingModule", "ParameterCache", "RememberingModule", "ValueCache"]


class ParameterCache:
    """Values computed from the parameters of a module that are promised not to change (``relinear.for_inference_``).

    What can be noticed at next to no cost drops them all the same: a parameter that was replaced, changed in place
    under torch's version counter, moved, or added where there was none, and another submodule in the place of one.
    Writes through ``.data`` and by fused optimisers are not noticed.

    Several threads may read and fill it: values are only ever read beside the sources they were computed from.

    Args:
        owner: the module whose parameters count, with those of its children.
    """

    def __init__(self, owner: nn.Module) -> None:
        self._owner = owner
        #: (sources, places of everything else that may be replaced, values), replaced as a whole
        self._state: tuple[list[tuple], list[tuple], dict[Hashable, Any]] | None = None

    def get(self, key: Hashable) -> Any:
        """The value at ``key``, or None where there is none that is still good."""
        state = self._state
        if state is None:
            return None
        sources, places, values = state
        if not self._are_same(sources):
            self._state = None
            return None
        for slot, name, value in places:
            if slot.get(name) is not value:
                self._state = None
                return None
        return values.get(key)

    def opens(self) -> bool:
        """Whether values may be kept at all: not of parameters on meta (offloaded), of a subclass, or under vmap, nor
        where a parametrisation stands in for one, which may depend on what is no parameter."""
        parametrised = any("parametrizations" in module._modules for module in self._owner.modules())
        return not parametrised and all(_is_ordinary(parameter) for _, _, parameter in self._parameters())

    def keep(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """``compute()``, kept at ``key``. Only where the cache ``opens``.

        Computed without a graph, outside of inference mode and of autocast: it serves calls that are in neither.
        """
        state = self._state
        if state is None:
            # before the computation, so that a change during it is seen afterwards
            state = self._state = [self._source(*given) for given in self._parameters()], self._places(), {}
        kind = next(self._owner.parameters()).device.type
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(kind, enabled=False):
            value = compute()
        state[2][key] = value
        return value

    def _are_same(self, sources: list[tuple]) -> bool:
        for slot, name, parameter, version, address in sources:
            if slot.get(name) is not parameter or parameter._version != version or parameter.data_ptr() != address:
                return False
        return True

    def _places(self) -> list[tuple[dict[str, Any], str, nn.Module | None]]:
        """Where submodules are, and where there is no parameter."""
        modules = list(self._owner.modules())
        children = [(module._modules, name, child) for module in modules for name, child in module._modules.items()]
        empty = [
            (module._parameters, name, None)
            for module in modules
            for name, p in module._parameters.items()
            if p is None
        ]
        return children + empty

    def _parameters(self) -> list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]]:
        slots = (module._parameters for module in self._owner.modules())
        return [(slot, name, p) for slot in slots for name, p in slot.items() if p is not None]

    def _source(self, slot: dict[str, nn.Parameter | None], name: str, parameter: nn.Parameter) -> tuple:
        return slot, name, parameter, parameter._version, parameter.data_ptr()


class ValueCache(ParameterCache):
    """Values computed from few parameters, whose every number is compared before each use: no change goes unseen."""

    def _are_same(self, sources: list[tuple]) -> bool:
        for slot, name, parameter, copy in sources:
            same = slot.get(name) is parameter and parameter.dtype == copy.dtype and parameter.device == copy.device
            if not (same and torch.equal(parameter, copy)):
                return False
        return True

    def _source(self, slot: dict[str, nn.Parameter | None], name: str, parameter: nn.Parameter) -> tuple:
        return slot, name, parameter, parameter.detach().clone()


class CachingModule(nn.Module):
    """A module that can keep what it computes from its parameters, while ``relinear.for_inference_`` lasts.

    ``_kept`` is None where it must not, as in every fresh module. Copies and pickles start with None; ``train()`` goes
    back to it; ``eval()``, moves, casts and ``load_state_dict`` forget the values.
    """

    _kept: ParameterCache | None = None

    def keep_for_inference(self, keep: bool) -> None:
        """Start to keep values where ``ParameterCache.opens``, with none yet, or stop."""
        cache = ParameterCache(self)
        self._kept = cache if keep and cache.opens() else None

    def _forget(self) -> None:
        self.keep_for_inference(self._kept is not None)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.keep_for_inference(self._kept is not None and not mode)
        return self

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._forget()
        return self

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._forget()

    def _replicate_for_data_parallel(self):
        replica = super()._replicate_for_data_parallel()  # shares all attributes, on another device
        replica._kept = None
        return replica

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None}


class RememberingModule(CachingModule):
    """Keeps what it computes from its parameters by their values, outside of ``relinear.for_inference_``.

    Beside exponentials of matrices it takes no time to compare the few parameters that they come from. On a GPU it
    would, as that waits for the device.
    """

    _known: ValueCache | None = None

    def remembered(self, parameter: Tensor) -> ParameterCache | None:
        if self._kept is None and self._known is None and parameter.is_cpu:
            self._known = ValueCache(self)
        return self._kept or self._known

    def keep_for_inference(self, keep: bool) -> None:
        super().keep_for_inference(keep)
        self._known = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_known": None}


def _is_ordinary(parameter: Tensor) -> bool:
    return (
        type(parameter) in (Tensor, nn.Parameter)
        and not parameter.is_meta
        and not parameter.is_inference()  # counts no versions
        and not torch._C._functorch.is_functorch_wrapped_tensor(parameter)
    )
