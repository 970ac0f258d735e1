"""A compressed model as a directory that needs no relinear: stock layers and a short modelling file, or integers."""

import copy
import string
import warnings
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relinear.compression.budget import at_half_precision, stored_bytes
from relinear.contract.attachment import attachments
from relinear.contract.auxiliary_losses import named_operators
from relinear.contract.operator import NotLinearError, OperatorConfig, embeds, is_conv1d, linear_features, linear_of
from relinear.surgery.checkpoint import model_directory
from relinear.surgery.fold import fold_
from relinear.system.files import read_json, write_json, write_text

MODELLING_FILE = "modeling_factorized"


@torch.no_grad()
def check_stock(model: Any) -> None:
    """Raise ValueError, or NotLinearError, unless stock layers can express ``model``."""
    attached = attachments(model)
    if attached:
        kinds = ", ".join(config.kind for config in attached)
        raise ValueError(f"the model has {kinds} attached, which no stock layer can express; save it with relinear")
    for name, operator in named_operators(model):
        try:
            operator.dense_chain()
        except NotLinearError as error:
            raise NotLinearError(f"{name}: {error}; save the model with relinear instead") from error


@torch.no_grad()
def export_plain(model: Any, directory: str | Path, *, tokenizer: Any = None) -> Path:
    """Write ``model`` so that transformers alone loads it; all of it or nothing.

    A low-rank layer becomes two nn.Linear in a row (where the first holds an identity, that is not stored), any other
    operator with a dense matrix that matrix. Where factors are left, a modelling file of the directory puts them in
    place, so that loading takes ``trust_remote_code=True`` and fails without it; where none are, the directory is a
    stock checkpoint.

    Args:
        model: a Hugging Face decoder with operators; stays as it is.
        directory: where to write; files of the same names are replaced, others stay.
        tokenizer: saved along if given.

    Raises:
        NotLinearError: if an operator has no dense matrix. ValueError: if parts are attached to the model, which stock
            layers cannot express.
    """
    check_stock(model)
    plain = copy.deepcopy(model)
    factors = {
        name: _into_factors(plain, name, operator)
        for name, operator in list(named_operators(plain))
        if not embeds(operator) and len(operator.dense_chain()) == 2
    }
    if list(named_operators(plain)):
        fold_(plain, verbose=False)
    plain.config.__dict__.pop("quantization_config", None)
    with model_directory(directory) as folder:
        # older names of weights are read by model type, and with factors that is one that transformers does not know
        plain.save_pretrained(folder, save_original_format=not factors)
        if factors:
            _describe(plain, factors, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    return Path(directory)


class _Pivoted(nn.Module):
    """A thin product of which some inputs come through as they are; the modelling file has the same."""

    order: Tensor

    def __init__(self, weight: Tensor, pivots: Tensor) -> None:
        super().__init__()
        rest = torch.ones(weight.shape[1], dtype=torch.bool, device=weight.device)
        rest[pivots] = False
        self.register_buffer("order", torch.cat((pivots, rest.nonzero().flatten())).int())
        self.mix = linear_of(weight[:, rest])

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., R)."""
        through, mixed = x.index_select(-1, self.order).tensor_split((self.mix.out_features,), -1)
        return through + self.mix(mixed)


def _pivots(thin: Tensor) -> Tensor | None:
    """For each row of a matrix (R, I) a column that is 1 there and 0 elsewhere, (R,); None if a row has none."""
    units = (thin != 0).sum(0).eq(1) & thin.eq(1).any(0)
    found = (thin.eq(1) & units).int()
    return found.argmax(1) if bool(found.any(1).all()) else None


def _into_factors(model: nn.Module, name: str, operator: Any) -> dict[str, Any]:
    """Two plain layers in place of ``operator``; what the config says of them."""
    first, second = operator.dense_chain()
    pivots = _pivots(first)
    thin = linear_of(first) if pivots is None else _Pivoted(first, pivots)
    model.set_submodule(name, nn.Sequential(thin, linear_of(second, operator.dense_bias())))
    return {"rank": len(first), "pivoted": pivots is not None}


def _describe(model: Any, factors: dict[str, Any], folder: Path) -> None:
    """The modelling file, and a config whose type no program knows unless it runs that file."""
    model_class, config_class = type(model).__name__, type(model.config).__name__
    template = resources.files("relinear.compression").joinpath(f"{MODELLING_FILE}.txt").read_text(encoding="utf-8")
    names = {"model_class": model_class, "config_class": config_class, "model_type": model.config.model_type}
    write_text(folder / f"{MODELLING_FILE}.py", string.Template(template).substitute(names))
    config = read_json(folder / "config.json")
    config["model_type"] = f"factorized_{model.config.model_type}"
    config["factorized"] = factors
    config["architectures"] = [f"Factorized{model_class}"]
    config["auto_map"] = {
        "AutoConfig": f"{MODELLING_FILE}.Factorized{config_class}",
        "AutoModelForCausalLM": f"{MODELLING_FILE}.Factorized{model_class}",
    }
    write_json(folder / "config.json", config)


# With integers that stay integers


_FORMAT = "pack-quantized"


def check_packable(model: Any, becomes: Iterable[tuple[str, OperatorConfig]]) -> None:
    """Raise ValueError unless transformers would load ``model`` packed, and a layer, by name, can be packed."""
    experts = any("experts" in name and value.ndim > 2 for name, value in model.named_parameters())
    if experts or model.config.model_type == "falcon":
        raise ValueError(f"transformers reads no {type(model).__name__} of compressed-tensors; export it as plain")
    if not any(packs(model, model.get_submodule(name), config) for name, config in becomes):
        raise ValueError(
            "compressed-tensors packs linear layers of integers whose group divides their inputs, and there is none. "
            "Give candidates=quantized:symmetric=true and a budget of bits, or export the model as plain"
        )


def packs(model: Any, layer: Any, config: Any) -> bool:
    """Return whether compressed-tensors holds ``layer`` of ``model``, once it is an operator of ``config``, packed."""
    if embeds(layer) or layer is model.get_output_embeddings():  # vLLM reads them dense alone
        return False
    transposed, inputs = is_conv1d(layer) or getattr(layer, "replaces_conv1d", False), linear_features(layer)[0]
    return not transposed and hasattr(config.module_class, "packed") and not inputs % min(config.group, inputs)


@torch.no_grad()
def export_compressed_tensors(model: Any, directory: str | Path, *, tokenizer: Any = None) -> Path:
    """Write ``model`` so that transformers with the package compressed-tensors loads it; all of it or nothing.

    ``Quantized`` layers stay integers: symmetric ones as they are, in 4 or 8 bits, those with zero points in 8, to a
    254th of a group's largest weight. Embedding, head and what else the format cannot hold become dense; a warning
    says what that costs. Parameters in single precision are written in bfloat16.

    Args:
        model: a Hugging Face decoder with ``Quantized`` layers; stays as it is.
        directory: where to write; files of the same names are replaced, others stay.
        tokenizer: saved along if given.

    Raises:
        ValueError: as ``export_plain`` does, and if there is no layer to pack.
    """
    check_stock(model)
    check_packable(model, ((name, operator.config) for name, operator in named_operators(model)))
    stock = copy.deepcopy(model)
    with at_half_precision(stock):
        operators, own = dict[str, Any](named_operators(stock)), stored_bytes(stock)
        packed = {name: one.packed() for name, one in operators.items() if packs(stock, one, one.config)}
        fold_(stock, verbose=False)
        state, groups = stock.state_dict(), dict[str, Any]()
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
            written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    dense = [name for name in operators if name not in packed]
    wider = sum(scheme["num_bits"] > operators[name].config.bits for name, (scheme, _) in packed.items())
    if dense or wider:
        warnings.warn(
            f"compressed-tensors holds 4 or 8 bits without zero points: {wider} layers take more bits, and dense are "
            f"{', '.join(dense[:3] + ['...'] * (len(dense) > 3)) or 'none'}. The files are "
            f"{written - own:,} bytes larger than relinear's",
            stacklevel=3,
        )
    return Path(directory)
