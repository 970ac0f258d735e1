"""Find the layers of a model that may be replaced, and check the input of a compression."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from relinear.compression.layerwise import LayerByLayer
from relinear.compression.settings import CompressSettings
from relinear.contract.input_checks import check_finite
from relinear.contract.linear_layers import linear_features
from relinear.contract.module_state import eval_mode
from relinear.contract.operator import Operator, OperatorConfig
from relinear.hf.config_record import check_not_quantized
from relinear.hf.model_layout import layer_finder
from relinear.hf.next_token_check import check_predicts_next_token
from relinear.hf.vocabulary import check_length_fits, max_positions, vocab_size_of
from relinear.settings.patterns import ALL_LINEAR, patterns_of
from relinear.surgery.coverage import coverage, out_of_reach
from relinear.surgery.plan import plan
from relinear.surgery.summary import module_parameters
from relinear.system.grouped import grouped

#: share of a model's parameters that must not be out of reach
MAX_UNREACHED_SHARE = 0.5
#: tokens of the sequence on which a model run layer by layer is compared with the whole
CHECKED_TOKENS = 64


def by_decoder_layer(
    model: Any, modules: Mapping[str, nn.Module], *, tables: bool = False
) -> dict[int, dict[str, nn.Module]]:
    """Return linear layers, given by name, for each decoder layer.

    Args:
        model: a Hugging Face decoder.
        modules: its layers that may be replaced, by name.
        tables: whether embedding and head may be among them, which stand under -1.

    Raises:
        ValueError: for another layer outside of the decoder layers.
    """
    find = layer_finder(model)
    ends = (model.get_input_embeddings(), model.get_output_embeddings()) if tables else ()
    layer_of: dict[str, Any] = {
        name: -1 if any(module is end for end in ends) else find(name) for name, module in modules.items()
    }
    if outside := [name for name, index in layer_of.items() if index is None]:
        inside = [name for name, index in layer_of.items() if index is not None]
        rest = f" and {len(outside) - 1} more lie" if len(outside) > 1 else " lies"
        raise ValueError(
            f"{outside[0]}{rest} outside of the decoder layers: leave out by exclude={patterns_of(outside, inside)}"
        )
    named = grouped((index, name) for name, index in layer_of.items())
    return {index: {name: modules[name] for name in names} for index, names in named.items()}


def check_enough_tokens(settings: CompressSettings, modules: Iterable[nn.Module]) -> None:
    """Raise ValueError for fewer tokens of calibration than the widest of the linear layers has inputs."""
    widest = max(linear_features(module)[0] for module in modules)
    calibration_tokens = settings.blocks * settings.sequence_length
    if calibration_tokens < widest:
        raise ValueError(
            f"tokens={settings.tokens} are {calibration_tokens:,} in whole blocks of sequence_length="
            f"{settings.sequence_length}, fewer than the widest layer has inputs, {widest:,}; use more"
        )


def linear_layers(
    model: Any, targets: str | Iterable[str] = ALL_LINEAR, exclude: str | Iterable[str] | None = None
) -> dict[str, nn.Module]:
    """Return the linear layers that patterns name and that are not operators yet; arguments as in ``replace_``.

    Raises:
        ValueError: if there is none.
    """
    patterns = [targets] if isinstance(targets, str) else list(targets)
    smallest = OperatorConfig.from_dict({"kind": "low_rank", "rank": 1})
    replacements = plan(model, dict.fromkeys(patterns, smallest), exclude=exclude).replacements
    layers = {r.name: r.target.module for r in replacements if not isinstance(r.target.module, Operator)}
    if not layers:
        raise ValueError(
            "the layers that targets= and exclude= name are operators already, as after a compression: give the "
            "original model"
        )
    return layers


def describe_out_of_reach(model: Any, targets: str | Iterable[str]) -> tuple[str, ...]:
    """Describe the weights that no target can name, such as experts stored as one tensor.

    Raises:
        ValueError: if they are most of the model, and ``targets`` names no layers in particular.
    """
    gaps = out_of_reach(coverage(model, {}, {}))
    share = sum(entry.parameters for entry in gaps) / module_parameters(model)
    described = tuple(entry.describe() for entry in gaps)
    if share > MAX_UNREACHED_SHARE and targets == ALL_LINEAR:
        raise ValueError(
            f"{share:.0%} of the parameters of {type(model).__name__} are out of reach: {'; '.join(described)}. Name "
            "the layers to compress with targets= (--target)"
        )
    return described


def embedding_tables(model: Any, exclude: str | Iterable[str] | None = None) -> dict[str, nn.Module]:
    """Return the embedding, and an untied head, if they can be stored as integers and are not excluded."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = {}
    for name, module in model.named_modules():
        if any(module is end for end in ends) and not isinstance(module, Operator):
            with suppress(ValueError):  # a head that is tied (it goes with the embedding) or shared
                plan(model, {name: OperatorConfig.read("quantized")}, exclude=exclude, init="from_weight")
                tables[name] = module
    return tables


def fitted_window(settings: CompressSettings, model: Any) -> CompressSettings:
    """Return ``settings`` with a window that ``model`` reads. Raises ValueError for a longer one that a user set."""
    if "sequence_length" in settings.model_fields_set:
        check_length_fits(settings.sequence_length, model)
    length = min(settings.sequence_length, max_positions(model) or settings.sequence_length)
    return settings.model_copy(update={"sequence_length": length})


@torch.no_grad()
def check_compressible(model: Any, sequence_length: int) -> None:
    """Raise ValueError unless ``model`` is a decoder with all its weights that runs layer by layer, at this length."""
    kind = type(model).__name__
    check_not_quantized(model)
    if getattr(model, "peft_config", None):
        problem = "holds adapters of PEFT, which would be saved in the place of the compressed model"
        raise ValueError(f"{kind} {problem}: merge them first (merge_and_unload), or compress the model without them")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{kind}: {name} has no values (it is on the meta device, or off-loaded); load the model")
    check_finite(model)
    check_predicts_next_token(model, "compress")
    ids = torch.arange(min(sequence_length, CHECKED_TOKENS))[None] % vocab_size_of(model.get_input_embeddings())
    with eval_mode(model):
        LayerByLayer(model).check(ids.to(next(model.parameters()).device))


def check_ids(ids: Tensor, model: Any, source: str) -> None:
    """Raise ValueError unless ``model`` can embed the token ids (N, T)."""
    entries = vocab_size_of(model.get_input_embeddings())
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"{source}: token ids must be integers, got {str(ids.dtype).removeprefix('torch.')}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < entries:
        raise ValueError(
            f"{source} has token ids from {int(ids.min())} to {int(ids.max())}, and {type(model).__name__} embeds "
            f"0 to {entries - 1}: use the tokenizer of the model"
        )
