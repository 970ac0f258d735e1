"""What inference may compute once from parameters that do not change."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Self

from torch import Tensor, nn

__all__ = ["CachingModule", "ParameterCache"]


class ParameterCache:
    """Values computed from parameters, dropped when one of these is replaced, changed in place or moved.

    A change that goes around torch's version counters (``parameter.data.mul_(2)``) is not seen; modules drop their
    cache in ``train()`` and ``eval()``.

    Args:
        slots: the ``_parameters`` of every module whose parameters count.
    """

    def __init__(self, slots: Sequence[dict[str, nn.Parameter | None]]) -> None:
        self.slots = slots
        self.sources: list[tuple[dict[str, nn.Parameter | None], str, Tensor, int, int]] = []
        self.values: dict[Hashable, Any] = {}

    def get(self, key: Hashable) -> Any:
        """The value at ``key``, or None where there is none that is still good."""
        for slot, name, parameter, version, address in self.sources:
            if slot[name] is not parameter or parameter._version != version or parameter.data_ptr() != address:
                self.sources, self.values = [], {}
                return None
        return self.values.get(key)

    def put(self, key: Hashable, value: Any) -> Any:
        """Keep ``value`` where changes of the parameters can be seen at all (inference tensors count no versions)."""
        present = [(slot, name, p) for slot in self.slots for name, p in slot.items() if p is not None]
        if not any(p.is_inference() for _, _, p in present):
            self.sources = [(slot, name, p, p._version, p.data_ptr()) for slot, name, p in present]
            self.values[key] = value
        return value


class CachingModule(nn.Module):
    """A module that keeps what it computes from its own parameters in ``_cache``; copies start with an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self._cache = ParameterCache([self._parameters])

    def train(self, mode: bool = True) -> Self:
        self._cache = ParameterCache([self._parameters])
        return super().train(mode)

    def __getstate__(self):
        return {key: value for key, value in self.__dict__.items() if key != "_cache"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._cache = ParameterCache([self._parameters])
