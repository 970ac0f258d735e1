"""Latent variables of operators: read them, intervene on them, align their moments between models.

An operator that has a latent derives from ``LatentOperator`` and passes every latent it computes to its hook, if
there is one; everything here works for any such operator. Interventions reach every hook point
(``relinear.activations.hook_points``).
"""

# Legend: R latent size

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from relinear.activations.hook_points import (
    LATENT,
    OUTPUT,
    ActivationHook,
    HookPoint,
    Latent,
    LatentOperator,
    hook_points,
)
from relinear.contract.input_checks import check_model
from relinear.contract.messages import did_you_mean, shown


def latent_operators(model: nn.Module) -> dict[str, LatentOperator]:
    """Return every operator of ``model`` that has a latent, by name (each once, also if it is aliased).

    Raises:
        ValueError: if there is none, or ``model`` is not a model.
    """
    return {name: point.module for name, point in _latent_points(model).items()}


@contextlib.contextmanager
def _with_hooks(
    points: Mapping[str, HookPoint], interventions=(), observers=(), value=None, intervened_model: Any = None
) -> Iterator[Any]:
    """Add interventions and observers, by the names of hook points, for the length of a block, which gets ``value``."""
    if getattr(intervened_model, "training", False) and getattr(intervened_model, "is_gradient_checkpointing", False):
        raise ValueError(
            "cannot intervene in training under gradient checkpointing, which recomputes without the interventions; "
            "call model.eval() or model.gradient_checkpointing_disable()"
        )
    added = []
    for name, point in points.items():
        previous = point.hook()
        outer = previous or ActivationHook()
        # A changed hook is a new object, so that a compiled forward sees the change.
        hook = ActivationHook()
        hook.interventions = [*outer.interventions, *dict(interventions).get(name, ())]
        hook.observers = [*outer.observers, *dict(observers).get(name, ())]
        added.append((point, previous))
        point.put(hook)
    try:
        yield value
    finally:
        for point, previous in added:
            point.put(previous)


def _latent_points(model: nn.Module) -> dict[str, HookPoint]:
    check_model(model, "a reader of latents")
    points = {name: point for name, point in hook_points(model).items() if point.kind == LATENT}
    if not points:
        raise ValueError(f"{type(model).__name__} has no operator with a latent; replace some layers by relinear.HDPL")
    return points


class Latents(dict[str, Latent]):
    """Latents of the last forward by operator name; filled by the forwards within the block."""

    def __missing__(self, name: str) -> Latent:
        hint = did_you_mean(name, self) if self else "no forward has run within the block"
        raise KeyError(f"no latent {name!r}; {hint}")


def latents(model: nn.Module) -> AbstractContextManager[Latents]:
    """Read latents of the last forward within the block.

    Holds z, mu and sigma of the last forward of every operator that has a latent, with their graph, also after the
    block. Costs the variance encoder in eval, which otherwise skips it. Under non-reentrant gradient
    checkpointing the latents are those of the forward itself, never of its recomputation; under ``torch.compile``
    entering and leaving the block recompiles.

    Args:
        model: a model with operators that have a latent (``HDPL``).

    Returns:
        A context manager; its block gets ``z``, where ``z[name]`` has z, mu and sigma (..., R) of the operator of this
        name.

    Raises:
        ValueError: at the call, if no operator of ``model`` has a latent.

    Examples:
        >>> model, ids = relinear.from_preset("tiny"), torch.randint(258, (1, 8))
        >>> _ = relinear.replace_(model, {"q_proj": relinear.HDPL(rank=4)})
        >>> with relinear.activations.latents(model) as z:
        ...     _ = model(ids)
        >>> z["model.layers.0.self_attn.q_proj"].mu.shape
        torch.Size([1, 8, 4])
    """
    record, points = Latents(), _latent_points(model)
    return _with_hooks(points, observers={name: [_Recorder(record, name)] for name in points}, value=record)


def observe(model: nn.Module, observer: Callable[[str, Latent], None]) -> AbstractContextManager[None]:
    """Call ``observer(name, latent)`` for every latent that a forward within the block computes."""
    return observe_hook_points(_latent_points(model), observer)


def observe_hook_points(
    points: Mapping[str, HookPoint], observer: Callable[[str, Latent], None]
) -> AbstractContextManager[None]:
    """Call ``observer(name, value)`` for every value at hook points, by their names, within the block."""
    return _with_hooks(points, observers={name: [lambda l, name=name: observer(name, l)] for name in points})


@dataclasses.dataclass(frozen=True)
class _Recorder:
    record: Latents
    name: str

    def __call__(self, latent: Latent) -> None:
        self.record[self.name] = latent


# Interventions

Values = float | Sequence[float] | Tensor


class Intervention:
    """Change a latent. Subclasses say what is checked beforehand and what happens to z."""

    def check(self, name: str, size: int) -> None:
        """Raise ValueError if this cannot be applied to the latent of ``size`` dimensions of operator ``name``."""

    def apply(self, latent: Latent) -> Tensor:
        """Return the new z (..., R)."""
        raise TypeError(f"{type(self).__name__} does not say what it does")


@dataclasses.dataclass(frozen=True, eq=False)
class _OnDims(Intervention):
    """An intervention on some dimensions, by given values."""

    def values(self) -> dict[str, Values | None]:
        """Return the values by field name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("dims", "scale")}

    def check(self, name: str, size: int) -> None:
        dims = getattr(self, "dims", None)
        if dims is not None:
            wrong = [d for d in dims if not isinstance(d, int) or not -size <= d < size]
            if wrong or not dims:
                raise ValueError(f"{name}: dims={tuple(dims)} must be indices into a latent of size {size}")
        width = size if dims is None else len(dims)
        for field, value in self.values().items():
            shape = () if value is None else torch.as_tensor(value).shape
            if shape and shape[-1] not in (1, width):
                raise ValueError(
                    f"{name}: {type(self).__name__}({field}=) of shape {tuple(shape)} must end in {width} or 1"
                )

    def apply(self, latent: Latent) -> Tensor:
        dims = getattr(self, "dims", None)
        if dims is None:
            return self.change(latent.z)
        z = latent.z.clone()
        z[..., list(dims)] = self.change(latent.z[..., list(dims)])
        return z

    def change(self, z: Tensor) -> Tensor:
        """Return the new values of the chosen dimensions z (..., R or len(dims))."""
        raise TypeError(f"{type(self).__name__} does not say what it does")


@dataclasses.dataclass(frozen=True, eq=False)
class Clamp(_OnDims):
    """Keep z, or some of its dimensions, within bounds.

    Args:
        minimum, maximum: numbers or (R,); at least one of them.
        dims: the dimensions of z that it applies to; all of them if None.

    Raises:
        ValueError: by ``intervene``, if a shape or a dimension does not fit the hook point.

    Examples:
        >>> model, ids = relinear.from_preset("tiny"), torch.randint(258, (1, 8))
        >>> with relinear.activations.intervene(model, {"o_proj.output": relinear.activations.Clamp(-0.1, 0.1)}):
        ...     logits = model(ids).logits
    """

    minimum: Values | None = None
    maximum: Values | None = None
    dims: Sequence[int] | None = None

    def check(self, name: str, size: int) -> None:
        if self.minimum is None and self.maximum is None:
            raise ValueError(f"{name}: Clamp needs a minimum, a maximum or both")
        super().check(name, size)

    def change(self, z: Tensor) -> Tensor:
        if self.minimum is not None:
            z = torch.maximum(z, _like(self.minimum, z))
        return z if self.maximum is None else torch.minimum(z, _like(self.maximum, z))


@dataclasses.dataclass(frozen=True, eq=False)
class Add(_OnDims):
    """Add ``scale * direction`` to z, or to some of its dimensions.

    Args:
        direction: a number, (R,) or anything that broadcasts to z (..., R).
        scale: factor of the direction.
        dims: the dimensions of z that it applies to; all of them if None.

    Raises:
        ValueError: by ``intervene``, if a shape or a dimension does not fit the hook point.

    Examples:
        >>> model, ids = relinear.from_preset("tiny"), torch.randint(258, (1, 8))
        >>> steer = relinear.activations.Add(torch.randn(128), scale=4.0)
        >>> with relinear.activations.intervene(model, {"down_proj.output": steer}):
        ...     logits = model(ids).logits
    """

    direction: Values
    scale: float = 1.0
    dims: Sequence[int] | None = None

    def change(self, z: Tensor) -> Tensor:
        return z + self.scale * _fitting(self.direction, z)


@dataclasses.dataclass(frozen=True, eq=False)
class Patch(_OnDims):
    """Set z, or some of its dimensions, to given values.

    Args:
        value: a number, (R,) or anything that broadcasts to z (..., R).
        dims: the dimensions of z that it applies to; all of them if None.

    Raises:
        ValueError: by ``intervene``, if a shape or a dimension does not fit the hook point.

    Examples:
        >>> model, ids = relinear.from_preset("tiny"), torch.randint(258, (1, 8))
        >>> _ = relinear.replace_(model, {"up_proj": relinear.Transponder()})
        >>> with relinear.activations.intervene(model, {"modulator.scalar": relinear.activations.Patch(1.0)}):
        ...     logits = model(ids).logits
    """

    value: Values
    dims: Sequence[int] | None = None

    def change(self, z: Tensor) -> Tensor:
        return _fitting(self.value, z).expand_as(z)


@dataclasses.dataclass(frozen=True, eq=False)
class Inject(Intervention):
    """Replace z by an outside tensor with its graph, as from a hypernetwork.

    Args:
        source: a tensor that broadcasts to z (..., R), or a function of the ``Latent`` (z, mu, sigma) that returns one;
            gradients flow into it.

    Raises:
        ValueError: by ``intervene``, if the source is neither, or its last dimension is not R.

    Examples:
        >>> model, ids = relinear.from_preset("tiny"), torch.randint(258, (1, 8))
        >>> _ = relinear.replace_(model, {"q_proj": relinear.HDPL(rank=4)})
        >>> shift = relinear.activations.Inject(lambda latent: latent.mu + 1)
        >>> with relinear.activations.intervene(model, {"q_proj": shift}):
        ...     logits = model(ids).logits
    """

    source: Tensor | Callable[[Latent], Tensor]

    def check(self, name: str, size: int) -> None:
        if isinstance(self.source, Tensor):
            if self.source.ndim == 0 or self.source.shape[-1] != size:
                raise ValueError(f"{name}: Inject got shape {tuple(self.source.shape)}; it must end in {size}")
        elif not callable(self.source):
            raise ValueError(f"{name}: Inject takes a tensor or a function of the latent, got {self.source!r}")

    def apply(self, latent: Latent) -> Tensor:
        value = self.source if isinstance(self.source, Tensor) else self.source(latent)
        return _fitting(value, latent.z).expand_as(latent.z)


def _like(value: Values, z: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=z.dtype, device=z.device)


def _fitting(value: Values, z: Tensor) -> Tensor:
    value = _like(value, z)
    extra = value.ndim > z.ndim
    if extra or any(v not in (1, s) for v, s in zip(reversed(value.shape), reversed(z.shape))):
        raise ValueError(f"values of shape {tuple(value.shape)} do not broadcast to a latent of shape {tuple(z.shape)}")
    return value


def intervene(
    model: nn.Module, interventions: Mapping[str, Intervention | Sequence[Intervention]]
) -> AbstractContextManager[None]:
    """Change latents, gates and outputs in every forward within the block.

    Args:
        model: any model, compiled or not.
        interventions: name of a hook point -> one (``Clamp``, ``Add``, ``Patch``, ``Inject``) or a sequence of them,
            applied in order. An operator with a latent has its own name, a gate its module's and its own
            ("up_proj.basis_gate", "up_proj.output_gate", "modulator.channel", "modulator.scalar"; a CGT's y is
            "transformer.context"), a linear layer's output the layer's and "output" ("o_proj.output").
            A name is exact or a dotted suffix ("q_proj" means that of every layer); a hook point that several
            names reach takes the interventions of all, in their order. Blocks nest, the outer ones come first.

    Returns:
        A context manager: forwards within its block are changed.

    Raises:
        ValueError: at the call, on a name that is none of these (naming the nearest ones) and on values of
            a wrong shape; on entry, in training under gradient checkpointing, where a backward after the block would
            recompute the forward without the interventions. Nothing has changed then.

    Examples:
        >>> model, ids = relinear.from_preset("tiny"), torch.randint(258, (1, 8))
        >>> plain = model(ids).logits
        >>> ablate = {"layers.0.self_attn.o_proj.output": relinear.activations.Patch(0.0)}
        >>> with relinear.activations.intervene(model, ablate):
        ...     torch.equal(model(ids).logits, plain)
        False
    """
    check_model(model, "intervene")
    points = hook_points(model, outputs=True)
    chosen = _by_hook_point(model, points, interventions)
    return _with_hooks({name: points[name] for name in chosen}, interventions=chosen, intervened_model=model)


def _by_hook_point(
    model: nn.Module,
    points: Mapping[str, HookPoint],
    interventions: Mapping[str, Intervention | Sequence[Intervention]],
) -> dict[str, list[Intervention]]:
    """Return the interventions by the full names of hook points, checked against their sizes."""
    if not isinstance(interventions, Mapping):
        raise ValueError(f"intervene takes a mapping such as {{'q_proj': Clamp(-1, 1)}}, got {shown(interventions)}")
    inside = [name for name, point in points.items() if point.kind != OUTPUT]
    if not inside and not any(str(pattern).rpartition(".")[2] == OUTPUT for pattern in interventions):
        raise ValueError(
            f"{type(model).__name__} has no operator with a latent or with gates; replace some layers by "
            "relinear.HDPL, relinear.CCL or relinear.Transponder, or name a layer's output, as in 'q_proj.output'"
        )
    chosen: dict[str, list[Intervention]] = {}
    for pattern, value in interventions.items():
        names = [name for name in points if name == pattern or name.endswith(f".{pattern}")]
        if not names:
            suggestion = did_you_mean(str(pattern), inside or points)
            raise ValueError(f"no latent, gate or layer output is named {shown(pattern)}; {suggestion}")
        for intervention in value if isinstance(value, Iterable) and not isinstance(value, str) else [value]:
            if not isinstance(intervention, Intervention):
                raise ValueError(f"{pattern}: expected Clamp, Add, Patch or Inject, got {shown(intervention)}")
            for name in names:
                intervention.check(name, points[name].size)
                chosen.setdefault(name, []).append(intervention)
    return chosen


# Distributions of latents


class LatentDistribution(NamedTuple):
    """Mean and standard deviation of a latent's dimensions over tokens; both (R,)."""

    mean: Tensor
    std: Tensor


def aggregated_posterior(latent: Latent) -> LatentDistribution:
    """Return the moments of the aggregated posterior: the mixture of N(mu, sigma^2) over all tokens."""
    mu = latent.mu.flatten(0, -2).to(torch.promote_types(latent.mu.dtype, torch.float32))
    variance = latent.sigma.flatten(0, -2).to(mu.dtype).square().mean(0) + mu.var(0, correction=0)
    return LatentDistribution(mu.mean(0), variance.sqrt())


Recorded = nn.Module | Mapping[str, Latent] | Mapping[str, LatentDistribution]


def moment_alignment(a: Recorded, b: Recorded, *, names: Mapping[str, str] | None = None) -> Tensor:
    """Return the squared Wasserstein-2 distance of the moments of two models' latents: a scalar loss.

    Each latent's aggregated posterior over all tokens of the last forward is taken as a diagonal Gaussian; the distance
    is |m_a - m_b|^2 + |s_a - s_b|^2, averaged over latent dimensions and operators. Differentiable in both models (run
    one under ``no_grad`` to align the other to it).

    Args:
        a, b: models within ``latents`` blocks that have run a forward, what those blocks returned, or moments by
            operator name (``relinear.training.read_moments``).
        names: operator name in ``a`` -> name in ``b``; by default equal names.

    Returns:
        A scalar tensor, at least 0, zero where all moments agree.

    Raises:
        ValueError: if no forward was recorded, the names do not match, or two latents differ in size.

    Examples:
        >>> model, ids = relinear.from_preset("tiny"), torch.randint(258, (1, 8))
        >>> _ = relinear.replace_(model, {"q_proj": relinear.HDPL(rank=4)})
        >>> with relinear.activations.latents(model) as z:
        ...     _ = model(ids)
        >>> relinear.activations.moment_alignment(z, z)
        tensor(0., grad_fn=...)
    """
    first, second = _recorded(a), _recorded(b)
    if names is None:
        differing = sorted(first.keys() ^ second.keys())
        if differing:
            raise ValueError(f"the two sides name their latents differently ({differing[0]!r}); pass names={{a: b}}")
        names = {name: name for name in first}
    if not names:
        raise ValueError("names is empty: there is nothing to align")
    distances = []
    for ours, theirs in names.items():
        for name, record in ((ours, first), (theirs, second)):
            if name not in record:
                raise ValueError(f"no latent {name!r} was recorded; {did_you_mean(name, record)}")
        (mean_a, std_a), (mean_b, std_b) = _distribution(first[ours]), _distribution(second[theirs])
        if mean_a.shape != mean_b.shape:
            raise ValueError(f"{ours} has {len(mean_a)} latent dimensions and {theirs} has {len(mean_b)}")
        distances.append(((mean_a - mean_b.to(mean_a)).square() + (std_a - std_b.to(std_a)).square()).mean())
    return torch.stack(distances).mean()


def _distribution(value: Latent | LatentDistribution) -> LatentDistribution:
    return value if isinstance(value, LatentDistribution) else aggregated_posterior(value)


def _recorded(source: Recorded) -> Mapping[str, Any]:
    record: Mapping[str, Any] = {} if isinstance(source, nn.Module) else source
    if isinstance(source, nn.Module):
        for operator in latent_operators(source).values():
            for observer in operator._latent_hook.observers if operator._latent_hook else ():
                if isinstance(observer, _Recorder):
                    record = observer.record
    if not record:
        raise ValueError(
            "no latents were recorded: run the model within `with relinear.activations.latents(model):` first"
        )
    return record
