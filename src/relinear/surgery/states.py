"""Collect the states of a model's layers in one flat mapping of tensors, and load them back."""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from relinear.surgery.plan import Plan, Replacement


def flat_states(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the tensors of ``modules`` (by name in a model), each under its full name in the model."""
    return {
        f"{name}.{key}": value.detach().contiguous()
        for name, module in modules.items()
        for key, value in module.state_dict().items()
    }


def unshare_parameters_(model: nn.Module, shared: Iterable[nn.Parameter]) -> None:
    """Replace parameters of ``model`` that are in ``shared`` by copies; tied parameters stay tied."""
    copies = {parameter: nn.Parameter(parameter.detach().clone(), parameter.requires_grad) for parameter in shared}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = copies.get(parameter, parameter)


def load_states_(model: nn.Module, names: Iterable[str], weights: Mapping[str, Tensor]) -> None:
    """Load the states from ``flat_states`` into the modules ``names`` of ``model``.

    The modules get new parameters, so another model that shares the old ones is unchanged.

    Raises:
        RuntimeError: if ``weights`` lacks a tensor of these modules or has one of another shape.
    """
    modules = {f"{name}.": model.get_submodule(name) for name in names}
    unshare_parameters_(model, [parameter for module in modules.values() for parameter in module.parameters()])
    for prefix, module in modules.items():
        module.load_state_dict({key.removeprefix(prefix): weights[key] for key in weights if key.startswith(prefix)})


def replace_with_states_(model: nn.Module, replacements: Iterable[Replacement], weights: Mapping[str, Tensor]) -> None:
    """Apply planned replacements and load the operators' states.

    Args:
        model: the model that the replacements were planned for.
        weights: every operator's tensors, from ``flat_states``.
    """
    replacements = tuple(replacements)
    Plan(model, replacements, "fresh").apply_()
    load_states_(model, [r.name for r in replacements], weights)
