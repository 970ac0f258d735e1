"""Export a compressed model as compressed-tensors, which vLLM and transformers load."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from relinear.contract.linear_layers import embeds, linear_features, replaced_layer
from relinear.contract.operator import NotLinearError, named_operators
from relinear.hf.attachments import attachments
from relinear.hf.half_precision import at_half_precision
from relinear.surgery.checkpoint import model_directory
from relinear.surgery.fold import fold_

_FORMAT = "pack-quantized"


@torch.no_grad()
def check_stock(model: Any) -> None:
    """Raise ValueError, or NotLinearError, unless stock layers can express ``model``."""
    attached = attachments(model)
    if attached:
        kinds = ", ".join(config.kind for config in attached)
        raise ValueError(f"the model has {kinds} attached, which no stock layer can express; save it with relinear")
    for name, operator in named_operators(model):
        try:
            operator.to_dense()
        except NotLinearError as error:
            raise NotLinearError(f"{name}: {error}; save the model with relinear instead") from error


def check_compressed_tensors(model: Any, tokenizer: Any = None) -> None:
    """Raise ValueError, or NotLinearError, unless transformers would load ``model`` packed."""
    if model.config.model_type == "falcon" or any(".experts." in name for name, _ in model.named_parameters()):
        raise ValueError(
            f"transformers cannot load {type(model).__name__} from compressed-tensors; call relinear.fold_(model) first"
        )
    check_stock(model)


def packs(model: Any, layer: Any, config: Any) -> bool:
    """Return whether compressed-tensors holds ``layer`` of ``model``, once it is an operator of ``config``, packed."""
    if embeds(layer) or layer is model.get_output_embeddings():  # vLLM reads them dense alone
        return False
    transposed = replaced_layer(layer).is_conv1d
    inputs = linear_features(layer)[0]
    integers = getattr(config, "symmetric", False) and config.levels == "uniform"
    return not transposed and integers and not inputs % min(config.group, inputs)


@torch.no_grad()
def export_compressed_tensors(model: Any, directory: str | Path, *, tokenizer: Any = None) -> Path:
    """Write ``model`` so that transformers with the package compressed-tensors loads it; all of it or nothing.

    Symmetric ``Quantized`` layers keep their integers, in 4 or 8 bits. Embedding, head, zero points and all else
    that the format cannot store become dense: compress with ``reader="vllm"`` to avoid surprises. Parameters in
    single precision are written in bfloat16.

    Args:
        model: a Hugging Face decoder with ``Quantized`` layers; it is not changed.
        directory: where to write; files of the same names are replaced, others stay.
        tokenizer: saved along if given.

    Raises:
        NotLinearError: if an operator has no dense matrix. ValueError: if parts are attached to the model, which stock
            layers cannot express; if there is no layer to pack.
    """
    check_compressed_tensors(model)
    stock = copy.deepcopy(model)
    with at_half_precision(stock):
        operators: Iterable[tuple[str, Any]] = named_operators(stock)
        packed = {name: one.compressed_tensors() for name, one in operators if packs(stock, one, one.config)}
        if not packed:
            raise ValueError(
                "compressed-tensors packs linear layers of symmetric integers whose group divides their inputs, and "
                "there is none: compress with reader='vllm' (--for vllm)"
            )
        fold_(stock, verbose=False)
        state = stock.state_dict()
        groups: dict[str, Any] = {}
        for name, (scheme, parts) in packed.items():
            del state[f"{name}.weight"]
            state |= {f"{name}.weight_{part}": value for part, value in parts.items()}
            weights = {"type": "int", "strategy": "group", "symmetric": True, **scheme}
            group = groups.setdefault(str(scheme), {"targets": [], "weights": weights, "format": _FORMAT})
            group["targets"].append(name)
        stock.config.quantization_config = {
            "quant_method": "compressed-tensors",
            "format": _FORMAT,
            "quantization_status": "compressed",
            "config_groups": {f"group_{n}": group for n, group in enumerate(groups.values())},
            "ignore": [n for n, m in stock.named_modules() if isinstance(m, nn.Linear) and n not in packed],
        }
        with model_directory(directory) as folder:
            stock.save_pretrained(folder, state_dict=state)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
    return Path(directory)
