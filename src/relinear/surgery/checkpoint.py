"""Checkpoints: how ``from_pretrained`` puts operators back before it loads their weights.

transformers lets a third party rebuild layers through a registered quantizer; nothing is quantized here. The settings
travel in ``config.json`` under ``quantization_config``, the weights in safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from relinear.core.attachment import AttachmentConfig
from relinear.core.aux import named_operators
from relinear.core.config import nearest
from relinear.core.operator import OperatorConfig, is_linear
from relinear.core.record import FORMAT_VERSION, METHOD, sync_record
from relinear.surgery.select import OWN_PREFIX
from relinear.surgery.swap import swap_module
from relinear.system.files import atomic_directory

__all__ = ["RelinearConfig", "RelinearQuantizer", "from_pretrained", "rebuild_", "save_pretrained"]

_KEYS = {"quant_method", "format_version", "operators", "attachments"}


@register_quantization_config(METHOD)
class RelinearConfig(QuantizationConfigMixin):
    """The record of a model's operators and attachments, checked on reading."""

    def __init__(self, **values: Any) -> None:
        unknown = set(values) - _KEYS
        if unknown:
            raise ValueError(f"relinear checkpoint: unknown keys {sorted(unknown)}; known: {sorted(_KEYS)}")
        missing = _KEYS - set(values)
        if missing:
            raise ValueError(f"relinear checkpoint: missing keys {sorted(missing)} in quantization_config")
        version = values["format_version"]
        if not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
            raise ValueError(
                f"relinear checkpoint: format {version!r}; this relinear reads 1 to {FORMAT_VERSION}: upgrade it"
            )
        operators, attached = values["operators"], values["attachments"]
        if not isinstance(operators, Mapping) or not isinstance(attached, list | tuple):
            raise ValueError("relinear checkpoint: 'operators' must be a mapping and 'attachments' a list")
        for setting in operators.values():
            OperatorConfig.from_dict(setting)
        for setting in attached:
            AttachmentConfig.from_dict(setting)
        self.quant_method: Any = METHOD
        self.format_version = version
        self.operators = dict(operators)
        self.attachments = list(attached)


@register_quantizer(METHOD)
class RelinearQuantizer(HfQuantizer):
    """Rebuilds operators on the meta-device skeleton; holds what is loaded to what the operators need."""

    quantization_config: RelinearConfig

    def __init__(self, quantization_config: RelinearConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            raise ValueError("operators come with a checkpoint; to add them, load the model, then relinear.replace_")

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        rebuild_(model, self.quantization_config)
        # Some models initialise children by name (GPT-2: ``self.c_proj.weight``), also when nothing is missing. What
        # they find here is marked as loaded, so that they leave it alone.
        for _, operator in named_operators(model):
            if not hasattr(operator, "weight"):
                operator.__dict__["weight"] = _loaded_placeholder()
        files = kwargs.get("checkpoint_files")
        if files:
            _check_keys(model, files)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for _, operator in named_operators(model):
            operator.__dict__.pop("weight", None)
        # An ordinary model again: floats may be cast, Trainer may train it, and save_pretrained writes the record.
        self.remove_quantization_config(model)
        model.config._is_quantized = False
        sync_record(model)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _loaded_placeholder() -> torch.Tensor:
    placeholder = torch.empty(0)
    placeholder._is_hf_initialized = True  # type: ignore[attr-defined]
    return placeholder


def _skeleton_name(model: Any, name: str) -> str:
    """``name`` as it is called in ``model``: the base-model prefix comes and goes between AutoModel classes."""
    prefix = getattr(model, "base_model_prefix", "")
    candidates = [name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"]
    for candidate in candidates:
        try:
            if is_linear(model.get_submodule(candidate)):
                return candidate
        except AttributeError:
            continue
    known = [key for key, module in model.named_modules() if is_linear(module)]
    raise ValueError(
        f"the checkpoint has an operator at {name!r}, but {type(model).__name__} has no linear layer there; "
        f"{nearest(name, known)}"
    )


def rebuild_(model: nn.Module, settings: RelinearConfig) -> None:
    """Put the recorded attachments, then the operators, into a model that is still as its class builds it.

    Raises:
        ValueError: if a recorded layer does not exist in ``model`` or cannot take its operator.
    """
    for setting in settings.attachments:
        AttachmentConfig.from_dict(setting).apply_(model)
    named = {_skeleton_name(model, name): OperatorConfig.from_dict(s) for name, s in settings.operators.items()}
    modules = list(model.named_modules(remove_duplicate=False))
    for name, config in named.items():
        source = model.get_submodule(name)
        operator = config.convert(source)
        swap_module(model, [alias for alias, module in modules if module is source], source, operator)
    sync_record(model)


def _stored_keys(files: list[str]) -> set[str]:
    keys: set[str] = set()
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise ValueError(f"{file}: relinear loads weights from safetensors only")
        try:
            with safe_open(file, framework="pt") as tensors:
                keys.update(tensors.keys())
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or cut off ({error}); restore it from a copy") from error
    return keys


def _check_keys(model: Any, files: list[str]) -> None:
    """Refuse a checkpoint with missing keys, or with unknown ones where operators or attached parts live."""
    stored = _stored_keys(files)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    own = [name + "." for name, _ in named_operators(model)]
    own += [name + "." for name, _ in model.named_modules() if name.rpartition(".")[2].startswith(OWN_PREFIX)]
    expected = set(model.state_dict())
    # A head model read from a base model's checkpoint, or the reverse, differs by this prefix.
    if not any(key in expected for key in stored):
        add = any(prefix + key in expected for key in stored)
        stored = {prefix + key if add else key.removeprefix(prefix) for key in stored}
    elif not any(key.startswith(prefix) for key in expected):
        stored = {key.removeprefix(prefix) for key in stored}
    # Models with converters (merged experts) store under other names than they use.
    converted = any(isinstance(step, WeightConverter) for step in get_model_conversion_mapping(model))
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    missing = [k for k in expected - stored - tied if not converted or k.startswith(tuple(own))]
    unknown = [key for key in stored - expected if key.startswith(tuple(own))]
    if missing or unknown:
        parts = [f"missing {_some(missing)}"] * bool(missing) + [f"unknown {_some(unknown)}"] * bool(unknown)
        raise ValueError(f"the checkpoint does not fit its own record of operators: {'; '.join(parts)}")


def _some(keys: list[str], count: int = 6) -> str:
    keys = sorted(keys)
    more = f" and {len(keys) - count} more" if len(keys) > count else ""
    return ", ".join(keys[:count]) + more


def from_pretrained(directory: str | Path, *, auto_class: Any = None, **kwargs: Any) -> Any:
    """Load a model strictly: every key of the checkpoint is used, and every parameter comes from it.

    Args:
        directory: what ``save_pretrained`` wrote (with or without operators), or a Hub name.
        auto_class: the class whose ``from_pretrained`` is called; ``AutoModelForCausalLM`` by default.
        **kwargs: handed to it (``dtype``, ``device_map``, ...).

    Raises:
        ValueError: for missing or unknown keys, damaged files, unknown operators, a newer format version.
        FileNotFoundError: if ``directory`` is a path that holds no ``config.json``.
    """
    from transformers import AutoModelForCausalLM

    path = Path(directory)
    looks_local = path.exists() or str(directory).startswith((".", "/", "~")) or str(directory).count("/") > 1
    if looks_local and not (path / "config.json").is_file():
        raise FileNotFoundError(f"{directory}: no config.json there, so no model to load")
    if path.is_dir():
        try:
            json.loads((path / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path / 'config.json'} is not valid JSON: {error}") from error
        _stored_keys([str(file) for file in sorted(path.glob("*.safetensors"))])
    loader: Any = auto_class or AutoModelForCausalLM
    model, info = loader.from_pretrained(directory, output_loading_info=True, **kwargs)
    found = {what: sorted(map(str, info[what])) for what in _PROBLEMS if info.get(what)}
    problems = [f"{what.replace('_', ' ')}: {_some(keys)}" for what, keys in found.items()]
    if problems:
        raise ValueError(
            f"{directory} was not fully rebuilt ({'; '.join(problems)}): its config.json does not describe its weights"
        )
    return model


_PROBLEMS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


def save_pretrained(model: Any, directory: str | Path, *, tokenizer: Any = None, **kwargs: Any) -> Path:
    """``model.save_pretrained`` and the tokenizer's, written beside ``directory`` and renamed: all of it or nothing.

    An existing ``directory`` is replaced once the new one is complete.

    Args:
        model: a Hugging Face model, with or without operators.
        directory: where to write.
        tokenizer: saved along if given.
        **kwargs: handed to ``model.save_pretrained`` (``max_shard_size``, ...).
    """
    with atomic_directory(directory) as temporary:
        sync_record(model)
        model.save_pretrained(temporary, **kwargs)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
    return Path(directory)
