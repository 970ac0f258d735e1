"""Describe the file formats of compressed models, one for each program that runs them: types, and their bytes."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from relinear.compression.budget import Budget, size_of, stored_bytes
from relinear.compression.export import check_compressed_tensors, export_compressed_tensors, packs
from relinear.compression.gguf import check_gguf, export_gguf, header_bytes
from relinear.compression.settings import CompressSettings
from relinear.contract.linear_layers import linear_features
from relinear.contract.operator import OperatorConfig
from relinear.system.grouped import grouped

#: bytes that GGUF fills tensors up to
_ALIGNMENT = 32
#: the most bytes by which safetensors describes a tensor, without its name; tensors of a packed layer
_DESCRIBED, _PARTS = 120, 3


@dataclasses.dataclass(frozen=True)
class FileFormat:
    """Describe what a program that runs compressed models can read.

    Attributes:
        candidates: operators that the file stores, each at all its sizes.
        layer_bytes: bytes of a model's layer with an operator, or unchanged for None; infinite if it cannot be stored.
        other_bytes: upper bound of the file's other bytes, for a model, its tokenizer and the layers.
        file: name of the file; None if the program reads relinear's own.
        write: writes the file; None if the program reads relinear's own.
        check: raises ValueError for a model or tokenizer that the file cannot hold.
        fused: a pattern of the ends of names of layers that must share a type; by default it matches none.
        tables: whether embedding and head are compressed, too.
    """

    candidates: tuple[str, ...]
    layer_bytes: Callable[[Any, nn.Module, OperatorConfig | None], float]
    other_bytes: Callable[[Any, Any, Mapping[str, nn.Module]], int]
    file: str | None = None
    write: Callable[..., Path] | None = None
    check: Callable[[Any, Any], Any] = lambda model, tokenizer: None
    fused: str = r"(?!)"
    tables: bool = True

    def groups(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return groups of layers that must get the same type, by what they share."""
        return grouped((re.sub(self.fused, lambda match: f".{match.lastgroup}", name), name) for name in names)


def _relinear_layer_bytes(model: Any, module: Any, config: OperatorConfig | None) -> int:
    return size_of(module, config).stored


def _safetensors_other_bytes(model: Any, tokenizer: Any, modules: Mapping[str, nn.Module]) -> int:
    """Return the bytes of everything else in a safetensors file."""
    described = sum(len(name) + _DESCRIBED for name in model.state_dict())
    described += sum(_PARTS * (len(name) + _DESCRIBED) for name in modules)
    return stored_bytes(model) - sum(stored_bytes(module) for module in modules.values()) + described


def _gguf_layer_bytes(model: Any, module: Any, config: OperatorConfig | None) -> float:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    inputs, outputs = linear_features(module)
    try:
        kind = "F16" if config is None else config.build(inputs, outputs, device="meta").gguf_type()  # type: ignore
    except (AttributeError, ValueError):
        return math.inf
    block, stored = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return outputs * inputs // block * stored + (0 if getattr(module, "bias", None) is None else 4 * outputs)


def _gguf_other_bytes(model: Any, tokenizer: Any, modules: Mapping[str, nn.Module]) -> int:
    """Return the bytes of the header, of vectors in single precision, and of the padding of tensors."""
    inside = {id(p) for module in modules.values() for p in module.parameters()}
    outside = {id(p): p for p in model.parameters() if id(p) not in inside}.values()
    stored = sum(p.numel() * (4 if p.ndim == 1 else 2) for p in outside)
    return header_bytes(model, tokenizer) + stored + _ALIGNMENT * (1 + len(outside) + 2 * len(modules))


def _packed_layer_bytes(model: Any, module: Any, config: OperatorConfig | None) -> float:
    if config is None:
        return stored_bytes(module)
    if not packs(model, module, config):
        return math.inf
    inputs, outputs = linear_features(module)
    bias = 0 if getattr(module, "bias", None) is None else 2 * outputs
    return _packed_bytes(config, inputs, outputs) + bias


@functools.lru_cache(maxsize=100_000)
def _packed_bytes(config: OperatorConfig, inputs: int, outputs: int) -> int:
    operator: Any = config.build(inputs, outputs, device="meta", dtype=torch.bfloat16)
    return sum(part.nbytes for part in operator.compressed_tensors()[1].values())


#: setting ``reader``, the program that will run the model -> its file format
FILE_FORMATS = {
    "relinear": FileFormat(("quantized", "quantized:group=256"), _relinear_layer_bytes, _safetensors_other_bytes),
    "llama.cpp": FileFormat(
        (
            *("quantized:group=32,symmetric=true", "quantized:group=32"),
            *("quantized:group=32,symmetric=true,levels=iq4_nl", "quantized:group=32,levels=k"),
        ),
        _gguf_layer_bytes,
        _gguf_other_bytes,
        file="model.gguf",
        write=export_gguf,
        check=check_gguf,
    ),
    "vllm": FileFormat(
        tuple(f"quantized:group={group},symmetric=true" for group in (32, 64, 128)),
        _packed_layer_bytes,
        _safetensors_other_bytes,
        file="compressed-tensors",
        write=export_compressed_tensors,
        check=check_compressed_tensors,
        tables=False,
        fused=r"\.(?:(?P<qkv>[qkv]_proj)|(?P<gate_up>(?:gate|up)_proj))$",
    ),
}


def budget_of(
    model: Any, modules: Mapping[str, nn.Module], settings: CompressSettings, tokenizer: Any = None
) -> Budget:
    """Return the budget that ``settings`` ask for.

    Args:
        model: the original.
        modules: what may be replaced, by name: linear layers, and where bytes are the budget embedding and head.
        settings: settings of the compression.
        tokenizer: the model's tokenizer, which a GGUF file holds.

    Raises:
        ValueError: if all else in the file already exceeds the budget, or the unchanged model meets it.
    """
    file_format = FILE_FORMATS[settings.reader]

    def cost(name: str, config: OperatorConfig | None) -> float:
        module = model.get_submodule(name)
        if settings.by_bytes:
            return file_format.layer_bytes(model, module, config)
        return size_of(module, config).parameters

    whole = sum(cost(name, None) for name in modules)
    if settings.keep is not None:
        limit = settings.keep * whole
        return Budget(
            f"keep={settings.keep}", "parameters", limit, cost, lambda layers: _setting_text("keep", layers, unit=whole)
        )
    if settings.bits is not None:
        weights = sum(math.prod(linear_features(module)) for module in modules.values())
        biases = whole - 2 * weights  # bytes, which stay as they are
        limit = settings.bits / 8 * weights + biases
        return Budget(
            f"bits={settings.bits}",
            "bytes",
            limit,
            cost,
            lambda layers: _setting_text("bits", layers - biases, unit=weights / 8),
        )
    outside = file_format.other_bytes(model, tokenizer, modules)
    limit = settings.bytes_of(stored_bytes(model)) - outside
    if limit <= 0:
        raise ValueError(
            f"size={settings.size}, {limit + outside:,.0f} bytes, is less than the {outside:,.0f} that all else "
            f"takes in a file for {settings.reader} (norms, what is excluded, the tokenizer); ask for more"
        )

    def size_for(layers: float) -> str:
        return _setting_text("size", layers + outside, unit=1e6) + "MB"

    if limit >= whole:
        raise ValueError(f"size={settings.size} is met by the model as it is, {size_for(whole)}: ask for less")
    return Budget(f"size={settings.size}", "bytes", limit, cost, size_for)


def _setting_text(name: str, amount: float, unit: float) -> str:
    """Return the setting for an amount in a unit, rounded up."""
    return f"{name}={math.ceil(1000 * amount / unit) / 1000:.10g}"
