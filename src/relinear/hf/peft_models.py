"""Handle PEFT models: find the wrapped model, adapters and stock names, and warn about adapter checkpoints."""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from relinear.settings.messages import warn_user

#: PEFT's name for the layer inside an adapter
BASE_LAYER = "base_layer"
#: what PEFT, FSDP and ``torch.compile`` add to names
_ADDED = re.compile(rf"\b({BASE_LAYER}|_orig_mod|\w*_wrapped_module|original_module|modules_to_save\.\w+)(\.|$)")


def unwrapped(model: Any) -> Any:
    """Return the Hugging Face model inside a PEFT model; any other model is returned unchanged."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) and hasattr(model, "peft_config") else model


def _descends_from(module: Any, *names: str) -> bool:
    """Return whether ``module`` is of one of PEFT's classes ``names``, without importing PEFT."""
    return any(cls.__name__ in names and cls.__module__.startswith("peft.") for cls in type(module).__mro__)


def is_adapted(module: Any) -> bool:
    """Return whether ``module`` is a PEFT layer (LoRA's Linear) around a ``base_layer``."""
    return _descends_from(module, "BaseTunerLayer")


def is_added_by_peft(module: Any, child: str) -> bool:
    """Return whether PEFT added ``child`` to ``module``: an adapter's part, or a copy for ``modules_to_save``."""
    copies = _descends_from(module, "AuxiliaryTrainingWrapper", "ModulesToSaveWrapper")
    return copies or (child != BASE_LAYER and is_adapted(module))


def stock_name(name: str) -> str:
    """Return ``q_proj`` for ``q_proj.base_layer``: a name without what PEFT's layers, FSDP or compilation add."""
    return _ADDED.sub("", name).removesuffix(".")


def stock_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of ``model``, each once, by their stock names; without the parts that PEFT's adapters add.

    An adapter comes before the layer inside it, whose name it has. Of a module that PEFT trains a copy of
    (``modules_to_save``), the one in use is yielded.
    """
    seen: set[nn.Module] = set()

    def walk(module: Any, name: str) -> Iterator[tuple[str, nn.Module]]:
        if _descends_from(module, "ModulesToSaveWrapper"):
            active = "" if module.disable_adapters else next(iter(module.active_adapters), "")
            copies = dict(module.modules_to_save.items())
            module = copies.get(active, module.original_module)
        if (inner := unwrapped(module)) is not module:
            yield from walk(inner, name)
        if module not in seen:
            seen.add(module)
            yield name, module
            adapted = is_adapted(module)
            for key, child in module.named_children():
                is_inside = key == BASE_LAYER if adapted else key == "_orig_mod" or key.endswith("_wrapped_module")
                if is_inside:
                    yield from walk(child, name)
                elif not adapted:
                    yield from walk(child, f"{name}.{key}" if name else key)

    return walk(model, "")


def warn_adapters_omit(added: str, module_names: list[str]) -> None:
    """Warn that PEFT's adapter checkpoint will not contain ``added``, parts that were added; say what to do."""
    parts = sorted({stock_name(name).rpartition(".")[2] for name in module_names})
    warn_user(
        f"{added} in a PEFT model: new parameters train, but the adapter's checkpoint (model.save_pretrained) does not "
        "hold them, and layers inside an adapter cannot be merged with it. To save them, do this before "
        "peft.get_peft_model, save that model with relinear.save_pretrained"
        + (f", and name its new parts in modules_to_save={parts}" if parts else "")
    )


def unfreeze_new_parameters_(model: nn.Module, old_parameters: set[int]) -> None:
    """Set ``requires_grad`` of every parameter of ``model`` whose id is not in ``old_parameters``."""
    for parameter in model.parameters():
        if id(parameter) not in old_parameters and parameter.is_floating_point():
            parameter.requires_grad_(True)
