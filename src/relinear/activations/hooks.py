"""Hook points: activations inside a model that can be read and changed while it runs.

- An operator's latent has the operator's name, ``model.layers.0.self_attn.q_proj``.
- A gate has its module's name followed by its own, ``...up_proj.basis_gate``, ``...down_proj.modulator.channel``.
- A layer's output has the layer's name followed by ``output``.

A hook point has at most one ``ActivationHook``: the module passes the value to it and uses the result.
"""

# Legend: R size of the hook point

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from relinear.contract.auxiliary_mixin import is_recomputing
from relinear.contract.linear_layers import linear_features
from relinear.contract.operator import Operator, is_replaceable
from relinear.deprecated import adopt_renamed_attributes, with_attributes_of_0_2

#: kinds of hook points; OUTPUT is also the last part of the name of a layer's output
OUTPUT = "output"
LATENT = "latent"
#: attribute of ``HasHookPoints`` with the hooks by name
ACTIVATION_HOOKS = "_activation_hooks"


class Activation(NamedTuple):
    """A value of one forward: a latent, gate or output, with its distribution if it is a Gaussian latent.

    Attributes:
        z: the value (..., R); named as in variational models, also for gates and outputs.
        mu: mean (..., R) of the distribution that z is drawn from; z if there is none.
        logvar: its log variance (..., R); -inf if there is none.
    """

    z: Tensor
    mu: Tensor
    logvar: Tensor

    @property
    def sigma(self) -> Tensor:
        """Return the standard deviation exp(logvar / 2) of the distribution of z; 0 for a gate or an output."""
        # Computed on access: a forward with observers must save the same tensors for backward as one without. If the
        # backward runs after the block, gradient checkpointing compares the two.
        return torch.exp(0.5 * self.logvar)


def as_activation(value: Tensor) -> Activation:
    """Return a deterministic value (..., R) as an activation whose sigma is 0."""
    return Activation(value, value, torch.full_like(value, -math.inf))


Observer = Callable[[Activation], None]


class Intervention:
    """Base of interventions: ``check`` validates one against a hook point, ``apply`` returns the changed value."""

    def check(self, name: str, size: int) -> None:
        """Raise ValueError if this cannot be applied to the hook point ``name`` with ``size`` dimensions."""

    def apply(self, activation: Activation) -> Tensor:
        """Return the new z (..., R)."""
        raise NotImplementedError(f"{type(self).__name__} does not implement apply")


@dataclasses.dataclass(eq=False)
class ActivationHook:
    """Apply interventions to an activation and show it to observers.

    Attributes:
        interventions: applied in order.
        observers: called with the activation after all interventions.
    """

    interventions: Sequence[Intervention] = ()
    observers: Sequence[Observer] = ()

    def __call__(self, activation: Activation) -> Tensor:
        """Return the value after all interventions, which the observers see."""
        for intervention in self.interventions:
            activation = activation._replace(z=intervention.apply(activation))
        if not is_recomputing():  # which is not a new observation
            for observer in self.observers:
                observer(activation)
        return activation.z


@with_attributes_of_0_2
class HasHookPoints:
    """Give a module, such as a gate, hook points: its ``forward`` passes each value through ``_hooked``.

    It must stand before ``Operator`` or ``nn.Module`` among the bases. Names with an underscore are for subclasses. If
    ``_is_intervened`` is False, hooks only read: ``forward`` passes the values to them and may still use its fused
    kernel.
    """

    #: kind of the values, in one word
    hook_kind: str = "gate"
    _activation_hooks: Mapping[str, ActivationHook] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adopt_renamed_attributes(cls)

    def hook_sizes(self) -> dict[str, int]:
        """Return name -> R for every value. Names have no dots; "" is the latent of a ``LatentOperator``."""
        raise NotImplementedError(f"{type(self).__name__} does not implement hook_sizes")

    @property
    def _is_intervened(self) -> bool:
        return self._activation_hooks is not None and any(
            hook.interventions for hook in self._activation_hooks.values()
        )

    def _hooked(self, name: str, value: Tensor) -> Tensor:
        hook = None if self._activation_hooks is None else self._activation_hooks.get(name)
        return value if hook is None else hook(as_activation(value))

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()  # a copy has no hooks
        return {**state, "_activation_hooks": None}


@with_attributes_of_0_2
class LatentOperator(HasHookPoints, Operator):
    """Base of operators with a latent: their ``forward`` passes it through ``_latent_hook``, if set, and decodes it."""

    hook_kind = LATENT

    @property
    def latent_size(self) -> int:
        """Return R, the number of latent dimensions."""
        raise NotImplementedError(f"{type(self).__name__} does not implement latent_size")

    @property
    def _latent_hook(self) -> ActivationHook | None:
        return None if self._activation_hooks is None else self._activation_hooks[""]

    def hook_sizes(self) -> dict[str, int]:
        return {"": self.latent_size}


@dataclasses.dataclass(eq=False)
class HookPoint:
    """Name a value of a module to which one hook can be attached.

    Attributes:
        module: whose forward computes the value.
        name: name of the value in the module.
        size: R, the number of its dimensions.
        kind: "latent", "gate" or another ``hook_kind``, or "output".
    """

    module: Any
    name: str
    size: int
    kind: str

    def hook(self) -> ActivationHook | None:
        """Return the hook that is set; None if there is none."""
        return (self.module._activation_hooks or {}).get(self.name)

    def set_hook(self, hook: ActivationHook | None) -> None:
        """Set the hook, in place of any earlier one; None removes it."""
        # a new mapping, so that a compiled forward sees the change
        hooks = {n: h for n, h in (self.module._activation_hooks or {}).items() if n != self.name}
        self.module._activation_hooks = (hooks if hook is None else hooks | {self.name: hook}) or None


class _OutputHook:
    """Forward hook that passes a layer's output to an activation hook; in a copy of the layer it does nothing."""

    handle: Any = None

    def __init__(self, hook: ActivationHook) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return self.hook(as_activation(output))

    def __getstate__(self) -> dict[str, Any]:
        return {"hook": ActivationHook()}


class _OutputPoint(HookPoint):
    def _registered(self) -> _OutputHook | None:
        hooks = (hook for hook in self.module._forward_hooks.values() if isinstance(hook, _OutputHook))
        return next((hook for hook in hooks if hook.handle is not None), None)  # a copied hook has no handle

    def hook(self) -> ActivationHook | None:
        registered = self._registered()
        return None if registered is None else registered.hook

    def set_hook(self, hook: ActivationHook | None) -> None:
        registered = self._registered()
        if registered is not None:
            registered.handle.remove()
        if hook is not None:
            registered = _OutputHook(hook)
            registered.handle = self.module.register_forward_hook(registered)


def hook_points(model: nn.Module, *, outputs: bool = False) -> dict[str, HookPoint]:
    """Return the hook points of ``model`` by name, in the order of its modules.

    Args:
        model: any model, compiled or not.
        outputs: whether to list the outputs of linear layers too, after latents and gates of the same module.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> _ = relinear.replace_(model, {"q_proj": relinear.HDPL(rank=4)}, layers=[0])
        >>> relinear.activations.hook_points(model)
        {'model.layers.0.self_attn.q_proj': HookPoint(..., name='', size=4, kind='latent')}
    """
    points: dict[str, HookPoint] = {}
    for full_name, module in model.named_modules():
        name = full_name.replace("_orig_mod.", "").removesuffix("_orig_mod")
        module_points: list[HookPoint] = []
        if isinstance(module, HasHookPoints):
            module_points += [
                HookPoint(module, value, size, module.hook_kind) for value, size in module.hook_sizes().items()
            ]
        if outputs and name and is_replaceable(module):
            module_points += [_OutputPoint(module, OUTPUT, linear_features(module)[1], OUTPUT)]
        points |= {".".join(filter(None, (name, point.name))): point for point in module_points}
    return points


@contextlib.contextmanager
def with_hooks(
    points: Mapping[str, HookPoint],
    interventions: Mapping[str, Sequence[Intervention]] | None = None,
    observers: Mapping[str, Sequence[Observer]] | None = None,
) -> Iterator[None]:
    """Add interventions and observers, by name of hook point, within the block."""
    with contextlib.ExitStack() as stack:
        for name, point in points.items():
            previous = point.hook()
            outer = previous or ActivationHook()
            stack.callback(point.set_hook, previous)
            # a new hook object, so that a compiled forward sees the change
            all_interventions = (*outer.interventions, *(interventions or {}).get(name, ()))
            point.set_hook(ActivationHook(all_interventions, (*outer.observers, *(observers or {}).get(name, ()))))
        yield


def observe_hook_points(
    points: Mapping[str, HookPoint], observer: Callable[[str, Activation], None]
) -> AbstractContextManager[None]:
    """Call ``observer(name, activation)`` for every value that a forward within the block computes at ``points``.

    Args:
        points: hook points by name, such as some of ``hook_points(model)``.
        observer: called with a point's name and its ``Activation``, after all interventions.

    Examples:
        >>> model, ids = relinear.from_preset("tiny"), torch.randint(258, (1, 8))
        >>> points = relinear.activations.hook_points(model, outputs=True)
        >>> with relinear.activations.observe_hook_points(points, lambda name, activation: print(name)):
        ...     _ = model(ids)
        model.layers.0.self_attn.q_proj.output...
    """
    return with_hooks(points, observers={name: [functools.partial(observer, name)] for name in points})
