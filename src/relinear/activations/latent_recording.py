"""Read operators' latents, and compare their distributions between models."""

# Legend: R latent size

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from relinear.activations.hooks import (
    Activation,
    ActivationHook,
    HookBlock,
    HookPoint,
    LatentOperator,
    hook_points,
    latent_points,
    observing_hooks,
)
from relinear.contract.input_checks import check_model
from relinear.settings.messages import did_you_mean, quoted


def latent_operators(model: nn.Module) -> dict[str, LatentOperator]:
    """Return every operator of ``model`` with a latent, by name, each once.

    Raises:
        ValueError: if there is none, or ``model`` is not a model.
    """
    return {name: point.module for name, point in latent_points(hook_points(model)).items()}


class Latents(dict[str, Activation]):
    """Map operator names to the latents of the last forward within the block; a wrong name raises with a hint."""

    def __missing__(self, name: str) -> Activation:
        hint = did_you_mean(name, self) if self else "no forward has run within the block"
        raise KeyError(f"no latent {name!r}; {hint}")


def latents(model: nn.Module) -> AbstractContextManager[Latents]:
    """Read latents of the last forward within the block.

    Records z, mu and sigma of every operator with a latent, with their graph; they stay available until the block is
    used again. In eval the block makes operators compute the variance encoder, which they otherwise skip. With
    non-reentrant gradient checkpointing the latents are the forward's, never its recomputation's. With
    ``torch.compile`` entering and leaving the block recompiles, which torch does a few times only.

    Args:
        model: a model with operators that have a latent (``HDPL``).

    Returns:
        A ``with`` block, which may be used again. It yields a mapping: ``recorded[name]`` has z, mu and sigma (..., R)
        of operator ``name``.

    Raises:
        ValueError: at the call, if no operator of ``model`` has a latent.

    Examples:
        >>> model, ids = relinear.from_preset("tiny"), torch.randint(258, (1, 8))
        >>> _ = relinear.replace_(model, {"q_proj": relinear.HDPL(rank=4)})
        >>> with relinear.activations.latents(model) as recorded:
        ...     _ = model(ids)
        >>> recorded["model.layers.0.self_attn.q_proj"].mu.shape
        torch.Size([1, 8, 4])
    """
    check_model(model, "latents")
    stored = Latents()

    def choose(points: Mapping[str, HookPoint]) -> dict[str, ActivationHook]:
        stored.clear()
        return observing_hooks(stored.__setitem__, None, points)

    return HookBlock(model, choose, stored)


class LatentDistribution(NamedTuple):
    """Distribution of a latent over tokens.

    Attributes:
        mean: mean of its dimensions (R,).
        std: standard deviation of its dimensions (R,).
    """

    mean: Tensor
    std: Tensor


def aggregated_posterior(latent: Activation) -> LatentDistribution:
    """Return mean and standard deviation of the aggregated posterior: the mixture of N(mu, sigma^2) over all tokens."""
    mu = latent.mu.flatten(0, -2).to(torch.promote_types(latent.mu.dtype, torch.float32))
    variance = latent.sigma.flatten(0, -2).to(mu.dtype).square().mean(0) + mu.var(0, correction=0)
    # the gradient of a root at 0 is infinite
    std = torch.where(variance > 0, variance, 1.0).sqrt() * (variance > 0)
    return LatentDistribution(mu.mean(0), std)


LatentsByName = Mapping[str, Activation] | Mapping[str, LatentDistribution]


def moment_alignment(a: LatentsByName, b: LatentsByName, *, names: Mapping[str, str] | None = None) -> Tensor:
    """Return the squared Wasserstein-2 distance of the moments of two models' latents: a scalar loss.

    Each latent's aggregated posterior over all tokens of the last forward is approximated by a diagonal Gaussian. The
    distance is |m_a - m_b|^2 + |s_a - s_b|^2, averaged over latent dimensions and operators. It is differentiable in
    both models; run one under ``no_grad`` to align the other to it.

    Args:
        a, b: what a ``latents`` block yielded, or distributions by operator name
            (``relinear.training.read_moments``).
        names: operator name in ``a`` -> name in ``b``; by default equal names.

    Returns:
        A scalar tensor, at least 0, and 0 if all moments agree.

    Raises:
        ValueError: if no forward was recorded, the names do not match, or two latents differ in size.

    Examples:
        >>> model, ids = relinear.from_preset("tiny"), torch.randint(258, (1, 8))
        >>> _ = relinear.replace_(model, {"q_proj": relinear.HDPL(rank=4)})
        >>> with relinear.activations.latents(model) as recorded:
        ...     _ = model(ids)
        >>> relinear.activations.moment_alignment(recorded, recorded)
        tensor(0., grad_fn=...)
    """
    first, second = _checked(a), _checked(b)
    if names is not None and not (isinstance(names, Mapping) and names):
        raise ValueError(f"names must map names in a to names in b, got {quoted(names)}")
    if names is None:
        differing = sorted(first.keys() ^ second.keys())
        if differing:
            raise ValueError(f"the two sides name their latents differently ({differing[0]!r}); pass names={{a: b}}")
        names = {name: name for name in first}
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


def _distribution(value: Any) -> LatentDistribution:
    if isinstance(value, LatentDistribution):
        return value
    if isinstance(value, Activation):
        return aggregated_posterior(value)
    raise ValueError(f"expected a latent or a LatentDistribution, got {quoted(value)}")


def _checked(source: LatentsByName | nn.Module) -> Mapping[str, Any]:
    """Return the latents or distributions by operator name; raise ValueError if there are none."""
    by_name = _stored_around(source) if isinstance(source, nn.Module) else source
    if not isinstance(by_name, Mapping):
        raise ValueError(f"moment_alignment takes what a `latents` block yields, got {quoted(by_name)}")
    if not by_name:
        raise ValueError(
            "no latents were recorded: run the model within `with relinear.activations.latents(model):` first"
        )
    return by_name


def _stored_around(model: nn.Module) -> Mapping[str, Activation]:
    """Return what the innermost ``latents`` block around this call has stored of ``model``, and warn."""
    warnings.warn(
        "moment_alignment takes what `with latents(model) as ...` yields; a model works in this version only",
        DeprecationWarning,
        stacklevel=4,
    )
    hooks = [hook for point in latent_points(hook_points(model)).values() for hook in point.hooks]
    observers: list[Any] = [observer for hook in hooks for observer in hook.observers]
    owners = [getattr(observer.func, "__self__", None) for observer in observers]  # partials, made by ``observe``
    return next((owner for owner in reversed(owners) if isinstance(owner, Latents)), {})
