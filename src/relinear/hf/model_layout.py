"""The layout of a model: its decoder layers, the layer that a name belongs to, and the blocks of a layer.

Knows how families of decoders name layers, attention and norms. The layers are the module list whose length the config
gives, under any name: ``model.layers``, ``transformer.h``, ``base_model.model.model.layers`` of a PEFT model.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn

from relinear.contract.module_tree import outermost
from relinear.hf.peft_models import unwrapped

_ATTENTIONS = ("self_attn", "attn", "attention", "self_attention")
#: names of the norms of a decoder layer that read the stream for its attention and for its MLP
_NORM_PAIRS = (("input_layernorm", "post_attention_layernorm"), ("ln_1", "ln_2"), ("ln_attn", "ln_mlp"))


def output_head(model: Any) -> Any:
    """Return the layer that computes a model's logits; None if it has or names none."""
    getter = getattr(unwrapped(model), "get_output_embeddings", None)
    return getter() if callable(getter) else None


def model_name(model: Any) -> str:
    """Return a model's name: the last part of the path it was loaded from (RUN for RUN/model), or its class."""
    parts = Path(getattr(model, "name_or_path", "") or type(model).__name__).parts
    return next((part for part in reversed(parts) if part != "model"), "model")


def find_module(model: Any, name: str) -> nn.Module | None:
    """Return the module that a model of another class calls ``name``: the base model's prefix differs."""
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
    """Decoder layers, and the module whose forward runs them."""

    owner: nn.Module
    layers: tuple[nn.Module, ...]


def _flat(layers: nn.ModuleList) -> Iterator[nn.Module]:
    """Return the layers of a list, also if it is a list of stages that are lists themselves."""
    for layer in layers:
        if isinstance(layer, nn.ModuleList):
            yield from _flat(layer)
        else:
            yield layer


def _outermost_stacks(model: nn.Module) -> Iterator[_Stack]:
    """Yield every list of modules that is not inside another, in the model's order."""
    for name, modules in outermost(model, lambda module: isinstance(module, nn.ModuleList)):
        if len(modules):
            yield _Stack(model.get_submodule(name.rpartition(".")[0]), tuple(_flat(modules)))


def _layer_count(model: Any) -> int | None:
    config = getattr(model, "config", None)
    text_config = getattr(config, "get_text_config", None)
    text = text_config() if callable(text_config) else config
    return getattr(text, "num_hidden_layers", None)


def _decoder_stacks(model: Any) -> list[_Stack]:
    """Return the lists of as many layers as the config says; of several, those in the decoder that the model names."""
    count = _layer_count(model)
    stacks = [stack for stack in _outermost_stacks(model) if count is None or len(stack.layers) == count]
    named = getattr(model, "get_decoder", None)
    if len(stacks) > 1 and callable(named) and isinstance(named(), nn.Module):
        inside = {id(module) for module in named().modules()}
        stacks = [stack for stack in stacks if id(stack.owner) in inside] or stacks
    return stacks


def _decoder_stack(model: nn.Module) -> _Stack:
    model = unwrapped(model)
    if getattr(model, "config", None) is None:
        raise ValueError(f"{type(model).__name__} has no config; expected a Hugging Face decoder")
    stacks = _decoder_stacks(model)
    if len(stacks) != 1:
        raise ValueError(
            f"{type(model).__name__}: {len(stacks)} lists of {_layer_count(model)} decoder layers, expected one"
        )
    return stacks[0]


def decoder(model: nn.Module) -> nn.Module:
    """Return the module that owns the decoder layers (``LlamaModel``), which returns the last hidden state.

    Raises:
        ValueError: if there is no list of as many layers as the config says, or several.
    """
    return _decoder_stack(model).owner


def decoder_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the decoder's layers, in order. Raises ValueError as ``decoder`` does."""
    return _decoder_stack(model).layers


def layer_finder(model: Any) -> Callable[[str], int | None]:
    """Return a function from a module's name to the index of its layer, None for a module outside of all layers.

    Layers are the decoder's. If a model has several stacks (encoder and decoder), or none that fits its config, they
    are those of every outermost list of modules.
    """
    inside = unwrapped(model)
    both = getattr(getattr(inside, "config", None), "is_encoder_decoder", False)
    stacks = [] if both else _decoder_stacks(inside)
    if len(stacks) != 1:
        stacks = list(_outermost_stacks(inside))
    indices = {id(layer): index for stack in stacks for index, layer in enumerate(stack.layers)}

    def find(name: str) -> int | None:
        module = model
        for part in name.split("."):
            module = getattr(module, part)
            if id(module) in indices:
                return indices[id(module)]
        return None

    return find


def is_checkpointing(base: Any) -> bool:
    """Return whether gradient checkpointing is on in a base model; OPT keeps the flag in the decoder inside."""
    runner = base if hasattr(base, "gradient_checkpointing") else decoder(base)
    return bool(getattr(runner, "gradient_checkpointing", False))


# What lies in a layer


def takes_keywords(module: nn.Module) -> bool:
    """Return whether a module's forward takes further keyword arguments."""
    kinds = [p.kind for p in inspect.signature(module.forward).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def attention_of(index: int, layer: nn.Module) -> nn.Module:
    """Return the attention of decoder layer ``index``.

    Raises:
        ValueError: if the layer has none of a known name, or several.
    """
    attentions = [child for name, child in layer.named_children() if name in _ATTENTIONS]
    if len(attentions) != 1:
        raise ValueError(
            f"layer {index} ({type(layer).__name__}) has no attention block by one of the names "
            f"{', '.join(_ATTENTIONS)}, or several"
        )
    return attentions[0]


class SubBlock(NamedTuple):
    """Attention or MLP of a decoder layer, whose output is added to the stream.

    layer: index of the decoder layer. role: what the module is. owner: the decoder layer; norm_name: attribute name
    of the norm that reads the stream for the sub-block (one for both in some parallel layers), None if unknown.
    """

    layer: int
    role: Literal["attention", "mlp"]
    module: nn.Module
    owner: nn.Module
    norm_name: str | None

    @property
    def norm(self) -> nn.Module:
        """Return the norm that the sub-block reads through; each of ``sub_blocks`` has one."""
        assert self.norm_name is not None
        return getattr(self.owner, self.norm_name)


def _layers_at(model: nn.Module, layers: Iterable[int] | None) -> list[tuple[int, nn.Module]]:
    """Return decoder layers by index, in order (negative ones count from the end); all of them by default."""
    stack = decoder_layers(model)
    indices = list(range(len(stack)) if layers is None else layers)
    wrong = [i for i in indices if not -len(stack) <= i < len(stack)]
    if wrong:
        raise ValueError(f"layers {wrong} are out of range: the model has {len(stack)} layers")
    return [(i, stack[i]) for i in sorted({i % len(stack) for i in indices})]


def sub_blocks(model: nn.Module, layers: Iterable[int] | None = None) -> list[SubBlock]:
    """Return both sub-blocks of every pre-norm decoder layer, or of ``layers`` (negative ones count from the end).

    These are layers as in Llama, Mistral, Qwen2, Qwen3 and GPT-2:

        x = x + attention(norm(x));  x = x + mlp(norm(x))

    Raises:
        ValueError: if a layer is another one (parallel, sandwich norms, scaled), or an index is out of range.
    """
    return [block for index, layer in _layers_at(model, layers) for block in _blocks(index, layer, plain=True)]


def unnormalised_sub_blocks(model: nn.Module, layers: Iterable[int] | None = None) -> list[SubBlock]:
    """Return attention and MLP of every decoder layer, or of ``layers``, whose outputs are added without a norm.

    These are pre-norm layers and parallel ones, x + attention(norm(x)) + mlp(norm(x)), with or without dropout or a
    constant factor on the output.

    Raises:
        ValueError: if an output is normalised first, or contains the stream already; or an index is out of range.
    """
    return [block for index, layer in _layers_at(model, layers) for block in _blocks(index, layer, plain=False)]


def _blocks(index: int, layer: nn.Module, *, plain: bool) -> list[SubBlock]:
    """Return attention and MLP of a layer; ``plain``: only if both outputs are added unchanged, one after the other."""
    children = dict(layer.named_children())
    norms = {name for name in children if "norm" in name or name.startswith("ln")}
    norm_pair = next((pair for pair in _NORM_PAIRS if norms >= {*pair}), None)
    reason = _reason_not_added(layer, norms, norm_pair, plain)
    if reason is not None:
        needed = (
            "this works on the pre-norm layer with two residual connections of Llama, Mistral, Qwen2, Qwen3 or GPT-2"
            if plain
            else "gates on sub-blocks' outputs need pre-norm or parallel layers; put Transponder on projections instead"
        )
        raise ValueError(f"layer {index} ({type(layer).__name__}: {', '.join(sorted(children))}) {reason}; {needed}")
    only = next(iter(norms)) if len(norms) == 1 else None
    before, between = norm_pair or (only, only)
    attention = attention_of(index, layer)
    return [
        SubBlock(index, "attention", attention, layer, before),
        SubBlock(index, "mlp", children["mlp"], layer, between),
    ]


def _reason_not_added(layer: Any, norms: set[str], norm_pair: Any, plain: bool) -> str | None:
    """Return why the outputs of a layer's sub-blocks are not added unchanged to the stream, or None."""
    children = dict(layer.named_children())
    for child in children.values():
        if "residual" in inspect.signature(child.forward).parameters:  # BLOOM's and MPT's
            return f"lets {type(child).__name__} add the stream"
    parallel = getattr(layer, "use_parallel_residual", False)  # GPT-NeoX, StableLM
    if "mlp" in children and children.keys() & {*_ATTENTIONS}:  # Phi, Cohere, GPT-J; the larger Falcons
        parallel = parallel or len(norms) == 1 or norms == {"ln_attn", "ln_mlp"}
    if parallel and plain:
        return "runs attention and MLP in parallel"
    if "mlp" not in children or not (norm_pair or parallel):
        before = norms & {"input_layernorm", "ln_1", "norm_1"}
        if norms and not before:
            return "normalises what its sub-blocks return"
        return "is not made of attention and an MLP behind a norm each"
    if norm_pair and norms - {*norm_pair}:
        return f"has further norms: {', '.join(sorted(norms - {*norm_pair}))} normalise what a sub-block returns"
    if not plain:
        return None
    if any("attention" in name for name in children.keys() - norms - {*_ATTENTIONS}):
        return "has a further attention"
    if getattr(layer, "residual_multiplier", 1) != 1:
        return f"multiplies what its sub-blocks return by {layer.residual_multiplier}"
    if any(isinstance(child, nn.Dropout) and child.p > 0 for child in children.values()):
        return "drops out what its sub-blocks return"
    return None
