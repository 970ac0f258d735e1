"""Run a whole operator on a few rows in one call of a compiled kernel, while its weights do not change."""

from collections.abc import Callable

from torch import Tensor, nn

from relinear.activations.hooks import ACTIVATION_HOOKS
from relinear.contract.inference import CachingModule
from relinear.contract.module_state import hook_dictionaries
from relinear.kernels.native import build, rows_unsupported

Kernel = Callable[[Tensor], Tensor | None]


class FusedInference(CachingModule):
    """Run a whole operator as one kernel after ``relinear.for_inference_``.

    A subclass returns the kernel from ``fused_kernel``; its ``forward`` returns ``fused_forward(x)`` unless that is
    None.
    """

    def fused_kernel(self, x: Tensor) -> Kernel | None:
        """Return the kernel with its parameters, for inputs like x; None if there is none.

        It is built once per dtype and cached until a parameter changes. The kernel returns None for inputs that it does
        not support.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement fused_kernel")

    def fused_forward(self, x: Tensor) -> Tensor | None:
        """Return the output for a few rows x (..., I), or None if ``forward`` has to compute it.

        None outside of ``for_inference_``, in training, if activations are read or changed, and if calling a submodule
        would run more than its class's forward: the kernel reads parameters without calling submodules.
        """
        cache = self.parameter_cache
        if cache is None or self.training or rows_unsupported(x):
            return None
        kernel, submodules = cache.get(x.dtype, lambda: (self.fused_kernel(x), Submodules(self))) or (None, None)
        return None if kernel is None or not submodules.are_unhooked() else kernel(x)

    def build_kernels(self) -> None:
        if next(self.parameters()).is_cpu and build.compiler():
            build.library()


class Submodules:
    """Hold an operator's submodules, to check before each call that reading their parameters equals calling them.

    Replaced submodules are noticed elsewhere: they empty the operator's cache.
    """

    def __init__(self, module: nn.Module) -> None:
        children = [child for child in module.modules() if child is not module]
        self._module = module.__dict__
        self._children = [(child, type(child), child.__dict__) for child in children]
        self._caching = [child for child in children if isinstance(child, CachingModule)]
        self._hooks = hook_dictionaries(children)

    def are_unhooked(self) -> bool:
        """Return whether the parameters of submodules may be read without calling them."""
        if self._module.get(ACTIVATION_HOOKS) is not None:
            return False
        for child, cls, attributes in self._children:
            changed = child.__class__ is not cls or "forward" in attributes
            if changed or attributes["training"] or attributes.get(ACTIVATION_HOOKS):
                return False
        for child in self._caching:
            if child.parameter_cache is None:
                return False
        return not any(self._hooks)
