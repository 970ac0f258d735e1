"""Cache what layers compute from their parameters, for inference with constant weights.

``for_inference_`` gives every ``CachingModule`` of a model a ``parameter_cache``, in which the module looks up what it
computes from its parameters (a dense matrix, matrix exponentials, a prepared kernel). Changed parameters empty it.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from relinear.contract.input_checks import check_model
from relinear.contract.linear_layers import reference_tensor

Model = TypeVar("Model", bound=nn.Module)
#: functions that ``for_inference_`` calls with the model at the end, such as ``operators.fused_decoder.fuse_layers_``
PREPARATIONS: list[Callable[[nn.Module], None]] = []


class ParameterCache:
    """Cache values computed from a module's parameters, which must not change (``relinear.for_inference_``).

    The cache empties itself if a parameter or buffer was replaced, moved or added, if torch's version counter says that
    one was changed in place, or if a submodule was replaced. It does not notice writes through ``.data`` or by fused
    optimisers. Several threads may read and fill it.

    Args:
        owner: the module whose parameters, and whose children's, the values depend on.
    """

    def __init__(self, owner: nn.Module) -> None:
        self._owner = owner
        #: (slots, sources, values); one tuple, so that a thread never sees values computed from other sources
        self._state: tuple[list[tuple], list[tuple], dict[Hashable, Any]] | None = None
        #: whether kernels may round a few rows of inputs: after ``for_inference_``, but not in evaluations
        self.rounds_inputs = False

    def get(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return the value of ``key``, computed on first use; None if the cache is not usable.

        ``compute`` runs without a graph, outside of inference mode and autocast, so that any later call can use it.
        """
        state = self._state
        if state is not None:
            slots, sources, values = state
            for slot, name, occupant in slots:
                if slot.get(name) is not occupant:
                    state = self._state = None
                    break
            else:
                if not self._are_same(sources):
                    state = self._state = None
                elif key in values:
                    return values[key]
        if not self.is_usable():
            return None
        if state is None:
            # taken before the computation, so that a change during it is noticed
            tensors = (*self._owner.parameters(), *self._owner.buffers())
            state = self._state = self._slots(), [self._source(tensor) for tensor in tensors], {}
        device_type = reference_tensor(self._owner).device.type
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device_type, enabled=False):
            value = state[2][key] = compute()
        return value

    def is_usable(self) -> bool:
        """Return whether values may be cached.

        They may not if a parameter is on the meta device, of a subclass, or under vmap, or if a module is parametrised.
        """
        parametrized = any("parametrizations" in module._modules for module in self._owner.modules())
        return not parametrized and all(map(_is_ordinary, self._owner.parameters()))

    def _slots(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Return (dictionary, name, value) for every parameter, buffer and submodule; the value may be None."""
        modules = self._owner.modules()
        slots = (slot for m in modules for slot in (m._parameters, m._buffers, m._modules))
        return [(slot, name, occupant) for slot in slots for name, occupant in slot.items()]

    def _source(self, parameter: Tensor) -> tuple:
        """Return ``parameter`` with what ``_are_same`` compares to notice a change."""
        return parameter, parameter._version, parameter.data_ptr()

    def _are_same(self, sources: list[tuple]) -> bool:
        for parameter, version, address in sources:
            if parameter._version != version or parameter.data_ptr() != address:
                return False
        return True


class ComparingCache(ParameterCache):
    """Compare all values of the parameters before each use, so that no change goes unnoticed; for few parameters."""

    def _source(self, parameter: Tensor) -> tuple:
        return parameter, parameter.detach().clone()

    def _are_same(self, sources: list[tuple]) -> bool:
        for parameter, copy in sources:
            comparable = parameter.dtype == copy.dtype and parameter.device == copy.device
            if not (comparable and torch.equal(parameter, copy)):
                return False
        return True


class CachingModule(nn.Module):
    """Base of modules that cache what they compute from their parameters after ``relinear.for_inference_``.

    ``parameter_cache`` is None in new modules, in copies, after unpickling and after ``train()``. ``eval()``, moves,
    casts and ``load_state_dict`` empty it.
    """

    parameter_cache: ParameterCache | None = None
    _comparing_cache: ComparingCache | None = None

    def set_caching(self, on: bool) -> None:
        """Start caching with an empty cache, if that ``is_usable``, or stop caching."""
        new_cache = ParameterCache(self)
        new_cache.rounds_inputs = self.parameter_cache is not None and self.parameter_cache.rounds_inputs
        self.parameter_cache = new_cache if on and new_cache.is_usable() else None
        self._comparing_cache = None
        if self.parameter_cache is not None:
            self.build_kernels()

    def build_kernels(self) -> None:
        """Build the compiled kernels that inference needs, unless they are built."""

    def cache_or_compare(self, parameter: Tensor) -> ParameterCache | None:
        """Return ``parameter_cache`` or, without ``for_inference_``, a ``ComparingCache`` on the CPU, None on a GPU.

        Comparing a few parameters is cheap next to the matrix exponentials computed from them, but on a GPU it would
        wait for the device.
        """
        if self.parameter_cache is None and self._comparing_cache is None and parameter.is_cpu:
            self._comparing_cache = ComparingCache(self)
        return self.parameter_cache or self._comparing_cache

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.set_caching(self.parameter_cache is not None and not mode)
        return self

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.set_caching(self.parameter_cache is not None)
        return self

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.set_caching(self.parameter_cache is not None)

    def _replicate_for_data_parallel(self):
        replica = super()._replicate_for_data_parallel()  # shares all attributes, on another device
        replica.parameter_cache = None
        return replica

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        return {name: value for name, value in state.items() if not isinstance(value, ParameterCache)}


def for_inference_(model: Model, mode: bool = True) -> Model:
    """Put ``model`` into eval mode and let its layers cache what they compute from their weights.

    The weights must not change afterwards. What becomes faster, as long as no gradients are recorded:

    - Small linear operators multiply by a dense matrix, and rotors by factors, that are computed once.
    - HDPL, CCL and Transponder process a few rows in one call of a compiled kernel, which is built if needed.
    - Quantized layers round the inputs of a few rows to 8 bits, with a scale for every 32 inputs, as llama.cpp does.
      For normally distributed inputs, outputs are then off by 0.5 % in the Frobenius norm.
    - A Llama decoder layer in float32 whose linear layers are all quantized processes one token in two calls.

    ``model.train()`` or ``for_inference_(model, False)`` ends this and frees the caches; ``train()`` on a submodule
    ends it there. Call ``for_inference_`` again after changing weights. In-place changes that torch counts are noticed.
    Writes through ``.data``, ``parameter.numpy()`` or another pointer are not noticed: outputs then come from the old
    weights. Copies, pickles and checkpoints of the model hold no caches. Several threads may run the model.

    Args:
        model: any module with operators, loaded and on its device. Layers with parameters on the meta device
            (offloaded by accelerate) or of a tensor subclass (sharded, quantized) cache nothing.
        mode: False ends the caching and leaves the training mode alone.

    Returns:
        ``model``.

    Raises:
        ValueError: if ``model`` is not a module.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> _ = relinear.replace_(model, {"q_proj": relinear.Rotor(depth=0)})
        >>> model = relinear.for_inference_(model)  # ends with model.train()
        >>> model.training
        False
    """
    check_model(model, "for_inference_")
    if mode:
        model.eval()
    for module in _caching_modules(model):
        module.set_caching(mode)
        if module.parameter_cache is not None:
            module.parameter_cache.rounds_inputs = True
    if mode:
        for prepare in PREPARATIONS:
            prepare(model)
    return model


@contextlib.contextmanager
def caching_for_inference(model: nn.Module) -> Iterator[None]:
    """Let layers cache within the block, without the rounding and fused kernels of ``for_inference_``.

    Modes and existing caches stay.
    """
    fresh = [module for module in _caching_modules(model) if module.parameter_cache is None]
    for module in fresh:
        module.set_caching(True)
    try:
        yield
    finally:
        for module in fresh:
            module.set_caching(False)


def _caching_modules(model: nn.Module) -> list[CachingModule]:
    return [module for module in model.modules() if isinstance(module, CachingModule)]


def _is_ordinary(parameter: Tensor) -> bool:
    return (
        type(parameter) in (Tensor, nn.Parameter)
        and not parameter.is_meta
        and not parameter.is_inference()  # inference tensors have no version counter
        and not torch._C._functorch.is_functorch_wrapped_tensor(parameter)
    )
