"""Names and new parameters in a model of PEFT's."""

import warnings

from torch import nn

BASE_LAYER = "base_layer"


def stock_name(name: str) -> str:
    """The name that a layer has without what PEFT, FSDP, activation checkpointing and ``torch.compile`` put around it:
    ``q_proj`` for ``q_proj.base_layer``.
    """
    around = (BASE_LAYER, "_orig_mod")
    return ".".join(part for part in name.split(".") if part not in around and not part.endswith("_wrapped_module"))


def say_adapters_leave_out(what: str, module_names: list[str]) -> None:
    """Warn that PEFT's adapter checkpoint will not hold ``what``, which is now in the model, and say what to do."""
    parts = sorted({stock_name(name).rpartition(".")[2] for name in module_names})
    warnings.warn(
        f"{what} in a PEFT model: new parameters train, but the adapter's checkpoint (model.save_pretrained) does not "
        "hold them, and layers inside an adapter cannot be merged with it. To save them, do this before "
        "peft.get_peft_model, save that model with relinear.save_pretrained, and name its new parts in "
        f"modules_to_save={parts}",
        UserWarning,
        stacklevel=4,
    )


def train_new_parameters(model: nn.Module, known: set[int]) -> None:
    """Let every parameter of ``model`` train whose identity is not ``known``: what is new is not frozen in silence."""
    for parameter in model.parameters():
        if id(parameter) not in known and parameter.is_floating_point():
            parameter.requires_grad_(True)
