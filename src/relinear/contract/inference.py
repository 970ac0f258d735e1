"""Inference with weights that are promised to stay: layers cache what they compute from their parameters.

The protocol. A ``CachingModule`` has a ``parameter_cache`` while ``for_inference_`` lasts, else None. There it looks up
what it computes from its parameters; whatever changes them empties the cache.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)
#: attribute of modules whose activations are read or changed
ACTIVATION_HOOKS = "_activation_hooks"
#: class of a layer, with its module -> what makes a forward of such a layer whose weights stay, None if it cannot
FUSED_FORWARDS: dict[str, Callable[[nn.Module], Callable[..., Any] | None]] = {}


class ParameterCache:
    """Values computed from the parameters of a module that are promised not to change (``relinear.for_inference_``).

    Changes that are cheap to notice empty it: a parameter that was replaced, changed in place under torch's version
    counter, moved or added, and a submodule that was replaced. Writes through ``.data`` and by fused optimisers are not
    noticed.

    Several threads may read and fill it: values are only ever read with the sources they were computed from.

    Args:
        owner: the module whose parameters count, with those of its children.
    """

    def __init__(self, owner: nn.Module) -> None:
        self._owner = owner
        #: (where parameters and submodules are, what the parameters hold, values), replaced as a whole
        self._state: tuple[list[tuple], list[tuple], dict[Hashable, Any]] | None = None
        #: whether kernels may round the inputs of a few rows: where a model is used, not where it is evaluated
        self.rounds_inputs = False

    def get(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return the value at ``key``, computed at its first use; None if the cache is not usable.

        Computed without a graph, outside of inference mode and autocast, so that other calls can use it.
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
            # before the computation, so that a change during it is seen afterwards
            state = self._state = self._slots(), [self._source(p) for p in self._owner.parameters()], {}
        device_type = next(self._owner.parameters()).device.type
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device_type, enabled=False):
            value = state[2][key] = compute()
        return value

    def is_usable(self) -> bool:
        """Return whether values may be cached: not for parameters on the meta device, of a subclass or under vmap.

        Nor in parametrised modules, whose weights may depend on more than parameters.
        """
        parametrised = any("parametrizations" in module._modules for module in self._owner.modules())
        return not parametrised and all(map(_is_ordinary, self._owner.parameters()))

    def _slots(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Return every slot of a parameter or submodule with its occupant, which may be None."""
        slots = (slot for module in self._owner.modules() for slot in (module._parameters, module._modules))
        return [(slot, name, occupant) for slot in slots for name, occupant in slot.items()]

    def _source(self, parameter: Tensor) -> tuple:
        return parameter, parameter._version, parameter.data_ptr()

    def _are_same(self, sources: list[tuple]) -> bool:
        for parameter, version, address in sources:
            if parameter._version != version or parameter.data_ptr() != address:
                return False
        return True


class ComparingCache(ParameterCache):
    """A cache that compares every number of its few parameters before each use, so that no change goes unnoticed."""

    def _source(self, parameter: Tensor) -> tuple:
        return parameter, parameter.detach().clone()

    def _are_same(self, sources: list[tuple]) -> bool:
        for parameter, copy in sources:
            alike = parameter.dtype == copy.dtype and parameter.device == copy.device
            if not (alike and torch.equal(parameter, copy)):
                return False
        return True


class CachingModule(nn.Module):
    """A module that caches what it computes from its parameters, while ``relinear.for_inference_`` lasts.

    ``parameter_cache`` is None while it must not, as in every new module. Copies and pickles start with None;
    ``train()`` goes back to it; ``eval()``, moves, casts and ``load_state_dict`` empty it.
    """

    parameter_cache: ParameterCache | None = None
    _comparing_cache: ComparingCache | None = None

    def cache_parameters(self, cache: bool) -> None:
        """Start with an empty cache, if it ``is_usable``, or stop."""
        new_cache = ParameterCache(self)
        new_cache.rounds_inputs = self.parameter_cache is not None and self.parameter_cache.rounds_inputs
        self.parameter_cache = new_cache if cache and new_cache.is_usable() else None
        self._comparing_cache = None
        if self.parameter_cache is not None:
            self.build_kernels()

    def build_kernels(self) -> None:
        """Build the compiled kernels that inference runs, if they are missing."""

    def cache_or_compare(self, parameter: Tensor) -> ParameterCache | None:
        """Return ``parameter_cache``, or outside of ``for_inference_`` one that compares parameters before each use.

        Comparing a few parameters is cheap next to the matrix exponentials computed from them. On a GPU it would wait
        for the device.
        """
        if self.parameter_cache is None and self._comparing_cache is None and parameter.is_cpu:
            self._comparing_cache = ComparingCache(self)
        return self.parameter_cache or self._comparing_cache

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.cache_parameters(self.parameter_cache is not None and not mode)
        return self

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.cache_parameters(self.parameter_cache is not None)
        return self

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.cache_parameters(self.parameter_cache is not None)

    def _replicate_for_data_parallel(self):
        replica = super()._replicate_for_data_parallel()  # shares all attributes, on another device
        replica.parameter_cache = None
        return replica

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not isinstance(value, ParameterCache)}


def for_inference_(model: Model, mode: bool = True) -> Model:
    """Let the layers of ``model`` cache what they compute from their weights, which from now on must not change.

    Small linear operators then multiply with a dense matrix that is built once, rotors with factors that are
    exponentiated once, Transponder's gates include their curvature, and a few rows through HDPL, CCL and Transponder
    are one prepared call, whose kernel is built if need be. Quantized layers round the inputs of a few rows to 8 bits,
    32 of them to a scale, as llama.cpp does: outputs of normal inputs are off by 0.5 % (in the Frobenius norm). One
    token through a decoder layer of Llama's in float32, all of whose linear layers are quantized, is two calls. The
    model is put into eval mode. Caches are used where no gradients are recorded, by several threads at once.

    The promise ends with ``model.train()`` (of a submodule for that submodule), or with ``for_inference_(model,
    False)``, which leaves the mode alone; caches are freed then. Call this again after a change of weights. Changes
    that torch counts are noticed; writes through ``.data``, ``parameter.numpy()`` or another pointer are not: outputs
    are then those of the old weights. Copies, pickles and checkpoints of the model hold no caches.

    Args:
        model: any module with operators in it, placed and loaded: layers whose parameters are on the meta device
            (offloaded by accelerate) or of another class than torch's own (sharded, quantised) keep nothing.
        mode: False to end the promise.

    Returns:
        the model.

    Raises:
        ValueError: if ``model`` is not a module.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> _ = relinear.replace_(model, {"q_proj": relinear.Rotor(depth=0)})
        >>> model = relinear.for_inference_(model)  # ends with model.train()
        >>> model.training
        False
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"for_inference_ expects a module, got {type(model).__name__}")
    if mode:
        model.eval()
    for module in _caching(model):
        module.cache_parameters(mode)
        if module.parameter_cache is not None:
            module.parameter_cache.rounds_inputs = True
    for layer in model.modules() if mode else ():
        fuse = FUSED_FORWARDS.get(f"{type(layer).__module__}.{type(layer).__qualname__}")
        forward = None if fuse is None else fuse(layer)
        if forward is not None:
            layer.forward = forward
    return model


@contextlib.contextmanager
def caching_for_inference(model: nn.Module) -> Iterator[None]:
    """Cache as ``for_inference_`` does for the length of a block; leave modes and existing caches alone."""
    fresh = [module for module in _caching(model) if module.parameter_cache is None]
    for module in fresh:
        module.cache_parameters(True)
    try:
        yield
    finally:
        for module in fresh:
            module.cache_parameters(False)


def _caching(model: nn.Module) -> list[CachingModule]:
    return [module for module in model.modules() if isinstance(module, CachingModule)]


def _is_ordinary(parameter: Tensor) -> bool:
    return (
        type(parameter) in (Tensor, nn.Parameter)
        and not parameter.is_meta
        and not parameter.is_inference()  # counts no versions
        and not torch._C._functorch.is_functorch_wrapped_tensor(parameter)
    )
