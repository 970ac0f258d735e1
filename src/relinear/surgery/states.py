"""Modules' states as one flat mapping of tensors, and back: what is kept of a few layers of a model."""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from relinear.surgery.plan import Plan, Replacement


def flat_states(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the states of modules (by their names in a model), each tensor under the name that it has in the model."""
    return {
        f"{name}.{key}": value.detach().contiguous()
        for name, module in modules.items()
        for key, value in module.state_dict().items()
    }


def unshare_parameters_(model: nn.Module, shared: Iterable[nn.Parameter]) -> None:
    """Give ``model`` its own copies of its parameters that are in ``shared``; tied ones stay tied in it."""
    copies: dict[int, nn.Parameter | None] = {id(parameter): None for parameter in shared}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in copies:
                copied = copies[id(parameter)]
                if copied is None:
                    copied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                    copies[id(parameter)] = copied
                module._parameters[name] = copied


def load_states_(model: nn.Module, names: Iterable[str], weights: Mapping[str, Tensor]) -> None:
    """Give the modules ``names`` of ``model`` the states that ``flat_states`` took.

    Their parameters become new ones: another model that holds the old ones keeps its values.

    Raises:
        RuntimeError: if ``weights`` lack a tensor of one of them, or hold one of another shape.
    """
    modules = {f"{name}.": model.get_submodule(name) for name in names}
    unshare_parameters_(model, [parameter for module in modules.values() for parameter in module.parameters()])
    for prefix, module in modules.items():
        module.load_state_dict({key.removeprefix(prefix): weights[key] for key in weights if key.startswith(prefix)})


def replace_with_states_(model: nn.Module, replacements: Iterable[Replacement], weights: Mapping[str, Tensor]) -> None:
    """Apply planned replacements with operators of known states.

    Args:
        model: that the replacements were planned for.
        weights: of every operator, named as by ``flat_states``.
    """
    replacements = tuple(replacements)
    Plan(model, replacements, "fresh").apply_()
    load_states_(model, [r.name for r in replacements], weights)
