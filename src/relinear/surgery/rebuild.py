"""Rebuild the operators of a checkpoint before transformers loads its weights.

transformers lets third parties rebuild layers by registering a quantizer; nothing is quantized here. The settings are
in ``config.json`` under ``quantization_config``, the weights in safetensors.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from relinear.contract.attachment import AttachmentConfig
from relinear.contract.config import UnknownKindError
from relinear.contract.linear_layers import is_embedding
from relinear.contract.operator import OperatorConfig, is_replaceable, named_operators
from relinear.hf.attachments import apply_attachment_, attachments
from relinear.hf.config_record import FORMAT_VERSION, METHOD, finish_surgery_
from relinear.hf.model_layout import find_module
from relinear.hf.vocabulary import token_tables
from relinear.settings.messages import did_you_mean, quoted
from relinear.surgery.packed import GROUP, SUFFIX, Unpack
from relinear.surgery.saved_config import remove_file_only_fields_
from relinear.surgery.select import PART_PREFIX
from relinear.surgery.tied import replace_layer_keeping_ties_
from relinear.system.text import some_names

_KEYS = {"quant_method", "format_version", "operators", "attachments"}


def check_record(values: Mapping[str, Any]) -> None:
    """Raise ValueError unless ``values`` is a record of operators and attachments that this version can read."""
    if not _KEYS <= set(values) <= _KEYS | {"packages", "packed"}:
        raise ValueError(f"relinear checkpoint: its keys must be {sorted(_KEYS)}, got {quoted(sorted(values))}")
    version, operators, attached = (values[key] for key in ("format_version", "operators", "attachments"))
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:  # True is an int to Python
        raise ValueError(f"relinear checkpoint: format {quoted(version)}; this version reads 1 to {FORMAT_VERSION}")
    if not isinstance(operators, Mapping) or not isinstance(attached, list | tuple):
        raise ValueError("relinear checkpoint: 'operators' must be a mapping and 'attachments' a list")
    if (packed := values.get("packed")) not in (None, *(packed_record(bits) for bits in range(2, 9))):
        raise ValueError(f"relinear checkpoint: packed must be like {packed_record(4)}, got {quoted(packed)}")
    try:
        for config in operators.values():
            OperatorConfig.from_dict(config, is_record=True)
        for config in attached:
            AttachmentConfig.from_dict(config, is_record=True)
    except UnknownKindError as error:
        raise ValueError(f"relinear checkpoint: {error}{_package_advice(values.get('packages'))}") from None


def packed_record(bits: int) -> dict[str, int]:
    """Return the entry of a record that says how parameters are stored as integers."""
    return {"bits": bits, "group": GROUP}


@register_quantization_config(METHOD)
class RelinearConfig(QuantizationConfigMixin):
    """The record of a model's operators and attachments; it is checked when it is read."""

    operators: Mapping[str, Any]
    attachments: Iterable[Any]
    packed: Mapping[str, int] | None = None

    def __init__(self, **values: Any) -> None:
        check_record(values)
        vars(self).update({key: value for key, value in values.items() if key != "packages" or value})


def _package_advice(packages: Mapping[str, Mapping[str, str]] | None) -> str:
    """Return advice about the packages that a checkpoint needs; "" if it needs none."""
    if not packages:
        return ""
    needed = ", ".join(f"{quoted(kind)} of {quoted(dict(origin))}" for kind, origin in packages.items())
    return (
        f". It was saved with operators of other packages: {needed}. Install them, or name their modules in "
        "RELINEAR_IMPORT or with relinear --import"
    )


@register_quantizer(METHOD)
class RelinearQuantizer(HfQuantizer):
    """Rebuild operators on the meta device before loading, and check the loaded weights."""

    quantization_config: RelinearConfig

    def __init__(self, quantization_config: RelinearConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            raise ValueError("operators come with a checkpoint; to add them, load the model, then relinear.replace_")

    def update_attn_implementation(self, config: Any) -> Any:
        """Remove the record, and fields that only the file needs, from the config before the model is built.

        A model with a head builds its body from the same config, and the body must not be rebuilt separately.
        """
        remove_file_only_fields_(config)
        del config.quantization_config
        return config

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for file in kwargs.get("checkpoint_files") or ():
            if not str(file).endswith(".safetensors"):
                raise ValueError(f"{file}: relinear loads weights from safetensors only")
        rebuild_(model, self.quantization_config)
        self._floats = {key for key, value in model.state_dict().items() if value.is_floating_point()}
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            from relinear.surgery.parallel import plan_for_transformers_

            plan_for_transformers_(model)
        return model

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        """Rename weights if the saved class names its body differently, and turn packed integers into floats."""
        saved, prefix, packed = _saved_prefix(model), model.base_model_prefix, self.quantization_config.packed
        renaming = [WeightRenaming(rf"^{saved}\.", f"{prefix}.")] if saved and prefix and saved != prefix else []
        unpack = [WeightConverter(rf"\{SUFFIX}$", "", [Unpack(packed["bits"])])] if packed else []
        self._steps = [*unpack, *renaming]
        return [*unpack, *super().update_weight_conversions(weight_conversions, model), *renaming]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        state = model.state_dict()
        if wrong := [key for key, value in state.items() if value.is_floating_point() != (key in self._floats)]:
            raise ValueError(f"the checkpoint has integers for floats, or floats for integers: {some_names(wrong)}")
        for name, operator in named_operators(model):
            problem = operator.problem_with_values(operator.state_dict())
            if problem is not None:
                raise ValueError(f"the checkpoint's weights of {name} are damaged: {problem}; restore them from a copy")
        # a later save must use this class's names, and floats
        model._weight_conversions = [step for step in model._weight_conversions if step not in self._steps]
        # the model must be an ordinary one that can be cast and trained; save_pretrained then writes the record
        self.remove_quantization_config(model)
        model.config._is_quantized = False
        finish_surgery_(model)
        return model

    def is_serializable(self) -> bool:
        return True

    is_trainable = is_qat_trainable = is_compileable = True  # type: ignore[assignment]


def _saved_as(model: Any) -> str:
    """Return the name of the class that the checkpoint was saved from; by default the model's class."""
    names = getattr(getattr(model, "config", None), "architectures", None)
    return str(names[0]) if names else type(model).__name__


def _saved_prefix(model: Any) -> str:
    """Return ``base_model_prefix`` of the saved class; "" if it has none or is unknown."""
    return getattr(getattr(transformers, _saved_as(model), None), "base_model_prefix", "")


def has_another_head(model: Any) -> bool:
    """Return whether ``model`` was saved from another class."""
    return _saved_as(model) != type(model).__name__


def _layer_of(model: Any, name: str) -> nn.Module | None:
    """Return the layer ``name``; None if it belongs to another task's head, which ``model`` does not have."""
    layer = find_module(model, name)
    if layer is not None and (is_replaceable(layer) or is_embedding(layer)):
        return layer
    bodies = tuple(f"{prefix}." for prefix in (_saved_prefix(model), getattr(model, "base_model_prefix", "")) if prefix)
    if bodies and not name.startswith(bodies) and has_another_head(model):
        return None
    known = [key for key, module in model.named_modules() if is_replaceable(module)]
    raise ValueError(
        f"the checkpoint has an operator at {quoted(name)}, but {type(model).__name__} has no linear layer there; "
        f"{did_you_mean(name, known)}"
    )


def rebuild_(model: nn.Module, settings: RelinearConfig) -> None:
    """Add the recorded attachments, then the operators, to a stock ``model``.

    Submodels with their own config and record may have been rebuilt already; they are left alone.

    Raises:
        ValueError: if a recorded layer does not exist in ``model`` or cannot take its operator.
    """
    present = [*attachments(model)]
    for values in settings.attachments:
        attachment = AttachmentConfig.from_dict(values, is_record=True)
        wanted = attachment.for_model(model) if has_another_head(model) else attachment
        if wanted in present:
            present.remove(wanted)
        elif wanted is not None:
            apply_attachment_(model, wanted)
    modules = list(model.named_modules(remove_duplicate=False))
    for name, values in settings.operators.items():
        source = _layer_of(model, name)
        config = OperatorConfig.from_dict(values, is_record=True)
        if source is not None and getattr(source, "config", None) != config:
            aliases = [alias for alias, module in modules if module is source]
            replace_layer_keeping_ties_(model, aliases, source, config.convert(source))
    finish_surgery_(model)


def check_loaded(model: Any, info: Mapping[str, Any]) -> None:
    """Raise ValueError unless operators and attached parts have all their weights, and no others, from a checkpoint.

    transformers only warns of missing or unknown weights, as it should of another task's head. Embeddings of tokens may
    have another vocabulary (``ignore_mismatched_sizes``).

    Args:
        model: the model that ``from_pretrained`` returned.
        info: its ``output_loading_info``.
    """
    prefixes = [name + "." for name, _ in named_operators(model)]
    prefixes += [name + "." for name, _ in model.named_modules() if name.rpartition(".")[2].startswith(PART_PREFIX)]
    mismatched = {key for key, *_ in info["mismatched_keys"]}
    if mismatched:
        tables = {id(table.weight) for table in token_tables(model)}
        mismatched -= {key for key, value in model.named_parameters() if id(value) in tables}
    reported = {"missing": info["missing_keys"], "unknown": info["unexpected_keys"], "of another shape": mismatched}
    problems = {name: [key for key in keys if key.startswith(tuple(prefixes))] for name, keys in reported.items()}
    if any(problems.values()):
        parts = "; ".join(f"{problem} {some_names(keys)}" for problem, keys in problems.items() if keys)
        raise ValueError(
            f"the checkpoint does not fit its own record of operators (quantization_config in config.json): {parts}"
        )
