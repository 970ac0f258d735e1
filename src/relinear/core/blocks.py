"""The anatomy of a stock decoder: its layers, and in each layer the two sub-blocks that write to the residual stream.

What is recognised is the pre-norm layer that Llama, Mistral, Qwen2, Qwen3 and GPT-2 share:

    x = x + attention(norm(x));  x = x + mlp(norm(x))

Anything else (parallel residuals, sandwich norms, scaled residuals) is refused rather than guessed at.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from torch import nn

__all__ = ["SubBlock", "decoder", "decoder_layers", "sub_blocks"]


class SubBlock(NamedTuple):
    """One x = x + module(norm(x)) of a decoder layer.

    layer: index of the decoder layer. role: what the module is. owner: the decoder layer; norm_name: attribute name
    of the norm in it.
    """

    layer: int
    role: Literal["attention", "mlp"]
    owner: nn.Module
    norm_name: str
    module: nn.Module

    @property
    def norm(self) -> nn.Module:
        """The norm that the sub-block reads through."""
        return getattr(self.owner, self.norm_name)


#: attribute names in a decoder layer: (norm, module) of attention, then of the MLP
_ANATOMIES = (
    (("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp")),
    (("ln_1", "attn"), ("ln_2", "mlp")),
)


def _decoder_and_layers(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    config = getattr(model, "config", None)
    if config is None:
        raise ValueError(f"{type(model).__name__} has no config; expected a Hugging Face decoder")
    count = config.get_text_config().num_hidden_layers  # type: ignore[union-attr, operator]
    found = [
        (module, child)
        for module in model.modules()
        for child in module.children()
        if isinstance(child, nn.ModuleList) and len(child) == count and count
    ]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__}: found {len(found)} lists of {count} layers, expected the one of the decoder"
        )
    return found[0]


def decoder(model: nn.Module) -> nn.Module:
    """The module that owns the decoder layers (``LlamaModel``, ``GPT2Model``): what returns the last hidden state.

    Raises:
        ValueError: if no list of as many layers as the config names is found, or several are.
    """
    return _decoder_and_layers(model)[0]


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder's list of layers. Raises ValueError as ``decoder`` does."""
    return _decoder_and_layers(model)[1]


def sub_blocks(model: nn.Module, layers: Iterable[int] | None = None) -> list[SubBlock]:
    """Both sub-blocks of every decoder layer, or of ``layers`` (negative indices count from the end), in order.

    Raises:
        ValueError: if a layer is no pre-norm layer with two residual connections, or an index is out of range.
    """
    stack = decoder_layers(model)
    if layers is None:
        indices = list(range(len(stack)))
    else:
        wrong = [i for i in layers if not -len(stack) <= i < len(stack)]
        if wrong:
            raise ValueError(f"layers {wrong} are out of range: the model has {len(stack)} layers")
        indices = sorted({i % len(stack) for i in layers})
    return [block for i in indices for block in _of_layer(i, stack[i])]


def _plain_residual(layer: nn.Module) -> bool:
    """Whether a sub-block's output is added to the stream as it is: not scaled, dropped out, or in parallel."""
    return (
        getattr(layer, "residual_multiplier", 1) == 1
        and not getattr(layer, "use_parallel_residual", False)
        and not any(isinstance(child, nn.Dropout) and child.p > 0 for child in layer.children())
    )


def _of_layer(index: int, layer: nn.Module) -> list[SubBlock]:
    children = {name for name, _ in layer.named_children()}
    for anatomy in _ANATOMIES:
        names = {name for pair in anatomy for name in pair}
        # further norms mean that a sub-block's output is normalised, or the residual is a different one
        extra = {name for name in children - names if "norm" in name or "attention" in name or name.startswith("ln")}
        if names <= children and not extra and _plain_residual(layer):
            norms, modules = zip(*anatomy, strict=True)
            return [
                SubBlock(index, role, layer, norm, getattr(layer, module))  # type: ignore[arg-type]
                for role, norm, module in zip(("attention", "mlp"), norms, modules, strict=True)
            ]
    raise ValueError(
        f"layer {index} ({type(layer).__name__}: {', '.join(sorted(children))}) is not the pre-norm layer with two "
        "residual connections of Llama, Mistral, Qwen2, Qwen3 or GPT-2, which is what this works on"
    )
