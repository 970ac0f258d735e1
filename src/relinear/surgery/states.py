"""Modules' states as one flat mapping of tensors, and back: what is kept of a few layers of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from relinear.surgery.plan import Plan, Replacement

__all__ = ["flat_states", "load_states_", "place_"]


def flat_states(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The states of modules (by their names in a model), each tensor under the name that it has in the model."""
    return {
        f"{name}.{key}": value.detach().contiguous()
        for name, module in modules.items()
        for key, value in module.state_dict().items()
    }


def load_states_(model: nn.Module, names: Iterable[str], weights: Mapping[str, Tensor]) -> None:
    """Give the modules ``names`` of ``model`` the states that ``flat_states`` took.

    Raises:
        RuntimeError: if ``weights`` lack a tensor of one of them, or hold one of another shape.
    """
    for name in names:
        prefix = f"{name}."
        own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
        model.get_submodule(name).load_state_dict(own)


def place_(model: nn.Module, replacements: Iterable[Replacement], weights: Mapping[str, Tensor]) -> None:
    """Carry out planned replacements with operators of known states.

    Args:
        model: that the replacements were planned for.
        weights: of every operator, named as by ``flat_states``.
    """
    replacements = tuple(replacements)
    Plan(model, replacements, "fresh").apply_()
    load_states_(model, [r.name for r in replacements], weights)
