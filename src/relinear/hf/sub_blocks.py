"""Find the sub-blocks (attention and MLP) of decoder layers whose outputs are added to the residual stream."""

import inspect
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from torch import nn

from relinear.hf.model_layout import ATTENTION_NAMES, attention_of, decoder_layers, existing_layer_indices

#: names of the norms of a decoder layer that read the stream for its attention and for its MLP
_NORM_PAIRS = (("input_layernorm", "post_attention_layernorm"), ("ln_1", "ln_2"), ("ln_attn", "ln_mlp"))


class SubBlock(NamedTuple):
    """The attention or MLP of a decoder layer, whose output is added to the residual stream.

    Attributes:
        layer: index of the decoder layer.
        role: which of the two the module is.
        module: the attention or MLP.
        owner: the decoder layer.
        norm_name: its attribute with the sub-block's input norm, which some parallel layers share; None if unknown.
    """

    layer: int
    role: Literal["attention", "mlp"]
    module: nn.Module
    owner: nn.Module
    norm_name: str | None

    @property
    def norm(self) -> nn.Module:
        """Return the sub-block's input norm; every one of ``sub_blocks`` has one."""
        assert self.norm_name is not None
        return getattr(self.owner, self.norm_name)


def sub_blocks(model: nn.Module, layers: Iterable[int] | None = None, *, plain: bool = True) -> list[SubBlock]:
    """Return both sub-blocks of every decoder layer, or of ``layers`` (negative ones count from the end).

    Args:
        model: any Hugging Face decoder.
        layers: indices of decoder layers.
        plain: whether layers must add both outputs unchanged, as in Llama, Mistral, Qwen2, Qwen3 and GPT-2:
            x = x + attention(norm(x)); x = x + mlp(norm(x)). False also accepts parallel layers,
            x + attention(norm(x)) + mlp(norm(x)), and dropout or a constant factor on the output.

    Raises:
        ValueError: if a layer is of another kind, such as one that normalises outputs, or an index is out of range.
    """
    stack = decoder_layers(model)
    indices = range(len(stack)) if layers is None else existing_layer_indices(layers, len(stack))
    return [block for index in indices for block in _blocks(index, stack[index], plain)]


def _blocks(index: int, layer: nn.Module, plain: bool) -> list[SubBlock]:
    """Return both sub-blocks of a layer; with ``plain`` both outputs must be added unchanged, one after the other."""
    children = dict(layer.named_children())
    norms = {name for name in children if "norm" in name or name.startswith("ln")}
    norm_pair = next((pair for pair in _NORM_PAIRS if norms >= {*pair}), None)
    if not _adds_outputs(layer, norms, norm_pair, plain):
        needed = (
            "the pre-norm layer with two residual connections of Llama, Mistral, Qwen2, Qwen3 or GPT-2"
            if plain
            else "a pre-norm or parallel layer, as gates on sub-blocks need; put Transponder on projections instead"
        )
        raise ValueError(f"layer {index} ({type(layer).__name__}: {', '.join(sorted(children))}) is not {needed}")
    shared_norm = next(iter(norms)) if len(norms) == 1 else None
    attention_norm, mlp_norm = norm_pair or (shared_norm, shared_norm)
    return [
        SubBlock(index, "attention", attention_of(index, layer), layer, attention_norm),
        SubBlock(index, "mlp", children["mlp"], layer, mlp_norm),
    ]


def _adds_outputs(layer: Any, norms: set[str], norm_pair: Any, plain: bool) -> bool:
    """Return whether a layer adds its sub-blocks' outputs to the stream; with ``plain`` unchanged, one after the other.

    ``norms`` are the names of its norms, ``norm_pair`` those that read the stream.
    """
    children = dict(layer.named_children())
    parallel = getattr(layer, "use_parallel_residual", False)  # GPT-NeoX, StableLM
    if children.keys() & {*ATTENTION_NAMES}:  # Phi, Cohere, GPT-J; the larger Falcons
        parallel = parallel or len(norms) == 1 or norms == {"ln_attn", "ln_mlp"}
    if "mlp" not in children or not (norm_pair or parallel):
        return False
    # BLOOM's and MPT's sub-blocks add the stream themselves; further norms normalise what a sub-block returns
    adds_stream = any("residual" in inspect.signature(child.forward).parameters for child in children.values())
    if adds_stream or (norm_pair and norms - {*norm_pair}):
        return False
    further_attention = any("attention" in name for name in children.keys() - norms - {*ATTENTION_NAMES})
    drops = any(isinstance(child, nn.Dropout) and child.p > 0 for child in children.values())
    scales = getattr(layer, "residual_multiplier", 1) != 1
    return not (plain and (parallel or further_attention or drops or scales))
