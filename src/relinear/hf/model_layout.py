"""Find the decoder layers, attention and output head of a Hugging Face model of any family.

The layers are the module list whose length the config gives, under any name: ``model.layers``, ``transformer.h``,
``base_model.model.model.layers`` of a PEFT model.
"""

import contextlib
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

from relinear.contract.module_tree import outermost
from relinear.hf.model_config import is_encoder_decoder, text_config
from relinear.hf.peft_models import unwrapped
from relinear.settings.messages import quoted

ATTENTION_NAMES = ("self_attn", "attn", "attention", "self_attention")


def output_head(model: Any) -> Any:
    """Return the layer that computes the logits (``get_output_embeddings``); None if there is none."""
    getter = getattr(unwrapped(model), "get_output_embeddings", None)
    return getter() if callable(getter) else None


def find_module(model: Any, name: str) -> nn.Module | None:
    """Return the module ``name``; None if there is none.

    Tries it also without its first part and with the prefix of ``model``.
    """
    prefix = getattr(model, "base_model_prefix", "")
    inner = name.partition(".")[2]
    for candidate in (name, inner, f"{prefix}.{name}", f"{prefix}.{inner}"):
        try:
            if candidate:
                return model.get_submodule(candidate)
        except AttributeError:
            continue
    return None


# The list of layers


class _Stack(NamedTuple):
    """Decoder layers.

    Attributes:
        owner: the module whose forward runs them.
        layers: the decoder layers in order.
    """

    owner: nn.Module
    layers: tuple[nn.Module, ...]


def _flat(layers: nn.ModuleList) -> Iterator[nn.Module]:
    """Yield the layers of a list; it may be a list of stages, which are lists of layers."""
    for layer in layers:
        if isinstance(layer, nn.ModuleList):
            yield from _flat(layer)
        else:
            yield layer


def _outermost_stacks(model: nn.Module) -> Iterator[_Stack]:
    """Yield every non-empty module list that is not inside another one, in the model's order."""
    for name, modules in outermost(model, lambda module: isinstance(module, nn.ModuleList)):
        if len(modules):
            yield _Stack(model.get_submodule(name.rpartition(".")[0]), tuple(_flat(modules)))


def _layer_count(model: Any) -> int | None:
    return getattr(text_config(model), "num_hidden_layers", None)


def _decoder_stacks(model: Any) -> list[_Stack]:
    """Return the module lists as long as the config says; if there are several, those inside ``get_decoder()``."""
    count = _layer_count(model)
    stacks = [stack for stack in _outermost_stacks(model) if count is None or len(stack.layers) == count]
    get_decoder = getattr(model, "get_decoder", None)
    if len(stacks) > 1 and callable(get_decoder) and isinstance(get_decoder(), nn.Module):
        decoder_modules = {id(module) for module in get_decoder().modules()}
        stacks = [stack for stack in stacks if id(stack.owner) in decoder_modules] or stacks
    return stacks


def _decoder_stack(model: nn.Module) -> _Stack:
    model = unwrapped(model)
    if getattr(model, "config", None) is None:
        raise ValueError(f"{type(model).__name__} has no config; give a Hugging Face decoder")
    stacks = _decoder_stacks(model)
    if len(stacks) != 1:
        raise ValueError(
            f"{type(model).__name__} must hold one list of {_layer_count(model)} decoder layers, as its config says; "
            f"it holds {len(stacks)}"
        )
    return stacks[0]


def find_decoder(model: nn.Module) -> nn.Module:
    """Return the module that runs the decoder layers and returns the last hidden state (``LlamaModel``).

    Raises:
        ValueError: unless exactly one module list is as long as the config says.
    """
    return _decoder_stack(model).owner


def decoder_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the decoder's layers, in order. Raises ValueError as ``find_decoder`` does."""
    return _decoder_stack(model).layers


def is_checkpointing(model: nn.Module) -> bool:
    """Return whether a backward pass through ``model``, as it is, recomputes a part of it (gradient checkpointing)."""
    return any(map(is_recomputed, model.modules()))


def is_recomputed(module: nn.Module) -> bool:
    """Return whether a backward pass recomputes what ``module`` itself checkpoints, such as a layer's forward."""
    return module.training and bool(getattr(module, "gradient_checkpointing", False))


def attention_of(index: int, layer: nn.Module) -> nn.Module:
    """Return the attention of decoder layer ``index``.

    Raises:
        ValueError: unless the layer has exactly one child with a known name.
    """
    attentions = [child for name, child in layer.named_children() if name in ATTENTION_NAMES]
    if len(attentions) != 1:
        raise ValueError(
            f"layer {index} ({type(layer).__name__}) must have one attention, called {', '.join(ATTENTION_NAMES[:-1])} "
            f"or {ATTENTION_NAMES[-1]}; it has {len(attentions)}"
        )
    return attentions[0]


def takes_keywords(module: nn.Module) -> bool:
    """Return whether a module's forward accepts any keyword arguments (``**kwargs``)."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


# Indices of layers


def layer_finder(model: Any) -> Callable[[str], int | None]:
    """Return a function from the name of a module or parameter to the index of its decoder layer; None outside.

    If a model has several stacks (encoder and decoder), or none that fits its config, every outermost module list is a
    stack of layers.
    """
    hf_model = unwrapped(model)
    stacks = [] if is_encoder_decoder(hf_model) else _decoder_stacks(hf_model)
    if len(stacks) != 1:
        stacks = list(_outermost_stacks(hf_model))
    indices = {id(layer): index for stack in stacks for index, layer in enumerate(stack.layers)}

    def find(name: str) -> int | None:
        module = model
        for part in name.split("."):
            module = getattr(module, part, None)
            if id(module) in indices:
                return indices[id(module)]
        return None

    return find


def layer_indices(layers: Any) -> tuple[int, ...]:
    """Return the argument ``layers`` of surgery and attachments, one index or several, as a tuple of ints.

    Raises:
        ValueError: for anything but integers.
    """
    with contextlib.suppress(TypeError):
        return (_index(layers),)
    try:
        return tuple(map(_index, layers))
    except TypeError:
        expected = "indices of decoder layers, such as 3, [0, -1] or range(4, 12)"
        raise ValueError(f"layers= takes {expected}; got {quoted(layers)}") from None


def _index(value: Any) -> int:
    """Return an integer (also of numpy or torch) as an int. Raises TypeError for anything else, bools included."""
    if isinstance(value, bool):
        raise TypeError("a bool is no index")
    return operator.index(value)


def existing_layer_indices(layers: Any, count: int) -> list[int]:
    """Return the argument ``layers`` as sorted indices of a model's ``count`` layers; negative ones count from the end.

    Raises:
        ValueError: as ``layer_indices``, or for a layer that does not exist.
    """
    indices = layer_indices(layers)
    for index in indices:
        if not -count <= index < count:
            raise ValueError(f"layer {index} does not exist: the model has {count} layers (0 to {count - 1})")
    return sorted({index % count for index in indices})
