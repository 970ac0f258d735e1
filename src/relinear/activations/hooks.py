"""Hook points: activations inside a model that can be read and changed while it runs.

- An operator's latent has the operator's name, ``model.layers.0.self_attn.q_proj``.
- A gate has its module's name followed by its own, ``...up_proj.basis_gate``, ``...down_proj.modulator.channel``.
- A layer's output has the layer's name followed by ``output``.

Blocks (``intervene``, ``observe``) set an ``ActivationHook`` each. The module passes its value to all of them and uses
the result.
"""

# Legend: R size of the hook point

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from relinear.contract.auxiliary_mixin import is_recomputing
from relinear.contract.input_checks import check_model
from relinear.contract.linear_layers import embeds, linear_features
from relinear.contract.operator import Operator, is_replaceable
from relinear.deprecated import adopt_renamed_attributes, warn_renamed, with_attributes_of_0_2
from relinear.hf.peft_models import is_adapted, stock_modules
from relinear.settings.messages import did_you_mean, quoted
from relinear.settings.patterns import check_patterns, matches

T = TypeVar("T")

#: kinds of hook points, and the names of the values in their modules; a latent is called by its module's name alone
OUTPUT = "output"
LATENT = "latent"
#: attribute of ``HasHookPoints`` with the hooks by name
ACTIVATION_HOOKS = "activation_hooks"


class Activation(NamedTuple):
    """A value of one forward: a latent, gate or output, with its distribution if it is a Gaussian latent.

    Attributes:
        z: the value (..., R); named as in variational models, also for gates and outputs.
        mu: mean (..., R) of the distribution that z is drawn from; z if there is none. Interventions change z alone.
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
    """What one block does at a hook point.

    Attributes:
        interventions: applied in order.
        observers: called with the activation after the interventions of all blocks.
    """

    interventions: Sequence[Intervention] = ()
    observers: Sequence[Observer] = ()


def apply_hooks(hooks: Sequence[ActivationHook], activation: Activation) -> Tensor:
    """Return the value after all interventions, and show it to all observers."""
    interventions = [one for hook in hooks for one in hook.interventions]
    if interventions:  # which may change z in place: the module compares what it passed with what it gets
        activation = activation._replace(z=activation.z.clone())
    for intervention in interventions:
        z = intervention.apply(activation)
        shape, dtype = tuple(activation.z.shape), activation.z.dtype
        if not isinstance(z, Tensor) or (tuple(z.shape), z.dtype) != (shape, dtype):
            got = f"{z.dtype} {tuple(z.shape)}" if isinstance(z, Tensor) else quoted(z)
            expected = f"{type(intervention).__name__}.apply must return a tensor {dtype} {shape}"
            raise ValueError(f"{expected}, got {got}")
        activation = activation._replace(z=z)
    if not is_recomputing():  # which is not a new observation
        for observer in (one for hook in hooks for one in hook.observers):
            observer(activation)
    return activation.z


@with_attributes_of_0_2
class HasHookPoints:
    """Give a module, such as a gate, hook points: its ``forward`` passes each value through ``hooked``.

    Attributes:
        hook_kind: kind of all values but "latent", in one word.
        activation_hooks: the hooks by name, of the outermost block first; None if there are none, so that values need
            not be computed for them.
    """

    hook_kind: str = "gate"
    activation_hooks: Mapping[str, tuple[ActivationHook, ...]] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adopt_renamed_attributes(cls)

    def hook_sizes(self) -> dict[str, int]:
        """Return name -> R for every value; names have no dots, and "output" is taken."""
        raise NotImplementedError(f"{type(self).__name__} does not implement hook_sizes")

    @property
    def is_intervened(self) -> bool:
        """Return whether a hook changes values; if none does, ``forward`` may still use its fused kernel."""
        if self.activation_hooks is None:
            return False
        return any(hook.interventions for hooks in self.activation_hooks.values() for hook in hooks)

    def hooked(self, name: str, value: Tensor | Activation) -> Tensor:
        """Return the value ``name`` (..., R), or the z of an ``Activation``, after its hooks."""
        z = value.z if isinstance(value, Activation) else value
        if self.activation_hooks is None:
            return z
        if self.hook_sizes().get(name) != z.shape[-1]:
            raise ValueError(f"{type(self).__name__}: hook_sizes has no {name!r} of size {z.shape[-1]}")
        hooks = self.activation_hooks.get(name)
        if hooks is None:
            return z
        return apply_hooks(hooks, value if isinstance(value, Activation) else as_activation(value))

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()  # a copy has no hooks
        return {**state, ACTIVATION_HOOKS: None}


class LatentOperator(HasHookPoints, Operator):
    """Base of operators with a latent: ``forward`` passes it through ``hooked("latent", ...)``, then decodes it."""

    @property
    def latent_size(self) -> int:
        """Return R, the number of latent dimensions."""
        raise NotImplementedError(f"{type(self).__name__} does not implement latent_size")

    @property
    def _latent_tap(self) -> Callable[[Activation], Tensor] | None:  # operators of 0.2 call it
        warn_renamed(f"{type(self).__name__}._latent_tap", 'hooked("latent", ...)')
        return functools.partial(self.hooked, LATENT) if LATENT in (self.activation_hooks or {}) else None

    def hook_sizes(self) -> dict[str, int]:
        return {LATENT: self.latent_size}


@dataclasses.dataclass(eq=False)
class HookPoint:
    """Name a value of a module to which hooks can be attached.

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

    @property
    def hooks(self) -> tuple[ActivationHook, ...]:
        """Return the hooks that are set, of the outermost block first."""
        return (self.module.activation_hooks or {}).get(self.name, ())

    def set_hooks(self, hooks: tuple[ActivationHook, ...]) -> None:
        """Set the hooks in place of others."""
        # a new mapping, so that a compiled forward sees the change
        changed = {**(self.module.activation_hooks or {}), self.name: hooks}
        self.module.activation_hooks = {name: hooks for name, hooks in changed.items() if hooks} or None

    def remove_hook(self, hook: ActivationHook) -> None:
        """Remove one of the hooks."""
        self.set_hooks(tuple(other for other in self.hooks if other is not hook))


class _OutputHook:
    """Forward hook that passes a layer's output to activation hooks; in a copy of the layer it removes itself."""

    def __init__(self, hooks: tuple[ActivationHook, ...]) -> None:
        self.hooks = hooks

    def __call__(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        if self.hooks:
            return apply_hooks(self.hooks, as_activation(output))
        _remove_output_hook(module)  # so that the copy may use its fused kernels
        return output

    def __getstate__(self) -> dict[str, Any]:
        return {"hooks": ()}


def _remove_output_hook(module: nn.Module) -> None:
    hooks = module._forward_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, _OutputHook)]:
        del hooks[key]


class _OutputPoint(HookPoint):
    @property
    def hooks(self) -> tuple[ActivationHook, ...]:
        forward_hooks = self.module._forward_hooks.values()
        return next((hook.hooks for hook in forward_hooks if isinstance(hook, _OutputHook)), ())

    def set_hooks(self, hooks: tuple[ActivationHook, ...]) -> None:
        _remove_output_hook(self.module)
        if hooks:
            self.module.register_forward_hook(_OutputHook(hooks))


def hook_points(model: nn.Module, *, outputs: bool = False) -> dict[str, HookPoint]:
    """Return the hook points of ``model`` by name, in the order of its modules.

    Args:
        model: any model, compiled or not. Names are those that it has without PEFT and ``torch.compile``; the output
            of a layer with an adapter is that of both. Of a module that PEFT trains a copy of, the point is in the one
            in use now.
        outputs: whether to list the outputs of linear layers and operators, too. Stock embeddings, and a head that is
            tied to a replaced one, have none.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> _ = relinear.replace_(model, {"q_proj": relinear.HDPL(rank=4)}, layers=[0])
        >>> relinear.activations.hook_points(model)
        {'model.layers.0.self_attn.q_proj': HookPoint(..., name='latent', size=4, kind='latent')}
    """
    check_model(model, "hook_points")
    points: dict[str, HookPoint] = {}
    module: Any
    for name, module in stock_modules(model):
        if isinstance(module, HasHookPoints):
            for value, size in module.hook_sizes().items():
                if "." in value or value == OUTPUT:
                    raise ValueError(f"{type(module).__name__}.hook_sizes: {value!r} has a dot or is 'output'")
                point_name = ".".join(filter(None, (name, "" if value == LATENT else value)))
                points[point_name] = HookPoint(module, value, size, LATENT if value == LATENT else module.hook_kind)
        layer: Any = module.get_base_layer() if is_adapted(module) else module
        if outputs and name and is_replaceable(layer):
            size = linear_features(layer)[0 if embeds(layer) else 1]
            points.setdefault(f"{name}.{OUTPUT}", _OutputPoint(module, OUTPUT, size, OUTPUT))
    return points


def latent_points(points: Mapping[str, HookPoint]) -> dict[str, HookPoint]:
    """Return those of ``points`` that are latents, by name. Raises ValueError if there is none."""
    latents = {name: point for name, point in points.items() if point.kind == LATENT}
    if not latents:
        raise ValueError(
            "the model has no operator with a latent; replace some layers by relinear.HDPL, or name hook points to "
            "observe, such as 'o_proj.output'"
        )
    return latents


def matching_names(points: Iterable[str], pattern: str) -> list[str]:
    """Return which of ``points``, the full names of a model's hook points, ``pattern`` matches.

    Args:
        points: full names.
        pattern: one of them, which means it alone, or a pattern as for ``replace_``, but for "all-linear".

    Raises:
        ValueError: if it matches none, with the nearest names.
    """
    points = list(points)
    if pattern in points:
        return [pattern]
    check_patterns([pattern])
    if names := [point for point in points if matches(pattern, point)]:
        return names
    parts = pattern.count(".") + 1
    suffixes = [".".join(point.split(".")[-length:]) for length in (parts, parts + 1) for point in points]
    within = [suffix for suffix in suffixes if suffix.startswith(f"{pattern}.")]
    hint = did_you_mean(pattern, dict.fromkeys(within or suffixes), cutoff=0.0 if within else 0.5)
    raise ValueError(f"no latent, gate or layer output is named {quoted(pattern)}; {hint}")


def check_not_hooked(model: nn.Module, caller: str) -> None:
    """Raise ValueError, naming the function ``caller``, within a block that has set hooks on ``model``."""
    name = next((name for name, point in hook_points(model, outputs=True).items() if point.hooks), None)
    if name is not None:
        raise ValueError(
            f"{name} has a hook, which {caller} would lose; leave the `with` block of intervene, observe or latents"
        )


class _EagerMode:
    """Run all compiled functions uncompiled while any block has hooks on outputs, in whatever order blocks end.

    A compiled forward does not see forward hooks that were added or removed after it was compiled.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._blocks == 0:
                self._stance = torch.compiler.set_stance("force_eager")
            self._blocks += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0:
                self._stance.__exit__(None, None, None)


_eager_mode = _EagerMode()


class _ForwardCheck:
    """Forward pre-hook that calls ``check`` with the model; in a copy of the model it does nothing."""

    def __init__(self, check: Callable[[nn.Module], None] | None) -> None:
        self.check = check

    def __call__(self, model: nn.Module, args: tuple) -> None:
        if self.check is not None:
            self.check(model)

    def __getstate__(self) -> dict[str, Any]:
        return {"check": None}


class HookBlock(AbstractContextManager[T]):
    """Set hooks on a model's hook points within ``with`` blocks, which may nest, repeat and end in any order.

    Args:
        model: any model.
        choose: returns the hooks by name, given all hook points of the model. It is called at once, so that its errors
            are raised at the call, and on every entry, as the model may have changed.
        value: what ``with ... as`` binds.
        check: called with the model before ``choose`` and before forwards, and raises if these would go wrong.
    """

    def __init__(
        self,
        model: nn.Module,
        choose: Callable[[Mapping[str, HookPoint]], Mapping[str, ActivationHook]],
        value: T,
        check: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self._model, self._choose, self._value, self._check = model, choose, value, check
        self._exits: list[contextlib.ExitStack] = []
        self._points_and_hooks()

    def _points_and_hooks(self) -> tuple[Mapping[str, HookPoint], Mapping[str, ActivationHook]]:
        if self._check is not None:
            self._check(self._model)
        points = hook_points(self._model, outputs=True)
        return points, self._choose(points)

    def __enter__(self) -> T:
        points, hooks = self._points_and_hooks()
        with contextlib.ExitStack() as stack:
            if any(points[name].kind == OUTPUT for name in hooks):
                stack.enter_context(_eager_mode)
            for name, hook in hooks.items():
                stack.callback(points[name].remove_hook, hook)
                points[name].set_hooks((*points[name].hooks, hook))
            if self._check is not None:
                stack.callback(self._model.register_forward_pre_hook(_ForwardCheck(self._check)).remove)
            self._exits.append(stack.pop_all())
        return self._value

    def __exit__(self, *exception: object) -> None:
        self._exits.pop().close()


def observe(
    model: nn.Module, observer: Callable[[str, Activation], None], names: str | Iterable[str] | None = None
) -> AbstractContextManager[None]:
    """Call ``observer(name, activation)`` for every value that a forward within the block computes.

    Args:
        model: any model, compiled or not; if outputs are observed, nothing runs compiled within the block.
        observer: called with a hook point's name and its ``Activation``, after all interventions.
        names: one or several patterns, as in ``intervene``; None means all latents.

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
    if names is not None:
        names = list(names) if isinstance(names, Iterable) and not isinstance(names, str) else [names]
    return HookBlock(model, functools.partial(observing_hooks, observer, names), None)


def observing_hooks(
    observer: Callable[[str, Activation], None], patterns: Sequence[str] | None, points: Mapping[str, HookPoint]
) -> dict[str, ActivationHook]:
    """Return hooks that call ``observer``, by name, for the ``points`` that ``patterns`` match; None: all latents."""
    if patterns is None:
        chosen: Iterable[str] = latent_points(points)
    else:
        chosen = dict.fromkeys(name for pattern in patterns for name in matching_names(points, pattern))
    return {name: ActivationHook(observers=[functools.partial(observer, name)]) for name in chosen}
