"""A compressed model as a directory that needs no relinear: stock layers and one short modelling file."""

import copy
import string
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relinear.core.attachment import attachments
from relinear.core.aux import named_operators
from relinear.core.operator import NotLinearError, Operator, embeds, linear_of
from relinear.surgery.fold import fold_
from relinear.system.files import atomic_directory, read_json, write_json, write_text

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
        directory: where to write; what relinear wrote there before is replaced, files of others stay.
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
    with atomic_directory(directory) as folder:
        # older names of weights are read by model type, and with factors that is one that transformers does not know
        plain.save_pretrained(folder, save_original_format=not factors)
        if factors:
            _describe(plain, factors, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    return Path(directory)


class _Pivoted(nn.Module):
    """A thin product of which some inputs come through as they are; the modelling file has the same."""

    def __init__(self, weight: Tensor, pivots: Tensor) -> None:
        super().__init__()
        rest = torch.ones(weight.shape[1], dtype=torch.bool, device=weight.device)
        rest[pivots] = False
        self.register_buffer("order", torch.cat((pivots, rest.nonzero().flatten())).int())
        self.mix = linear_of(weight[:, rest])


def _pivots(thin: Tensor) -> Tensor | None:
    """For each row of a matrix (R, I) a column that is 1 there and 0 elsewhere, (R,); None if a row has none."""
    units = (thin != 0).sum(0).eq(1) & thin.eq(1).any(0)
    found = (thin.eq(1) & units).int()
    return found.argmax(1) if bool(found.any(1).all()) else None


def _into_factors(model: nn.Module, name: str, operator: Operator) -> dict[str, Any]:
    """Two plain layers in place of ``operator``; what the config says of them."""
    first, second = operator.dense_chain()
    pivots = _pivots(first)
    thin = linear_of(first) if pivots is None else _Pivoted(first, pivots)
    model.set_submodule(name, nn.Sequential(thin, linear_of(second, operator.dense_bias())))
    return {"rank": len(first), "pivoted": pivots is not None}


def _describe(model: Any, factors: dict[str, Any], folder: Path) -> None:
    """The modelling file, and a config whose type no program knows unless it runs that file."""
    model_class, config_class = type(model).__name__, type(model.config).__name__
    template = resources.files("relinear.compress").joinpath(f"{MODELLING_FILE}.txt").read_text(encoding="utf-8")
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
