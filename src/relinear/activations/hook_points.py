"""Hook points: values inside a model that can be read and changed while it runs.

A hook point has the name of a module: of an operator for its latent, of a module and one of its gates for that
(``...up_proj.basis_gate``, ``...down_proj.modulator.channel``), of a layer and ``output`` for its output. At most one
activation hook is at a hook point: the module passes the value to the hook and uses the result.
"""

# Legend: R size of the hook point

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from relinear.contract.linear_layers import linear_features
from relinear.contract.operator import Operator, is_replaceable
from relinear.deprecated import RenamedHook, adopt_renamed_hooks

if TYPE_CHECKING:
    from relinear.activations.interventions import Intervention

#: what the name of a layer's output ends with
OUTPUT = "output"
LATENT = "latent"


class Latent(NamedTuple):
    """A Gaussian latent of one forward: z as it was used, mu, logvar and ``sigma`` of its posterior; all (..., R)."""

    z: Tensor
    mu: Tensor
    logvar: Tensor

    @property
    def sigma(self) -> Tensor:
        """Return the posterior's standard deviation, exp(logvar / 2)."""
        # Computed when asked for: a forward that is read must save the same tensors as one that is not, or a backward
        # under gradient checkpointing after the end of the block could not match the two.
        return torch.exp(0.5 * self.logvar)


def as_latent(value: Tensor) -> Latent:
    """Return a deterministic value (..., R) as a latent whose sigma is 0."""
    return Latent(value, value, torch.full_like(value, -math.inf))


Observer = Callable[[Latent], None]


class ActivationHook:
    """Let interventions change a value, and observers read it, between where it is computed and where it is used."""

    def __init__(self) -> None:
        self.interventions: list[Intervention] = []
        self.observers: list[Observer] = []

    def __call__(self, latent: Latent) -> Tensor:
        """Return the value after all interventions, in their order, and show it to the observers."""
        for intervention in self.interventions:
            latent = latent._replace(z=intervention.apply(latent))
        # Recomputation by gradient checkpointing is not a new observation.
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            for observer in self.observers:
                observer(latent)
        return latent.z


class HasHookPoints:
    """A module with gates, or other values by name: its forward passes each through ``_hooked``.

    Comes first among the bases. Where ``_is_intervened`` is False the hooks only read, and the forward may take its
    fused kernel once they have seen the values.
    """

    #: the kind of value, in one word
    hook_kind: str = "gate"
    _activation_hooks: Mapping[str, ActivationHook] | None = None
    tap_kind = RenamedHook("hook_kind")
    tap_sizes = RenamedHook("hook_sizes")
    _taps = RenamedHook("_activation_hooks")
    _tapped = RenamedHook("_hooked")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adopt_renamed_hooks(cls)

    def hook_sizes(self) -> dict[str, int]:
        """Return name -> R of every value. Names have no dots; "" is the name of a module's only one, its latent."""
        raise TypeError(f"{type(self).__name__} does not say which values it has")

    @property
    def _is_intervened(self) -> bool:
        return self._activation_hooks is not None and any(
            hook.interventions for hook in self._activation_hooks.values()
        )

    def _hooked(self, name: str, value: Tensor) -> Tensor:
        hook = None if self._activation_hooks is None else self._activation_hooks.get(name)
        return value if hook is None else hook(as_latent(value))

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()  # a copy has no hooks
        return {**state, "_activation_hooks": None}


class LatentOperator(HasHookPoints, Operator):
    """An operator with a latent. Its forward calls ``self._latent_hook``, unless it is None, and decodes the result."""

    hook_kind = LATENT
    _latent_tap = RenamedHook("_latent_hook")

    @property
    def latent_size(self) -> int:
        """Return R, the number of latent dimensions."""
        raise TypeError(f"{type(self).__name__} does not say how large its latent is")

    @property
    def _latent_hook(self) -> ActivationHook | None:
        return None if self._activation_hooks is None else self._activation_hooks[""]

    def hook_sizes(self) -> dict[str, int]:
        return {"": self.latent_size}


# Where hooks are put


@dataclasses.dataclass(eq=False)
class HookPoint:
    """A place for one hook: the value ``name`` of a module, of ``size`` dimensions; ``kind`` is latent, gate ...

    ``hook()`` returns the present one; ``put(None)`` removes it.
    """

    module: Any
    name: str
    size: int
    kind: str

    def hook(self) -> ActivationHook | None:
        return (self.module._activation_hooks or {}).get(self.name)

    def put(self, hook: ActivationHook | None) -> None:
        # a new mapping, so that a compiled forward sees the change
        hooks = {name: other for name, other in (self.module._activation_hooks or {}).items() if name != self.name}
        self.module._activation_hooks = (hooks if hook is None else hooks | {self.name: hook}) or None


class _OutputHook:
    """Forward hook of a layer that passes its output to an activation hook; in a copy of the layer it does nothing."""

    handle: Any = None

    def __init__(self, hook: ActivationHook) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return self.hook(as_latent(output))

    def __getstate__(self) -> dict[str, Any]:
        return {"hook": ActivationHook()}


class _OutputPoint(HookPoint):
    def _registered(self) -> _OutputHook | None:
        hooks = (hook for hook in self.module._forward_hooks.values() if isinstance(hook, _OutputHook))
        return next((hook for hook in hooks if hook.handle is not None), None)  # not what a copy of the layer came with

    def hook(self) -> ActivationHook | None:
        registered = self._registered()
        return None if registered is None else registered.hook

    def put(self, hook: ActivationHook | None) -> None:
        registered = self._registered()
        if registered is not None:
            registered.handle.remove()
        if hook is not None:
            registered = _OutputHook(hook)
            registered.handle = self.module.register_forward_hook(registered)


def hook_points(model: nn.Module, *, outputs: bool = False) -> dict[str, HookPoint]:
    """Return the hook points of ``model`` by name, in its order: latents, gates and, on request, layers' outputs."""
    points: dict[str, HookPoint] = {}
    for full, module in model.named_modules():
        name = full.replace("_orig_mod.", "").removesuffix("_orig_mod")
        here: list[HookPoint] = []
        if isinstance(module, HasHookPoints):
            here += [HookPoint(module, gate, size, module.hook_kind) for gate, size in module.hook_sizes().items()]
        if outputs and name and is_replaceable(module):
            here += [_OutputPoint(module, OUTPUT, linear_features(module)[1], OUTPUT)]
        points |= {".".join(filter(None, (name, point.name))): point for point in here}
    return points
