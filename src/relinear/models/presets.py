"""Presets: named model sizes of the papers, built from stock Hugging Face configs; and how model names are resolved."""

import dataclasses
import math
from os.path import isfile
from pathlib import Path
from typing import Any, Literal

import torch

from relinear.contract.attachment import AttachmentConfig
from relinear.contract.linear_layers import linear_features
from relinear.contract.operator import is_replaceable
from relinear.hf.attachments import apply_attachment_
from relinear.hf.config_record import finish_surgery_
from relinear.hf.model_source import locate_checkpoint
from relinear.models.heads import HeadBias
from relinear.settings.messages import did_you_mean, quoted
from relinear.system.text import shorten


@dataclasses.dataclass(frozen=True)
class _Preset:
    model_type: str
    settings: dict[str, Any]
    attachments: tuple[AttachmentConfig, ...] = ()


# Token ids depend on the tokenizer that a model is trained with, so no preset sets any.
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _llama(width: int, mlp: int, layers: int, heads: int, vocabulary: int, positions: int, theta: float) -> _Preset:
    settings = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": False,
    }
    return _Preset("llama", settings)


_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
#: settings of all of the CGT paper's models (Appendix B.2), which does not state the heads of the text models
_CGT = _NO_DROPOUT | {"activation_function": "gelu_pytorch_tanh"}


def _cgt(
    kind: str, layers: int, widths: tuple[int, int], heads: tuple[int, int], positions: int, **settings: Any
) -> _Preset:
    """Return a CGT; ``widths`` and ``heads`` are those of the x stream and of the y stream."""
    sizes = {"n_layer": layers, "n_positions": positions, "rank": 4, "n_embd": widths[0], "n_head": heads[0]}
    sizes |= {"context_size": widths[1], "context_heads": heads[1]}
    return _Preset(kind, _CGT | sizes | settings)


def _gpt2_ccl(width: int, heads: int) -> _Preset:
    # The paper states neither heads nor dropout. We take heads of 16, 32 and 64 channels, and no dropout, as 5,000
    # steps on a large corpus never repeat a token.
    settings = {
        "vocab_size": 50257,
        "n_positions": 64,
        "n_embd": width,
        "n_layer": 6,
        "n_head": heads,
        "tie_word_embeddings": False,
    }
    return _Preset("gpt2", settings | _NO_DROPOUT, (HeadBias(),))


#: larger values are mistakes; checked before anything is built, as layers take time and memory even without weights
_MOST_LAYERS, _LARGEST = 1_000, 2**31

_PRESETS = {
    "tiny": _llama(128, 512, 4, 4, vocabulary=258, positions=1024, theta=10_000.0),
    "gpt2-ccl-64": _gpt2_ccl(64, heads=4),
    "gpt2-ccl-256": _gpt2_ccl(256, heads=8),
    "gpt2-ccl-512": _gpt2_ccl(512, heads=8),
    "cgt-arithmetic": _cgt("relinear_cgt", 6, (112, 64), (7, 4), 240, context_layer=4, templates=16, vocab_size=16),
    "cgt-regression": _cgt(
        "relinear_cgt_regression", 8, (128, 64), (8, 4), 128, context_layer=7, templates=8, vector_input="padded"
    ),
    "cgt-text": _cgt("relinear_cgt", 12, (128, 128), (8, 8), 512, context_layer=8, templates=16, vocab_size=8000),
    # the plain model with which a CGT is compared, by default in the sizes of its x stream
    "gpt2-cgt": _Preset(
        "gpt2", _CGT | {"n_layer": 6, "n_embd": 112, "n_head": 7, "n_positions": 240, "vocab_size": 16}
    ),
    "hdpl-67m": _llama(512, 2048, 4, 8, vocabulary=49_152, positions=2048, theta=500_000.0),
    "llama-60m": _llama(512, 1376, 8, 8, vocabulary=32_000, positions=1024, theta=10_000.0),
    "llama-130m": _llama(768, 2048, 12, 12, vocabulary=32_000, positions=1024, theta=10_000.0),
    # The Transponder paper's Table 7 states a width of 1,024, which gives 355 million parameters. A width of 768 gives
    # 247 million, and then ALL-Gate and gates on q, k, v and o add 80 and 23 %, as in its Table 2.
    "llama-250m": _llama(768, 2560, 24, 16, vocabulary=32_000, positions=1024, theta=10_000.0),
    "llama-355m": _llama(1024, 2560, 24, 16, vocabulary=32_000, positions=1024, theta=10_000.0),
}


def preset_names() -> tuple[str, ...]:
    """Return every name that ``from_preset`` takes.

    Returns:
        Names, such as "tiny".

    Examples:
        >>> relinear.models.preset_names()[:2]
        ('tiny', 'gpt2-ccl-64')
    """
    return tuple(_PRESETS)


def is_preset(name: Any) -> bool:
    """Return whether ``name`` is that of a preset; ``locate_model`` also checks that it is not a directory, too."""
    return isinstance(name, str) and name in _PRESETS


def _preset(name: str) -> _Preset:
    if not is_preset(name):
        raise ValueError(f"unknown preset {quoted(name)}; {did_you_mean(str(name), _PRESETS)}")
    return _PRESETS[name]


def preset_config(name: str, **overrides: Any) -> Any:
    """Return the Hugging Face config of a preset, without building the model.

    Args:
        name: one of ``preset_names()``.
        **overrides: fields of the config, by any of Hugging Face's names for them.

    Raises:
        ValueError: if the preset or a field is unknown (names the nearest), or transformers rejects the values.
    """
    from transformers import AutoConfig

    preset = _preset(name)
    reference = AutoConfig.for_model(preset.model_type)
    known = {*reference.to_dict(), *reference.attribute_map, "attn_implementation"} - {"model_type"}
    settings = preset.settings | _NO_TOKENS
    for key, value in overrides.items():
        if key not in known:
            raise ValueError(f"preset {name!r}: unknown config field {quoted(key)}; {did_you_mean(key, sorted(known))}")
        field = reference.attribute_map.get(key, key)
        if key != field and field in overrides:
            raise ValueError(f"preset {name!r}: {key!r} and {field!r} are the same field; give one of them")
        if isinstance(value, int | float) and not abs(value) <= (_MOST_LAYERS if "layer" in field else _LARGEST):
            raise ValueError(f"preset {name!r}: {key}={quoted(value)} is a size that no model has")
        settings[field] = value
    try:
        return AutoConfig.for_model(preset.model_type, **settings)
    except Exception as error:  # transformers raises many kinds for a bad value; to a user they are one
        raise _build_error(name, overrides, error) from error


def _build_error(name: str, overrides: dict[str, Any], error: Exception) -> ValueError:
    listed = ", ".join(f"{key}={quoted(value)}" for key, value in overrides.items())
    return ValueError(f"preset {name!r} cannot be built with {shorten(listed)}: {shorten(str(error), 1_000)}")


def from_preset(name: str, **overrides: Any) -> Any:
    """Return a freshly initialised model of a preset's size: Llama, GPT-2 or a CGT.

    Initialisation draws from torch's global generator, so ``torch.manual_seed`` fixes every weight.

    Args:
        name: one of ``preset_names()``.
        **overrides: fields of the model's config, for instance ``vocab_size=258`` or ``num_hidden_layers=2``.

    Raises:
        ValueError: if the preset or a field is unknown (names the nearest), or transformers rejects the values.

    Examples:
        >>> model = relinear.from_preset("tiny", num_hidden_layers=2)
        >>> model(torch.randint(258, (1, 8))).logits.shape
        torch.Size([1, 8, 258])
    """
    from transformers import AutoModelForCausalLM

    config = preset_config(name, **overrides)
    try:
        model = AutoModelForCausalLM.from_config(config)
    except (TypeError, ValueError, RuntimeError, LookupError, ArithmeticError, AttributeError, AssertionError) as error:
        raise _build_error(name, overrides, error) from error
    for attachment in _preset(name).attachments:
        apply_attachment_(model, attachment)
        finish_surgery_(model)
    return model


@torch.no_grad()
def draw_as_torch_(model: Any) -> None:
    """Initialise linear layers as torch does by default, and copy the output head's weights to the input embeddings.

    Weights and biases of ``nn.Linear`` are uniform within 1 / sqrt(in_features). Models are initialised in this way by
    code that ties embeddings and head and then moves them to a device that unties them, such as the HDPL paper's.

    Args:
        model: a stock model; layers other than linear ones do not change.
    """
    for module in model.modules():
        if is_replaceable(module):
            bound = 1 / math.sqrt(linear_features(module)[0])
            for parameter in module.parameters(recurse=False):
                torch.nn.init.uniform_(parameter, -bound, bound)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight.shape == table.weight.shape:
        table.weight.copy_(head.weight)


def locate_model(name: str, *, presets: bool = True) -> Literal["preset", "directory", "hub"]:
    """Return whether the model ``name`` is a preset, a directory or maybe on the Hub; no network access.

    Args:
        name: what a user wrote.
        presets: whether a preset is allowed.

    Raises:
        ValueError, FileNotFoundError, NotADirectoryError: as ``locate_checkpoint``, if it is none of these.
        ValueError: if it is a preset and also a directory with a model.
    """
    if not presets or not is_preset(name):
        return locate_checkpoint(name, presets=preset_names() if presets else ())
    if isfile(Path(name, "config.json")):
        raise ValueError(f"{name!r} is a preset and a directory with a model: write ./{name}, or leave for the preset")
    return "preset"


def model_folder(name: str) -> str:
    """Return NAME/model if NAME is the directory of a run (``train``, ``distill``) with a model; else ``name``."""
    path = Path(name).expanduser()
    folder = path / "model"
    # os.path.isfile returns False for a name that is too long for a file; Path.is_file would raise an error
    return str(folder) if not isfile(path / "config.json") and isfile(folder / "config.json") else name
