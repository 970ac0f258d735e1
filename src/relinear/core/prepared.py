"""A layer's forward as one call, prepared once for weights that stay (``relinear.for_inference_``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

from relinear.core.held import forward_hooks
from relinear.core.parameter_cache import CachingModule

__all__ = ["prepared"]

Run = TypeVar("Run", bound=Callable[..., Tensor | None])


def prepared(module: CachingModule, x: Tensor, make: Callable[[Tensor], Run | None]) -> Run | None:
    """How ``module`` runs inputs like x: ``make(x)``, made once a dtype; None where it is to run as usual.

    None outside of ``relinear.for_inference_`` and in training, also of a submodule alone, where ``make`` has returned
    None, and wherever calling a submodule would run anything but the forward of its class: what was made reads their
    parameters by itself.

    Args:
        module: what the call stands for, with all of its submodules.
        x: inputs; what depends on more of them than their dtype is for the caller, or for what was made, to ask.
        make: from the inputs.
    """
    cache = module._kept
    if cache is None or module.training:
        return None
    kept: tuple[Run | None, Watch] | None = cache.get(x.dtype)
    if kept is None:
        if not cache.opens():
            return None
        kept = cache.keep(x.dtype, lambda: (make(x), Watch(module)))
    run, watch = kept
    return None if run is None or watch.holds_no_more() else run


class Watch:
    """Whether submodules of a module are bare and under the promise: asked at every call.

    Whether they are still those that it had is for its cache to notice.
    """

    def __init__(self, module: nn.Module) -> None:
        children = [child for child in module.modules() if child is not module]
        self._children = [(child, type(child), child.__dict__) for child in children]
        self._caching = [child for child in children if isinstance(child, CachingModule)]
        self._hooks = forward_hooks(children)

    def holds_no_more(self) -> bool:
        """Whether the parameters of submodules may not be read without calling them any more."""
        for child, kind, own in self._children:
            if child.__class__ is not kind or own["training"] or "forward" in own:
                return True
        for child in self._caching:
            if child._kept is None:
                return True
        return any(self._hooks)
