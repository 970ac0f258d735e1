"""Interventions: change latents, gates and layers' outputs during a forward pass."""

# Legend: R latent size

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from relinear.activations.hooks import (
    Activation,
    ActivationHook,
    HookBlock,
    HookPoint,
    Intervention,
    matching_names,
)
from relinear.contract.input_checks import check_model
from relinear.deprecated import warn_renamed, with_attributes_of_0_2, with_renamed_keyword
from relinear.hf.model_layout import is_checkpointing
from relinear.settings.messages import quoted

Values = float | Sequence[float] | Tensor


class _DimensionIntervention(Intervention):
    """Base of interventions that change all dimensions, or those in ``dims``."""

    dims: Sequence[int] | Tensor | None

    def __post_init__(self) -> None:
        if self.dims is not None:
            object.__setattr__(self, "dims", _indices(self.dims))
        for value in self.arguments().values():
            _as_tensor(value)

    def arguments(self) -> dict[str, Any]:
        """Return the numbers to compute with, by argument."""
        raise NotImplementedError(f"{type(self).__name__} does not implement arguments")

    def check(self, name: str, size: int) -> None:
        dims = [] if self.dims is None else [int(d) for d in self.dims]
        if not all(-size <= d < size for d in dims) or len({d % size for d in dims}) < len(dims):
            raise ValueError(f"{name}: dims={quoted(self.dims)} must be different indices into its {size} dimensions")
        width = size if self.dims is None else len(self.dims)
        for argument, value in self.arguments().items():
            shape = _as_tensor(value).shape
            if shape and shape[-1] not in (1, width):
                raise ValueError(
                    f"{name}: {type(self).__name__}({argument}=) of shape {tuple(shape)} must end in {width} or 1"
                )

    def apply(self, activation: Activation) -> Tensor:
        if self.dims is None:
            return self.change(activation)
        z = activation.z.clone()
        z[..., self.dims] = self.change(Activation(*(part[..., self.dims] for part in activation)))
        return z

    def change(self, activation: Activation) -> Tensor:
        """Return the new z (..., R or len(dims)) of an activation in the chosen dimensions."""
        raise NotImplementedError(f"{type(self).__name__} does not implement change")


@dataclasses.dataclass(frozen=True, eq=False)
class Clamp(_DimensionIntervention):
    """Keep z, or some of its dimensions, within bounds.

    Attributes:
        minimum: a number or (R,); None for no bound.
        maximum: a number or (R,); None for no bound. At least one of the two is given.
        dims: indices of the dimensions of z that it applies to; all of them if None.

    Raises:
        ValueError: if ``minimum`` is above ``maximum``; by ``intervene``, if a shape or a dimension does not fit the
            hook point.

    Examples:
        >>> model, ids = relinear.from_preset("tiny"), torch.randint(258, (1, 8))
        >>> with relinear.activations.intervene(model, {"o_proj.output": relinear.activations.Clamp(-0.1, 0.1)}):
        ...     logits = model(ids).logits
    """

    minimum: Values | None = None
    maximum: Values | None = None
    dims: Sequence[int] | Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = [_as_tensor(value) for value in self.arguments().values()]
        if not bounds:
            raise ValueError("Clamp needs a minimum, a maximum or both")
        have_one_shape = bounds[0].ndim == 0 or bounds[-1].ndim == 0 or bounds[0].shape == bounds[-1].shape
        if have_one_shape and not bool((bounds[0] <= bounds[-1]).all()):  # nor if one is NaN
            values = f"minimum={quoted(self.minimum)}, maximum={quoted(self.maximum)}"
            raise ValueError(f"Clamp({values}): the minimum must be a number that is at most the maximum")

    def arguments(self) -> dict[str, Any]:
        bounds = {"minimum": self.minimum, "maximum": self.maximum}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def change(self, activation: Activation) -> Tensor:
        z = activation.z
        if self.minimum is not None:
            z = torch.maximum(z, _broadcastable(self.minimum, z))
        return z if self.maximum is None else torch.minimum(z, _broadcastable(self.maximum, z))


@dataclasses.dataclass(frozen=True, eq=False)
class Add(_DimensionIntervention):
    """Add ``scale * direction`` to z, or to some of its dimensions.

    Attributes:
        direction: a number, (R,) or anything that broadcasts to z (..., R).
        scale: factor of the direction: a number or (R,).
        dims: indices of the dimensions of z that it applies to; all of them if None.

    Raises:
        ValueError: by ``intervene``, if a shape or a dimension does not fit the hook point.

    Examples:
        >>> model, ids = relinear.from_preset("tiny"), torch.randint(258, (1, 8))
        >>> steer = relinear.activations.Add(torch.randn(128), scale=4.0)
        >>> with relinear.activations.intervene(model, {"down_proj.output": steer}):
        ...     logits = model(ids).logits
    """

    direction: Values
    scale: Values = 1.0
    dims: Sequence[int] | Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        return {"direction": self.direction, "scale": self.scale}

    def change(self, activation: Activation) -> Tensor:
        return activation.z + _broadcastable(self.scale, activation.z) * _broadcastable(self.direction, activation.z)


@dataclasses.dataclass(frozen=True, eq=False)
class Patch(_DimensionIntervention):
    """Set z, or some of its dimensions, to other values, such as the output of a hypernetwork; gradients flow into it.

    Attributes:
        value: a number, (R,), what broadcasts to z (..., R), or a function of the ``Activation`` that returns it.
        dims: indices of the dimensions of z that it applies to, and that a function is given; all of them if None.

    Raises:
        ValueError: by ``intervene``, if a shape or a dimension does not fit the hook point.

    Examples:
        >>> model, ids = relinear.from_preset("tiny"), torch.randint(258, (1, 8))
        >>> _ = relinear.replace_(model, {"q_proj": relinear.HDPL(rank=4)})
        >>> shift = relinear.activations.Patch(lambda latent: latent.mu + 1)
        >>> with relinear.activations.intervene(model, {"q_proj": shift}):
        ...     logits = model(ids).logits
    """

    value: Values | Callable[[Activation], Tensor]
    dims: Sequence[int] | Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        return {} if callable(self.value) else {"value": self.value}

    def change(self, activation: Activation) -> Tensor:
        value = self.value(activation) if callable(self.value) else self.value
        return _broadcastable(value, activation.z).expand_as(activation.z)


@with_attributes_of_0_2
class Inject(Patch):
    """Set z to the values of ``source``: the earlier name of ``Patch(source)``, which works for one more version.

    Examples:
        >>> model, ids = relinear.from_preset("tiny"), torch.randint(258, (1, 8))
        >>> with relinear.activations.intervene(model, {"o_proj.output": relinear.activations.Inject(torch.ones(1))}):
        ...     logits = model(ids).logits
    """

    def __init__(self, source: Tensor | Callable[[Activation], Tensor]) -> None:
        warn_renamed("Inject", "Patch")
        super().__init__(source)


def _indices(dims: Any) -> list[int]:
    """Return ``dims`` as a list of ints. Raises ValueError for anything but integers, bools included."""
    with contextlib.suppress(RuntimeError, TypeError, ValueError):
        if len(dims) and not any(torch.as_tensor(d).dtype == torch.bool for d in dims):
            return [operator.index(d) for d in dims]
    raise ValueError(f"dims={quoted(dims)} must be indices of dimensions; such as [3]; for a mask, pass mask.nonzero()")


def _as_tensor(value: Any, **options: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(value, **options)
    except (RuntimeError, TypeError, ValueError):
        tensor = None
    if tensor is None or tensor.is_complex():
        expected = "a real number, a sequence of them or a tensor"
        raise ValueError(f"an intervention's value must be {expected}, got {quoted(value)}")
    return tensor


def _broadcastable(value: Values, z: Tensor) -> Tensor:
    value = _as_tensor(value, dtype=z.dtype, device=z.device)
    extra = value.ndim > z.ndim
    if extra or any(v not in (1, s) for v, s in zip(reversed(value.shape), reversed(z.shape))):
        raise ValueError(
            f"values of shape {tuple(value.shape)} do not broadcast to an activation of shape {tuple(z.shape)}"
        )
    return value


@with_renamed_keyword("edits", "interventions")
def intervene(
    model: nn.Module, interventions: Mapping[str, Intervention | Sequence[Intervention]]
) -> AbstractContextManager[None]:
    """Change latents, gates and outputs in every forward within the block.

    Args:
        model: any model, compiled or not. Within a block with hooks on outputs, nothing runs compiled. Other blocks
            make a compiled model compile anew, which torch does a few times only.
        interventions: name of a hook point -> one (``Clamp``, ``Add``, ``Patch``) or a sequence of them, applied in
            order. Names are full ones or patterns as for ``replace_`` ("q_proj" is that of every layer): of an operator
            for its latent; of a gate ("up_proj.basis_gate", "up_proj.output_gate", "modulator.channel",
            "modulator.scalar"); "transformer.context" for a CGT's y; of a linear layer's output ("o_proj.output"). If
            several names match a hook point, all their interventions apply, in order. In nested blocks the outer
            block's apply first.

    Returns:
        A ``with`` block, which may be used again: forwards within it are changed, in all threads. It changes the
        modules that are in use when it begins: of those that PEFT copies (``modules_to_save``), the copy of the active
        adapter.

    Raises:
        ValueError: at the call or on entry, for an unknown name (with the nearest names) or values of a wrong shape;
            the model is then unchanged. Also before a forward in training mode with gradient checkpointing: a backward
            after the block would recompute it without the interventions.

    Examples:
        >>> model, ids = relinear.from_preset("tiny"), torch.randint(258, (1, 8))
        >>> plain = model(ids).logits
        >>> ablate = {"layers.0.self_attn.o_proj.output": relinear.activations.Patch(0.0)}
        >>> with relinear.activations.intervene(model, ablate):
        ...     torch.equal(model(ids).logits, plain)
        False
    """
    check_model(model, "intervene")
    return HookBlock(model, functools.partial(_hooks_by_name, interventions), None, _check_not_checkpointing)


def _check_not_checkpointing(model: nn.Module) -> None:
    if is_checkpointing(model):
        raise ValueError(
            "cannot intervene in training under gradient checkpointing, which recomputes without the interventions; "
            "call model.eval() or model.gradient_checkpointing_disable()"
        )


def _hooks_by_name(
    interventions: Mapping[str, Intervention | Sequence[Intervention]], points: Mapping[str, HookPoint]
) -> dict[str, ActivationHook]:
    """Return the hooks by full names of hook points, after checking interventions against the points' sizes."""
    if not isinstance(interventions, Mapping):
        raise ValueError(f"intervene takes a mapping such as {{'q_proj': Clamp(-1, 1)}}, got {quoted(interventions)}")
    chosen: dict[str, list[Intervention]] = {}
    for pattern, value in interventions.items():
        names = matching_names(points, pattern)
        for intervention in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
            if not isinstance(intervention, Intervention):
                raise ValueError(f"{pattern}: expected Clamp, Add or Patch, got {quoted(intervention)}")
            for name in names:
                intervention.check(name, points[name].size)
                chosen.setdefault(name, []).append(intervention)
    return {name: ActivationHook(added) for name, added in chosen.items()}
