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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from relinear.contract.auxiliary_mixin import is_recomputing
from relinear.contract.input_checks import check_model
from relinear.contract.linear_layers import embeds, linear_features
from relinear.contract.operator import Operator, is_replaceable
from relinear.deprecated import adopt_renamed_attributes, warn_renamed, with_attributes_of_0_2
from relinear.settings.messages import did_you_mean, quoted

#: kinds of hook points, and the names of the values in their modules; a latent is called by its module's name alone
OUTPUT = "output"
LATENT = "latent"
#: attribute of ``HasHookPoints`` with the hooks by name
ACTIVATION_HOOKS = "activation_hooks"


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
    return Activation(value, value, value.new_full((), -math.inf).expand_as(value))  # takes no memory


Observer = Callable[[Activation], None]


class Intervention:
    """Base of interventions: ``check`` validates one against a hook point, ``apply`` returns the changed value."""

    def check(self, name: str, size: int) -> None:
        """Raise ValueError if this cannot be applied to the hook point ``name`` with ``size`` dimensions."""

    def apply(self, activation: Activation) -> Tensor:
        """Return the new z (..., R), of the same shape."""
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
            z = intervention.apply(activation)
            if not isinstance(z, Tensor) or z.shape != activation.z.shape:
                got = f"one of shape {tuple(z.shape)}" if isinstance(z, Tensor) else quoted(z)
                raise ValueError(
                    f"{type(intervention).__name__}.apply must return a tensor of shape {tuple(activation.z.shape)}, "
                    f"got {got}"
                )
            activation = activation._replace(z=z)
        if not is_recomputing():  # which is not a new observation
            for observer in self.observers:
                observer(activation)
        return activation.z

    def then(self, other: ActivationHook) -> ActivationHook:
        """Return a hook that applies the interventions of both, and calls the observers of both afterwards."""
        interventions = (*self.interventions, *other.interventions)
        return ActivationHook(interventions, (*self.observers, *other.observers))


@with_attributes_of_0_2
class HasHookPoints:
    """Give a module, such as a gate, hook points: its ``forward`` passes each value through ``hooked``.

    It must stand before ``Operator`` or ``nn.Module`` among the bases.

    Attributes:
        hook_kind: kind of the values, in one word.
        activation_hooks: the hooks by name; None if there are none, so that values need not be computed for them.
    """

    hook_kind: str = "gate"
    activation_hooks: Mapping[str, ActivationHook] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adopt_renamed_attributes(cls)

    def hook_sizes(self) -> dict[str, int]:
        """Return name -> R for every value. Names have no dots; "latent" is that of a ``LatentOperator``."""
        raise NotImplementedError(f"{type(self).__name__} does not implement hook_sizes")

    @property
    def is_intervened(self) -> bool:
        """Return whether a hook changes values; if none does, ``forward`` may still use its fused kernel."""
        return self.activation_hooks is not None and any(hook.interventions for hook in self.activation_hooks.values())

    def hooked(self, name: str, value: Tensor | Activation) -> Tensor:
        """Return the value ``name`` (..., R), or the z of an ``Activation``, after its hook."""
        hook = None if self.activation_hooks is None else self.activation_hooks.get(name)
        if hook is None:
            return value.z if isinstance(value, Activation) else value
        return hook(value if isinstance(value, Activation) else as_activation(value))

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()  # a copy has no hooks
        return {**state, ACTIVATION_HOOKS: None}


class LatentOperator(HasHookPoints, Operator):
    """Base of operators with a latent: ``forward`` passes it through ``hooked("latent", ...)``, then decodes it."""

    hook_kind = LATENT

    @property
    def latent_size(self) -> int:
        """Return R, the number of latent dimensions."""
        raise NotImplementedError(f"{type(self).__name__} does not implement latent_size")

    @property
    def _latent_tap(self) -> ActivationHook | None:  # operators of 0.2 call it
        warn_renamed(f"{type(self).__name__}._latent_tap", 'hooked("latent", ...)')
        return (self.activation_hooks or {}).get(LATENT)

    def hook_sizes(self) -> dict[str, int]:
        return {LATENT: self.latent_size}


@dataclasses.dataclass(eq=False)
class HookPoint:
    """Name a value of a module to which a hook can be attached.

    Attributes:
        module: whose forward computes the value.
        name: name of the value in the module.
        size: R, the number of its dimensions.
        kind: "latent", "gate" or another ``hook_kind`` ("modulator", "context"), or "output".
    """

    module: Any
    name: str
    size: int
    kind: str

    def add_hook(self, hook: ActivationHook) -> Callable[[], None]:
        """Add ``hook`` to those that are set; return a function that restores what was set."""
        outer = (self.module.activation_hooks or {}).get(self.name)
        self._set_hook(hook if outer is None else outer.then(hook))
        return functools.partial(self._set_hook, outer)

    def _set_hook(self, hook: ActivationHook | None) -> None:
        # a new mapping, so that a compiled forward sees the change
        hooks = {n: h for n, h in (self.module.activation_hooks or {}).items() if n != self.name}
        self.module.activation_hooks = (hooks if hook is None else hooks | {self.name: hook}) or None


class _OutputHook:
    """Forward hook that passes a layer's output to an activation hook; in a copy of the layer it does nothing.

    It moves to another module if that replaces the layer within a block, so a block keeps hold of it.
    """

    handle: Any = None

    def __init__(self, hook: ActivationHook) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return self.hook(as_activation(output))

    def __getstate__(self) -> dict[str, Any]:
        return {"hook": ActivationHook()}


class _OutputPoint(HookPoint):
    def add_hook(self, hook: ActivationHook) -> Callable[[], None]:
        hooks = (hook for hook in self.module._forward_hooks.values() if isinstance(hook, _OutputHook))
        registered = next((hook for hook in hooks if hook.handle is not None), None)  # a copied hook has no handle
        if registered is None:
            registered = _OutputHook(hook)
            registered.handle = self.module.register_forward_hook(registered)
            return registered.handle.remove
        outer = registered.hook
        registered.hook = outer.then(hook)
        return functools.partial(setattr, registered, "hook", outer)


def hook_points(model: nn.Module, *, outputs: bool = False) -> dict[str, HookPoint]:
    """Return the hook points of ``model`` by name, in the order of its modules.

    Args:
        model: any model, compiled or not.
        outputs: whether to list the outputs of linear layers and operators too, after latents and gates of the same
            module. Stock embeddings, and a head that is tied to a replaced one, have none.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> _ = relinear.replace_(model, {"q_proj": relinear.HDPL(rank=4)}, layers=[0])
        >>> relinear.activations.hook_points(model)
        {'model.layers.0.self_attn.q_proj': HookPoint(..., name='latent', size=4, kind='latent')}
    """
    check_model(model, "hook_points")
    points: dict[str, HookPoint] = {}
    for full_name, module in model.named_modules():
        name = full_name.replace("_orig_mod.", "").removesuffix("_orig_mod")
        if isinstance(module, HasHookPoints):
            for value, size in module.hook_sizes().items():
                point_name = ".".join(filter(None, (name, "" if value == LATENT else value)))
                points[point_name] = HookPoint(module, value, size, module.hook_kind)
        if outputs and name and is_replaceable(module):
            size = linear_features(module)[0 if embeds(module) else 1]
            points[f"{name}.{OUTPUT}"] = _OutputPoint(module, OUTPUT, size, OUTPUT)
    return points


def latent_points(model: nn.Module) -> dict[str, HookPoint]:
    """Return the hook points of ``model`` that are latents, by name. Raises ValueError if there is none."""
    points = {name: point for name, point in hook_points(model).items() if point.kind == LATENT}
    if not points:
        raise ValueError(
            f"{type(model).__name__} has no operator with a latent; replace some layers by relinear.HDPL, or name hook "
            "points to observe, such as 'o_proj.output'"
        )
    return points


def matching_names(points: Iterable[str], name: str) -> list[str]:
    """Return which of ``points``, the full names of a model's hook points, ``name`` means.

    Args:
        points: full names.
        name: one of them, or a dotted suffix of one or several.

    Raises:
        ValueError: if it is neither, with the nearest names.
    """
    points = list(points)
    if name in points:
        return [name]
    if names := [point for point in points if point.endswith(f".{name}")]:
        return names
    parts = str(name).count(".") + 1
    suffixes = [".".join(point.split(".")[-length:]) for length in (parts, parts + 1) for point in points]
    within = [suffix for suffix in suffixes if suffix.startswith(f"{name}.")]
    hint = did_you_mean(str(name), dict.fromkeys(within or suffixes), cutoff=0.0 if within else 0.5)
    raise ValueError(f"no latent, gate or layer output is named {quoted(name)}; {hint}")


@contextlib.contextmanager
def with_hooks(hooks: Sequence[tuple[HookPoint, ActivationHook]]) -> Iterator[None]:
    """Add hooks to hook points within the block."""
    with contextlib.ExitStack() as stack:
        if any(isinstance(point, _OutputPoint) for point, _ in hooks):
            # a compiled forward does not see forward hooks that were added or removed after it was compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for point, hook in hooks:
            stack.callback(point.add_hook(hook))
        yield


def observe(
    model: nn.Module, observer: Callable[[str, Activation], None], names: str | Iterable[str] | None = None
) -> AbstractContextManager[None]:
    """Call ``observer(name, activation)`` for every value that a forward within the block computes.

    Args:
        model: any model, compiled or not; if outputs are observed, it runs uncompiled within the block.
        observer: called with a hook point's name and its ``Activation``, after all interventions.
        names: hook points, by exact names or dotted suffixes as in ``intervene``; None means all latents.

    Raises:
        ValueError: at the call, for an unknown name, or if there is no latent.

    Examples:
        >>> model, ids = relinear.from_preset("tiny"), torch.randint(258, (1, 8))
        >>> with relinear.activations.observe(model, lambda name, activation: print(name), "o_proj.output"):
        ...     _ = model(ids)
        model.layers.0.self_attn.o_proj.output...
    """
    check_model(model, "observe")
    if not callable(observer):
        raise ValueError(f"observe takes a function of a name and an Activation, got {quoted(observer)}")
    points = latent_points(model) if names is None else hook_points(model, outputs=True)
    patterns = points if names is None else names
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        patterns = [patterns]
    chosen = dict.fromkeys(name for pattern in patterns for name in matching_names(points, pattern))
    return with_hooks(
        [(points[name], ActivationHook(observers=[functools.partial(observer, name)])) for name in chosen]
    )
