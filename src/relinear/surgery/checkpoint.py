"""Checkpoints: how ``from_pretrained`` puts operators back before it loads their weights.

transformers lets a third party rebuild layers through a registered quantizer; nothing is quantized here. The settings
travel in ``config.json`` under ``quantization_config``, the weights in safetensors.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from relinear.contract.attachment import AttachmentConfig, attachments
from relinear.contract.config import UnknownKindError, nearest, shown
from relinear.contract.operator import OperatorConfig, check_model, is_embedding, is_replaceable, named_operators
from relinear.hf.config_record import (
    FORMAT_VERSION,
    LOADER,
    METHOD,
    make_record,
    parse_record,
    record_in_config,
    sync_record,
)
from relinear.hf.model_layout import named_in
from relinear.hf.model_source import locate_checkpoint
from relinear.hf.vocabulary import token_tables
from relinear.surgery.card import CARD, is_own_card, write_card
from relinear.surgery.packed import GROUP, SUFFIX, Unpack, check_packable, packed_shape, packed_state
from relinear.surgery.saved_config import as_in_memory_
from relinear.surgery.select import OWN_PREFIX
from relinear.surgery.tied import swap_layer
from relinear.system.files import atomic_directory, os_errors_named, read_json, write_json
from relinear.system.text import cut

_T = TypeVar("_T")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_KEYS = {"quant_method", "format_version", "operators", "attachments"}


def check_record(values: Mapping[str, Any]) -> None:
    """Raise ValueError if ``values`` are not a record of operators and attachments that this relinear reads."""
    missing, unknown = _KEYS - set(values), set(values) - _KEYS - {"packages", "packed"}
    if unknown:
        raise ValueError(f"relinear checkpoint: unknown keys {shown(sorted(unknown))}; known: {sorted(_KEYS)}")
    if missing:
        raise ValueError(f"relinear checkpoint: missing keys {sorted(missing)} in quantization_config")
    version, operators, attached = (values[key] for key in ("format_version", "operators", "attachments"))
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:  # True is an int to Python
        raise ValueError(f"relinear checkpoint: format {shown(version)}; this version reads 1 to {FORMAT_VERSION}")
    if not isinstance(operators, Mapping) or not isinstance(attached, list | tuple):
        raise ValueError("relinear checkpoint: 'operators' must be a mapping and 'attachments' a list")
    if (packed := values.get("packed")) not in (None, *(_packed(bits) for bits in range(2, 9))):
        raise ValueError(f"relinear checkpoint: packed must be like {_packed(4)}, got {shown(packed)}")
    try:
        for setting in operators.values():
            OperatorConfig.from_dict(setting)
        for setting in attached:
            AttachmentConfig.from_dict(setting)
    except UnknownKindError as error:
        raise ValueError(f"relinear checkpoint: {error}{_needed(values.get('packages'))}") from None


def _packed(bits: int) -> dict[str, int]:
    """Return the entry of a record for parameters that are stored as integers."""
    return {"bits": bits, "group": GROUP}


@register_quantization_config(METHOD)
class RelinearConfig(QuantizationConfigMixin):
    """The record of a model's operators and attachments, checked on reading."""

    operators: Mapping[str, Any]
    attachments: Iterable[Any]
    packed: Mapping[str, int] | None = None

    def __init__(self, **values: Any) -> None:
        check_record(values)
        vars(self).update({key: value for key, value in values.items() if key != "packages" or value})


def _needed(packages: Any) -> str:
    """Return which packages a checkpoint needs, and what to do."""
    if not isinstance(packages, Mapping) or not packages:
        return ""
    lines = []
    for kind, origin in packages.items():
        facts = {key: str(value) for key, value in origin.items()} if isinstance(origin, Mapping) else {}
        package = facts.get("package")
        source = f"{package} {facts.get('version', '')}".strip() if package else f"the module {facts.get('module')}"
        lines.append(f"{shown(kind)} is of {source}")
    return (
        f". It was saved with operators of other packages: {', '.join(lines)}. Install them, or name their modules in "
        "RELINEAR_IMPORT or with relinear --import"
    )


@register_quantizer(METHOD)
class RelinearQuantizer(HfQuantizer):
    """Rebuild operators on the meta-device skeleton, and check the loaded weights against them."""

    quantization_config: RelinearConfig

    def __init__(self, quantization_config: RelinearConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            raise ValueError("operators come with a checkpoint; to add them, load the model, then relinear.replace_")

    def update_attn_implementation(self, config: Any) -> Any:
        """Clear the record, and what only the file needs, from the config before anything reads it.

        Heads build their body from the config, but the model is rebuilt as a whole.
        """
        as_in_memory_(config)
        del config.quantization_config
        return config

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        rebuild_(model, self.quantization_config)
        if files := kwargs.get("checkpoint_files"):
            _check_own_weights(model, self, files)
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
        for name, operator in named_operators(model):
            wrong = operator.problem_with_values(operator.state_dict())
            if wrong is not None:
                raise ValueError(f"the checkpoint's weights of {name} are damaged: {wrong}; restore them from a copy")
        # A later save uses this class's names, and floats.
        model._weight_conversions = [step for step in model._weight_conversions if step not in self._steps]
        # An ordinary model again: floats may be cast, Trainer may train it, and save_pretrained writes the record.
        self.remove_quantization_config(model)
        model.config._is_quantized = False
        sync_record(model)
        return model

    def is_serializable(self) -> bool:
        return True

    is_trainable = is_qat_trainable = is_compileable = True  # type: ignore[assignment]


def _saved_as(model: Any) -> str:
    """Return the name of the class whose checkpoint ``model`` was loaded from; by default its own."""
    names = getattr(getattr(model, "config", None), "architectures", None)
    return str(names[0]) if names else type(model).__name__


def _saved_prefix(model: Any) -> str:
    """Return the name of the body in the saved class; "" if it has none or is unknown."""
    return getattr(getattr(transformers, _saved_as(model), None), "base_model_prefix", "")


def _has_another_head(model: Any) -> bool:
    """Return whether ``model`` is of another class than the saved one."""
    return _saved_as(model) != type(model).__name__


def _layer_of(model: Any, name: str) -> nn.Module | None:
    """Return the layer ``name``; None if it belongs to a head for another task, which ``model`` does not have."""
    layer = named_in(model, name)
    if layer is not None and (is_replaceable(layer) or is_embedding(layer)):
        return layer
    bodies = tuple(f"{prefix}." for prefix in (_saved_prefix(model), getattr(model, "base_model_prefix", "")) if prefix)
    if bodies and not name.startswith(bodies) and _has_another_head(model):
        return None
    known = [key for key, module in model.named_modules() if is_replaceable(module)]
    raise ValueError(
        f"the checkpoint has an operator at {shown(name)}, but {type(model).__name__} has no linear layer there; "
        f"{nearest(name, known)}"
    )


def rebuild_(model: nn.Module, settings: RelinearConfig) -> None:
    """Put the recorded attachments, then the operators, into a model that is still as its class builds it.

    Parts with their own config and record may have been rebuilt already; they are left alone.

    Raises:
        ValueError: if a recorded layer does not exist in ``model`` or cannot take its operator.
    """
    present = [*attachments(model)]
    for values in settings.attachments:
        setting = AttachmentConfig.from_dict(values)
        needed = setting.for_part(model) if _has_another_head(model) else setting
        if needed in present:
            present.remove(needed)
        elif needed is not None:
            needed.apply_(model)
    modules = list(model.named_modules(remove_duplicate=False))
    for name, values in settings.operators.items():
        source, config = _layer_of(model, name), OperatorConfig.from_dict(values)
        if source is not None and getattr(source, "config", None) != config:
            aliases = [alias for alias, module in modules if module is source]
            swap_layer(model, aliases, source, config.convert(source))
    sync_record(model)


class _Form(NamedTuple):
    """Shape and number type of a tensor, stored in a checkpoint or required by a model."""

    shape: tuple[int, ...]
    kind: str

    @classmethod
    def of(cls, shape: Iterable[int], dtype: Any) -> _Form:
        """``dtype`` as torch or the head of a file calls it: torch.bfloat16, BF16, F8_E4M3, I64, ..."""
        letter = str(dtype).removeprefix("torch.").lower().lstrip("b")[0]
        return cls(tuple(map(int, shape)), {"f": "floats", "c": "complex numbers"}.get(letter, "integers"))

    def fits(self, other: _Form, any_shape: bool) -> bool:
        """Return whether a stored tensor of this form can be loaded into one of the ``other``."""
        return self.kind == other.kind and (any_shape or self.shape == other.shape)

    def __str__(self) -> str:
        return f"{self.shape} of {self.kind}"


def _stored_forms(files: Iterable[str | Path]) -> dict[str, _Form]:
    """Return the shapes and types of all tensors in the files, from their headers."""
    tensors: dict[str, _Form] = {}
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise ValueError(f"{file}: relinear loads weights from safetensors only")
        try:
            with os_errors_named(file), safe_open(file, "np") as stored:
                parts = {key: stored.get_slice(key) for key in stored.keys()}  # noqa: SIM118  it is not a mapping
                tensors |= {key: _Form.of(part.get_shape(), part.get_dtype()) for key, part in parts.items()}
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or cut off ({error}); restore it from a copy") from error
    return tensors


def _named_as_in_model(model: Any, quantizer: HfQuantizer, stored: Mapping[str, _T]) -> dict[str, _T]:
    """Return ``stored`` under the names that ``model`` uses: transformers stores some models under other names."""
    steps = get_model_conversion_mapping(model, hf_quantizer=quantizer)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    expected, prefix = model.state_dict(), model.base_model_prefix
    named = {}
    for key in sorted(stored, key=dot_natural_key):
        name, _ = rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:  # as transformers does: the pattern meant another key
            name = key
        named[name] = stored[key]
    return named


def _check_own_weights(model: Any, quantizer: RelinearQuantizer, files: list[str]) -> None:
    """Refuse a checkpoint whose operators and attached parts have not exactly the weights that their record asks for.

    What else is missing or unknown (a fresh head for another task, say) is left to transformers, and so are tables of
    another vocabulary (not of another kind), which a caller may ask to reinitialise (``ignore_mismatched_sizes``).
    """
    tables = {id(table.weight) for table in token_tables(model)}
    of_tokens = {key for key, value in model.named_parameters() if id(value) in tables}
    prefixes = [name + "." for name, _ in named_operators(model)]
    prefixes += [name + "." for name, _ in model.named_modules() if name.rpartition(".")[2].startswith(OWN_PREFIX)]
    named = _named_as_in_model(model, quantizer, _stored_forms(files))
    stored = {key: tensor for key, tensor in named.items() if key.startswith(tuple(prefixes))}
    expected = {k: _Form.of(v.shape, v.dtype) for k, v in model.state_dict().items() if k.startswith(tuple(prefixes))}
    if packed := quantizer.quantization_config.packed:  # integers of the right size are what they unpack to
        stored |= {
            key: tensor
            for key, tensor in expected.items()
            if len(tensor.shape) > 1 and stored.get(key) == (packed_shape(tensor.shape, packed["bits"]), "integers")
        }
    missing = expected.keys() - stored.keys() - set(getattr(model, "all_tied_weights_keys", {}))
    unknown = stored.keys() - expected.keys()
    common = expected.keys() & stored.keys()
    differ = [key for key in common if not stored[key].fits(expected[key], any_shape=key in of_tokens)]
    other = [f"{key} {stored[key]} for {expected[key]}" for key in differ]
    problems = {"missing": missing, "unknown": unknown, "of another shape or kind": other}
    if any(problems.values()):
        parts = "; ".join(f"{problem} {_some(keys)}" for problem, keys in problems.items() if keys)
        raise ValueError(
            f"the checkpoint does not fit its own record of operators (quantization_config in config.json): {parts}"
        )


def _some(keys: Iterable[str], count: int = 6) -> str:
    keys = sorted(keys)
    more = f" and {len(keys) - count} more" if len(keys) > count else ""
    return ", ".join(map(cut, keys[:count])) + more


def from_pretrained(directory: str | Path, *, auto_class: Any = None, **kwargs: Any) -> Any:
    """Load a model strictly: every key of the checkpoint is used, and every parameter comes from it.

    There is no network access for a name that the Hub cannot have.

    Args:
        directory: what ``save_pretrained`` wrote (with or without operators), or a Hub name.
        auto_class: the class whose ``from_pretrained`` is called; ``AutoModelForCausalLM`` by default.
        **kwargs: handed to it (``dtype``, ``device_map``, ...).

    Returns:
        The model, in eval mode, with operators and attached parts in place.

    Raises:
        ValueError: for missing or unknown keys, damaged files, unknown operators, a newer format version, and where
            ``directory`` is neither a directory nor can be a name of the Hub.
        FileNotFoundError: if ``directory`` is a missing path, or has no ``config.json``.
        NotADirectoryError: if it is a file.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> _ = relinear.replace_(model, {"q_proj": relinear.LowRank(rank=8)})
        >>> _ = relinear.save_pretrained(model, "out")
        >>> relinear.from_pretrained("out").model.layers[0].self_attn.q_proj.config
        LowRank(rank=8)
    """
    name = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    if locate_checkpoint(name, cache_dir=kwargs.get("cache_dir")) == "directory":
        directory = Path(name).expanduser()
        check_files(directory)
    loader: Any = auto_class or transformers.AutoModelForCausalLM
    with reading_config(directory):
        try:
            model, info = loader.from_pretrained(directory, output_loading_info=True, **kwargs)
        except ValueError as error:
            if auto_class is None and "Unrecognized configuration class" in str(error):  # all that it knows follow
                _check_task(directory, transformers.PreTrainedConfig.get_config_dict(directory, **kwargs)[0])
            raise
    if wrong := list(_not_finite(model.config.to_dict())):
        raise ValueError(f"{directory}: config.json has {', '.join(wrong)}; give a number, as the original has it")
    reported = {problem: sorted(map(str, info[problem])) for problem in _PROBLEMS if info.get(problem)}
    if getattr(model.config, "quantization_config", None) is None or record_in_config(model.config) is not None:
        reported["not_floats"] = [name for name, p in model.named_parameters() if not p.is_floating_point()]
    problems = [f"{problem.replace('_', ' ')}: {_some(keys)}" for problem, keys in reported.items() if keys]
    if problems and auto_class is None and _has_another_head(model):
        _check_task(directory, model.config.to_dict())
    if problems:
        raise ValueError(
            f"{directory} was not fully rebuilt ({'; '.join(problems)}): its config.json does not describe its weights"
        )
    return model


def _not_finite(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield settings that are NaN or infinite, as text; in a list, as of Mamba 2's range, they may be."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _not_finite(value)
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{key}={value}"


def _check_task(directory: Any, config: Mapping[str, Any]) -> None:
    """Raise ValueError if a config names the saved class, which ``AutoModelForCausalLM`` does not know."""
    if saved := config.get("architectures"):
        raise ValueError(f"{directory} holds a {saved[0]}, which is not a causal language model; give auto_class")


@contextlib.contextmanager
def reading_config(directory: Any) -> Iterator[None]:
    """Turn errors of transformers about wrong values in a ``config.json`` into one plain ValueError.

    transformers checks few values; others fail where they are used, with any error of Python or torch. The original
    is the error's ``__cause__`` (``RELINEAR_TRACEBACK=1`` prints it).
    """
    try:
        with os_errors_named(directory):
            yield
    except (OSError, torch.OutOfMemoryError):
        raise
    except ValueError as error:  # plain already, but may repeat the file
        if len(str(error)) <= _LONGEST:
            raise
        raise ValueError(f"{directory}: {cut(str(error), _LONGEST)}") from error
    except Exception as error:
        if not isinstance(error, (*_OF_WRONG_VALUES, SafetensorError)) and "Validation" not in type(error).__name__:
            raise
        message = cut(" ".join(str(error).split()))
        raise ValueError(
            f"{directory}: no model can be built from its config.json and weights ({type(error).__name__}: {message})"
        ) from error


_LONGEST = 1_000  # characters of a message of transformers
_OF_WRONG_VALUES = (TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, RuntimeError, MemoryError)


def check_files(directory: Path) -> None:
    """Raise ValueError or FileNotFoundError if ``directory`` has no model or a visibly damaged one; builds nothing."""
    weights = [WEIGHTS] if (directory / WEIGHTS).exists() else _shards(directory)
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory}: no config.json there, so no model to load")
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold an object, got {shown(config)}")
    if (stored := parse_record(config.get("quantization_config"))) is not None:
        check_record(stored)
    tensors, layers = _stored_forms([directory / name for name in weights]), config.get("num_hidden_layers")
    # every model builds this number of layers, for hours if it is damaged; other sizes may be unused
    if tensors and isinstance(layers, int) and layers > max(len(tensors), 1_000):
        raise ValueError(
            f"{path}: num_hidden_layers={shown(layers)}, but {len(tensors):,} tensors; restore it from a copy"
        )


_PROBLEMS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


def save_pretrained(
    model: Any,
    directory: str | Path,
    *,
    tokenizer: Any = None,
    bits: int | None = None,
    moments: Mapping[str, torch.Tensor] | None = None,
    **kwargs: Any,
) -> Path:
    """Save a model, its tokenizer and a model card: all of it or nothing.

    As in transformers, files of the same names are replaced, and so are the weights of the model that was there. All
    other files stay, among them a ``README.md`` that relinear did not write.

    Args:
        model: a Hugging Face model, with or without operators.
        directory: where to write.
        tokenizer: saved along if given. Its special tokens then go into the model's config: all of them for a model
            that was built from a config, else those that the config lacks.
        bits: 2 to 8 store every matrix, the embedding among them, in integers of this many bits that share a scale in
            groups of 64 inputs, and all other floats in 16 bits. The checkpoint loads as any other, in float32 with
            exactly the stored values, which bfloat16 rounds; ``model`` keeps its own.
        moments: with ``bits``, what ``relinear.surgery.packed.gradient_moments`` measured on some text: matrices are
            then rounded so that errors make up for each other. None rounds them to nearest.
        **kwargs: handed to ``model.save_pretrained`` (``max_shard_size``, ...).

    Returns:
        ``directory`` as a ``Path``.

    Raises:
        ValueError: if ``model`` is not a Hugging Face model, ``directory`` names none, there are ``moments`` without
            ``bits``, or with ``bits`` a weight is not finite. Nothing is written then.

    Examples:
        >>> from relinear.data.tokenizers import byte_tokenizer
        >>> folder = relinear.save_pretrained(relinear.from_preset("tiny"), "out", tokenizer=byte_tokenizer())
        >>> (folder / "model.safetensors").is_file()
        True
    """
    _check_saving(model, directory)
    if bits is None and moments is not None:
        raise ValueError("moments= is about rounding: give bits=, too, or leave it out")
    if bits is not None:
        check_packable(model, bits)
        # under the model's own names: those of its class may stand for parts of a matrix
        kwargs |= {"state_dict": packed_state(model, bits, moments), "save_original_format": False}
    with model_directory(directory) as temporary:
        sync_record(model)
        if tokenizer is not None:
            for name, token in _special_tokens(model.config, model, tokenizer).items():
                setattr(model.config, name, token)
        model.save_pretrained(temporary, **kwargs)
        if bits is not None:
            config = copy.copy(model.config)
            none = {"quant_method": METHOD, "format_version": FORMAT_VERSION, "operators": {}, "attachments": []}
            config.quantization_config = (make_record(model) or none) | {"packed": _packed(bits)}
            config.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
            generation = temporary / "generation_config.json"
            if generation.exists():  # in the file: transformers is strict with one in memory that has changed
                tokens = _special_tokens(model.generation_config, model, tokenizer)
                write_json(generation, read_json(generation) | tokens)
        card = Path(directory) / CARD
        if make_record(model) is not None and (is_own_card(card) or not card.exists()):
            write_card(model, temporary)
    return Path(directory)


def model_directory(directory: str | Path) -> contextlib.AbstractContextManager[Path]:
    """Return a temporary directory that replaces the model in ``directory``, as ``atomic_directory`` does.

    Of the files there, the weights, relinear's loader and relinear's model card are removed unless written again.
    """
    directory = Path(directory)
    names = [WEIGHTS, INDEX, *_shards(directory), f"{LOADER}.py"]
    if is_own_card(directory / CARD):
        names.append(CARD)
    return atomic_directory(directory, superseded=names)


def _shards(directory: Path) -> list[str]:
    """Return the files that the index of a saved model lists; none without a readable index."""
    try:
        names = set(read_json(directory / INDEX)["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
    return sorted(name for name in names if isinstance(name, str) and name == Path(name).name)


def _check_saving(model: Any, directory: Any) -> None:
    if isinstance(model, str | os.PathLike) and isinstance(directory, nn.Module):
        raise ValueError("save_pretrained takes the model first, then the directory; here they are swapped")
    check_model(model, "save_pretrained")
    if not callable(getattr(model, "save_pretrained", None)):
        raise ValueError(
            f"save_pretrained takes a Hugging Face model, got {type(model).__name__}; save the whole model, or use "
            "safetensors.torch.save_model"
        )
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise ValueError(f"save_pretrained takes the directory to write, got {shown(directory)}")


def _special_tokens(holder: Any, model: Any, tokenizer: Any) -> dict[str, int]:
    """Return the tokenizer's special tokens that ``holder``, a config of ``model``, takes over."""
    built = not getattr(model.config, "_name_or_path", "")  # its ids are the defaults of the config's class
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    tokens = {name: getattr(tokenizer, name, None) for name in names if built or getattr(holder, name, None) is None}
    return {name: token for name, token in tokens.items() if token is not None}
