"""Patch the few functions of transformers and PEFT that offer no hook to third parties.

Models without operators are not affected: their configs have no record, so the original function decides. See
``docs/ecosystem.md`` for what each patch is needed for.
"""

import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import is_peft_available

from relinear.contract.linear_layers import embeds
from relinear.contract.operator import Operator
from relinear.contract.wrapper import Wrapper
from relinear.hf.config_record import make_record, parse_record, record_in_config
from relinear.hf.initialization import INITIALIZED, initialize_
from relinear.hf.peft_models import is_adapted
from relinear.hf.vocabulary import token_tables
from relinear.surgery.rebuild import RelinearConfig, check_loaded, rebuild_
from relinear.surgery.saved_config import needs_loader, remove_file_only_fields_, write_config
from relinear.surgery.tied import untie_config_

_MARK = "_relinear_original"


def install() -> None:
    """Patch the functions (idempotent); called when relinear is imported."""
    _patch(PreTrainedConfig, "to_json_file", _to_json_file)
    _patch(PreTrainedModel, "save_pretrained", _save_pretrained)
    _patch(PreTrainedModel, "_from_config", _from_config)
    _patch(PreTrainedModel, "from_pretrained", _from_pretrained)
    _patch(PreTrainedModel, "_resize_token_embeddings", _resize_token_embeddings)
    _patch(PreTrainedModel, "_initialize_weights", _initialize_weights)
    if is_peft_available():  # a plain ``LoraConfig`` may target operators, for which PEFT would raise an error
        from peft.tuners.lora.model import LoraModel

        if hasattr(LoraModel, "_create_new_module"):
            _patch(LoraModel, "_create_new_module", _create_new_module)


def _patch(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    """Make ``owner.name(...)`` call ``replacement(original, ...)``."""
    static = inspect.getattr_static(owner, name)
    original = static.__func__ if isinstance(static, classmethod | staticmethod) else static
    if hasattr(original, _MARK):
        return

    signature = inspect.signature(original)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        try:
            call = signature.bind(*args, **kwargs)  # so that arguments may be passed by name
        except TypeError:
            return original(*args, **kwargs)  # raises its own error
        return replacement(original, *call.args, **call.kwargs)

    setattr(patched, _MARK, original)
    rewrap = type(static) if isinstance(static, classmethod | staticmethod) else lambda function: function
    setattr(owner, name, rewrap(patched))


def _create_new_module(original: Any, config: Any, adapter_name: str, target: Any, /, **kwargs: Any) -> Any:
    """Create an adapter; for an operator an ``OperatorLora``, as PEFT only adapts nn.Linear and a few other classes."""
    layer = target.get_base_layer() if is_adapted(target) else target
    if isinstance(layer, Operator):
        if embeds(layer):
            raise ValueError(
                f"{layer.name_in_model} is an embedding that is an operator, which LoRA does not support; leave it out"
            )
        from relinear.surgery.lora_layer import OperatorLora

        config = copy.copy(config)
        config._register_custom_module({Operator: OperatorLora})
    return original(config, adapter_name, target, **kwargs)


def _to_json_file(original: Any, config: Any, json_file_path: Any, use_diff: bool = True) -> None:
    """Write ``config.json`` for ``config.save_pretrained``, ``model.save_pretrained`` and ``push_to_hub``."""
    if not needs_loader(config):
        original(config, json_file_path, use_diff=use_diff)
    else:
        write_config(config, Path(json_file_path), config.to_json_string(use_diff=use_diff))


def _save_pretrained(original: Any, model: Any, save_directory: Any, /, *args: Any, **kwargs: Any) -> None:
    untie_config_(model)
    with _record_of_this_model(model):
        original(model, save_directory, *args, **kwargs)


def _resize_token_embeddings(
    original: Any, model: Any, new_num_tokens: Any = None, pad_to_multiple_of: Any = None, mean_resizing: Any = True
) -> Any:
    """Resize the token embeddings of attached parts with the model's.

    The output head stays the same module with its hooks; transformers would replace it by a new one.
    """
    if new_num_tokens is None and pad_to_multiple_of is None:  # nothing to do
        return model.get_input_embeddings()
    tables = token_tables(model)
    head = model.get_output_embeddings()
    for role, part in {"embedding": model.get_input_embeddings(), "output head": head}.items():
        if isinstance(part, Operator):
            raise ValueError(
                f"the {role} is an operator ({part.config.kind}), whose rows are fixed; use relinear.fold_(model) first"
            )
    resized = original(model, new_num_tokens, pad_to_multiple_of, mean_resizing)
    for table in tables:
        model._get_resized_embeddings(table, resized.weight.shape[0], None, mean_resizing)
    other: Any = model.get_output_embeddings()
    if other is not head and make_record(model) is not None:
        head.weight, head.bias, head.out_features = other.weight, other.bias, other.out_features
        model.set_output_embeddings(head)
    return resized


@contextmanager
def _record_of_this_model(model: Any) -> Iterator[None]:
    """Put the record of the model's actual operators into its config within the block, if the config has another.

    A stock model that was built with the config of a model with operators has the record but no operators. A part of a
    model has other names for its layers.
    """
    true_record = make_record(model)
    if true_record == record_in_config(model.config):
        yield
        return
    shared, copied = model.config, copy.copy(model.config)
    copied.quantization_config = true_record
    if true_record is None:
        del copied.quantization_config
    model.config = copied
    try:
        yield
    finally:
        model.config = shared


#: the record of the model that is being built; a head builds its body from the same config
_building: ContextVar[dict[str, Any] | None] = ContextVar("_building", default=None)


def _from_config(original: Any, cls: Any, config: Any, /, **kwargs: Any) -> Any:
    """Build a model with the operators that its config records, freshly initialised."""
    record = record_in_config(config)
    if record is None or record == _building.get():
        return original(cls, config, **kwargs)
    remove_file_only_fields_(config)
    token = _building.set(record)
    try:
        model = original(cls, config, **kwargs)
    finally:
        _building.reset(token)
    rebuild_(model, RelinearConfig(**record))
    return model


def _from_pretrained(
    original: Any, cls: Any, name: Any, /, *args: Any, config: Any = None, output_loading_info: bool = False, **kw: Any
) -> Any:
    """Load with the checkpoint's record, even if the caller passes another config; check that nothing is missing."""
    config = _with_stored_record(name, config, kw)
    model, info = original(cls, name, *args, config=config, output_loading_info=True, **kw)
    if kw.get("state_dict") is None:  # a caller's own may lack weights, which are then initialised
        check_loaded(model, info)
    return (model, info) if output_loading_info else model


def _with_stored_record(name: Any, config: Any, options: dict[str, Any]) -> Any:
    """Return the caller's ``config`` with the record of the checkpoint ``name``, if that has one."""
    stored = None if config is None else _stored_record(name, options)
    if stored is not None and isinstance(config, str | os.PathLike):
        config = AutoConfig.from_pretrained(config)
    if stored is None or stored == record_in_config(config):
        return config
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(f"{name} holds relinear operators, of which config= knows nothing; leave it out")
    other = getattr(config, "quantization_config", None)
    if other is not None and parse_record(other) is None:
        raise ValueError(
            f"{name} holds relinear operators and cannot be loaded with {type(other).__name__}; quantize it afterwards "
            "(torchao.quantization.quantize_), or fold and save it first"
        )
    config = copy.copy(config)
    config.quantization_config = stored
    return config


def _initialize_weights(original: Any, model: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    """Initialise operators and attached parts by their ``reset_parameters``.

    Some models initialise children by name (GPT-2: ``self.c_proj.weight``). So during the call a wrapper has its
    wrapped layer's weight, and any other operator without a weight has one that is marked as loaded, which transformers
    does not change.
    """
    if getattr(module, INITIALIZED, False):
        return
    without_weight = [part for part in module.modules() if isinstance(part, Operator) and not hasattr(part, "weight")]
    for part in without_weight:
        part.__dict__["weight"] = _weight_within(part)
    try:
        original(model, module, *args, **kwargs)
    finally:
        for part in without_weight:
            del part.__dict__["weight"]
    initialize_(module)


def _weight_within(part: Any) -> torch.Tensor:
    while isinstance(part, Wrapper):
        part = part.base
    if hasattr(part, "weight"):
        return part.weight
    placeholder = torch.empty(0)
    setattr(placeholder, INITIALIZED, True)
    return placeholder


_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def _stored_record(name: Any, options: dict[str, Any]) -> dict[str, Any] | None:
    """Return the record in the ``config.json`` of the weights that ``from_pretrained(name, **options)`` would load."""
    if name is None or options.get("gguf_file"):
        return None
    try:
        hub_options = {key: options[key] for key in _HUB_ARGUMENTS if key in options}
        values, _ = PreTrainedConfig.get_config_dict(name, **hub_options)
    except OSError:  # no config.json: only the caller's config counts
        return None
    return parse_record(values.get("quantization_config"))
