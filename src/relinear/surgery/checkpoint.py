"""Save a model with operators, and load it strictly."""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers

from relinear.contract.input_checks import check_model
from relinear.hf.config_record import (
    FORMAT_VERSION,
    LOADER,
    METHOD,
    finish_surgery_,
    parse_record,
    record_in_config,
)
from relinear.hf.model_config import loaded_from
from relinear.hf.model_source import locate_checkpoint
from relinear.settings.messages import quoted
from relinear.surgery.card import CARD, is_generated_card, write_card
from relinear.surgery.packed import check_packable, packed_state
from relinear.surgery.rebuild import check_record, has_another_head, packed_record
from relinear.surgery.stored_tensors import INDEX, WEIGHTS, count_tensors, shards_of
from relinear.system.files import atomic_directory, os_errors_named, read_json, write_json
from relinear.system.text import shorten, some_names

#: what transformers reports of keys that it could not load
_PROBLEMS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
#: characters of a message of transformers
_MAX_MESSAGE = 1_000


def from_pretrained(directory: str | Path, *, auto_class: Any = None, **kwargs: Any) -> Any:
    """Load a model strictly: every key of the checkpoint is used, and every parameter comes from it.

    Only a valid Hub name causes network access.

    Args:
        directory: a directory of ``save_pretrained`` (with or without operators), or a Hub name.
        auto_class: the class whose ``from_pretrained`` is called; ``AutoModelForCausalLM`` by default.
        **kwargs: passed on to it (``dtype``, ``device_map``, ...).

    Returns:
        The model, in eval mode, with operators and attached parts in place.

    Raises:
        ValueError: for missing or unknown keys, damaged files, unknown operators, a newer format version, or if
            ``directory`` is neither a directory nor a valid Hub name.
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
            if auto_class is None and "Unrecognized configuration class" in str(error):  # then lists all known ones
                _check_task(directory, transformers.PreTrainedConfig.get_config_dict(directory, **kwargs)[0])
            raise
    reported = [problem for problem in _PROBLEMS if info.get(problem)]
    problems = [f"{problem.replace('_', ' ')}: {some_names(map(str, info[problem]))}" for problem in reported]
    if problems and auto_class is None and has_another_head(model):
        _check_task(directory, model.config.to_dict())
    if problems:
        raise ValueError(
            f"{directory} was not fully rebuilt ({'; '.join(problems)}): its config.json does not describe its weights"
        )
    return model


def _check_task(directory: Any, config: Mapping[str, Any]) -> None:
    """Raise ValueError if the config names a saved class, as ``AutoModelForCausalLM`` cannot load it."""
    if saved := config.get("architectures"):
        saved_class = shorten(str(saved[0]))
        raise ValueError(f"{directory} holds a {saved_class}, which is not a causal language model; give auto_class")


@contextlib.contextmanager
def reading_config(directory: Any) -> Iterator[None]:
    """Turn errors within the block about wrong values in a ``config.json`` into one ValueError.

    transformers checks few values. Others fail when they are used, with any error of Python or torch. That error is the
    ``__cause__``, which ``RELINEAR_TRACEBACK=1`` prints.
    """
    try:
        with os_errors_named(directory):
            yield
    except (OSError, ImportError, UnpicklingError, torch.OutOfMemoryError):  # not about a value
        raise
    except Exception as error:
        message = " ".join(str(error).split())
        if isinstance(error, ValueError) and len(message) <= _MAX_MESSAGE:  # longer ones contain the whole file
            raise
        raise ValueError(
            f"{directory}: no model can be built from its config.json and weights ({type(error).__name__}: "
            f"{shorten(message)})"
        ) from error


def check_files(directory: Path) -> None:
    """Raise ValueError or FileNotFoundError if ``directory`` has no model or a damaged one; builds no model."""
    weights = [WEIGHTS] if (directory / WEIGHTS).exists() else shards_of(directory)
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory}: no config.json there, so no model to load")
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold an object, got {quoted(config)}")
    if wrong := [key for key, value in config.items() if isinstance(value, float) and math.isnan(value)]:
        raise ValueError(f"{path}: {wrong[0]} is NaN; restore it from a copy")
    if not isinstance(config.get("architectures") or [], list):
        raise ValueError(f"{path}: architectures must be a list of class names, got {quoted(config['architectures'])}")
    if (stored := parse_record(config.get("quantization_config"))) is not None:
        check_record(stored)
    tensors = count_tensors(directory / name for name in weights)
    layers = config.get("num_hidden_layers")
    # every model builds this number of layers, which takes hours if it is damaged; other sizes may be unused
    if tensors and isinstance(layers, int) and layers > max(tensors, 1_000):
        raise ValueError(f"{path}: num_hidden_layers={quoted(layers)}, but {tensors:,} tensors; restore it from a copy")


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

    As in transformers, files of the same names and the weights of an earlier model are replaced. All other files stay,
    including a ``README.md`` that relinear did not write.

    Args:
        model: a Hugging Face model, with or without operators.
        directory: where to write.
        tokenizer: saved with the model. Its special tokens are copied to the model's config: all of them for a model
            that was built from a config, else those that the config lacks.
        bits: 2 to 8: store every matrix, also the embedding, as integers of this many bits, with a scale for each group
            of 64 inputs, and all other floats in 16 bits. The checkpoint loads like any other. In float32 it has
            exactly the stored values. ``model`` is not changed.
        moments: with ``bits``, the result of ``relinear.surgery.packed.gradient_moments`` on some text: matrices are
            rounded so that errors compensate each other. None rounds to nearest.
        **kwargs: passed on to ``model.save_pretrained`` (``max_shard_size``, ...).

    Returns:
        ``directory`` as a ``Path``.

    Raises:
        ValueError: if ``model`` is not a Hugging Face model, ``directory`` is not a path, ``moments`` come without
            ``bits``, or with ``bits`` a weight is not finite. Nothing has been written then.

    Examples:
        >>> from relinear.data.tokenizers import byte_tokenizer
        >>> folder = relinear.save_pretrained(relinear.from_preset("tiny"), "out", tokenizer=byte_tokenizer())
        >>> (folder / "model.safetensors").is_file()
        True
    """
    _check_saving(model, directory)
    if bits is None and moments is not None:
        raise ValueError("moments= needs bits=: set both or neither")
    if bits is not None:
        check_packable(model, bits)
        # under the model's current names: the original format may split a matrix
        kwargs |= {"state_dict": packed_state(model, bits, moments), "save_original_format": False}
    with model_directory(directory) as temporary:
        finish_surgery_(model)
        recorded = record_in_config(model.config)
        if tokenizer is not None:
            for name, token in _special_tokens(model.config, model, tokenizer).items():
                setattr(model.config, name, token)
        model.save_pretrained(temporary, **kwargs)
        if bits is not None:
            config = copy.copy(model.config)
            empty = {"quant_method": METHOD, "format_version": FORMAT_VERSION, "operators": {}, "attachments": []}
            config.quantization_config = (recorded or empty) | {"packed": packed_record(bits)}
            config.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
            generation = temporary / "generation_config.json"
            if generation.exists():  # changed in the file, as transformers does not save one that changed in memory
                tokens = _special_tokens(model.generation_config, model, tokenizer)
                write_json(generation, read_json(generation) | tokens)
        card = Path(directory) / CARD
        if recorded is not None and (is_generated_card(card) or not card.exists()):
            write_card(model, recorded, temporary)
    return Path(directory)


def model_directory(directory: str | Path) -> contextlib.AbstractContextManager[Path]:
    """Return a temporary directory that replaces the model in ``directory`` on success (``atomic_directory``).

    Existing weights, relinear's loader and relinear's model card are removed unless they are written again.
    """
    directory = Path(directory)
    names = [WEIGHTS, INDEX, *shards_of(directory), f"{LOADER}.py"]
    if is_generated_card(directory / CARD):
        names.append(CARD)
    return atomic_directory(directory, superseded=names)


def _check_saving(model: Any, directory: Any) -> None:
    check_model(model, "save_pretrained")
    if not callable(getattr(model, "save_pretrained", None)):
        raise ValueError(
            f"save_pretrained takes a Hugging Face model, got {type(model).__name__}; save the whole model, or use "
            "safetensors.torch.save_model"
        )
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise ValueError(f"save_pretrained takes the directory to write, got {quoted(directory)}")


def _special_tokens(holder: Any, model: Any, tokenizer: Any) -> dict[str, int]:
    """Return the tokenizer's special tokens to set in ``holder``, a config of ``model``."""
    built = not loaded_from(model)  # its ids are the defaults of the config's class
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    tokens = {name: getattr(tokenizer, name, None) for name in names if built or getattr(holder, name, None) is None}
    return {name: token for name, token in tokens.items() if token is not None}
