"""Run a decoder layer on one token in two C++ calls, before and after attention, instead of transformers' forward.

In a small model, one token spends more time in Python than in matrix products: seven linear layers, two norms and a
rotary embedding are separate calls, each with its checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from relinear.contract.inference import PREPARATIONS, ParameterCache
from relinear.contract.linear_layers import class_name
from relinear.kernels.implementations import Call
from relinear.kernels.native import calls, rows_unsupported
from relinear.kernels.quantized import unsupported_reason
from relinear.operators.fused_inference import Submodules
from relinear.operators.quantized import QuantizedLinear

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_LINEAR = (*_ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
#: class that the fused forward replaces; importing transformers' module takes time
_LLAMA = "transformers.models.llama.modeling_llama.LlamaDecoderLayer"
_NORM = "transformers.models.llama.modeling_llama.LlamaRMSNorm"


class _Calls(NamedTuple):
    """The two C++ calls, and the submodules whose hooks they would skip."""

    before_attention: Callable[..., tuple[Tensor, Tensor, Tensor]]
    after_attention: Callable[..., Tensor]
    submodules: Submodules


class FusedDecoderLayer:
    """Run one token through a decoder layer of quantized layers; for other inputs, call the class's forward.

    Copies and pickles have no cache, so they always call the class's forward.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.cache: ParameterCache | None = ParameterCache(layer)

    def __getstate__(self) -> dict[str, Any]:
        return {"layer": self.layer, "cache": None}

    def __call__(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kw: Any) -> Tensor:
        x = hidden_states
        layer = self.layer
        past = kw.get("past_key_values")
        rotary = kw.get("position_embeddings")
        one_token = x.dtype == torch.float32 and x.numel() == x.shape[-1] and not (args or rows_unsupported(x))
        plain_mask = attention_mask is None or attention_mask.dtype == torch.bool
        if self.cache is not None and one_token and plain_mask and past is not None and rotary is not None:
            compiled = self.cache.get("calls", self._compiled_calls)
            if compiled is not None and not layer.training and compiled.submodules.are_unhooked():
                attention = cast("Any", layer.self_attn)
                parameter_cache = attention.q_proj.parameter_cache
                if parameter_cache is not None and parameter_cache.rounds_inputs:
                    query, key, value = compiled.before_attention(x, *rotary)
                    keys, values = past.update(key, value, attention.layer_idx)
                    mask, scale = attention_mask, attention.scaling
                    attended = scaled_dot_product_attention(query, keys, values, mask, scale=scale)
                    return compiled.after_attention(x, attended)
        return type(layer).forward(layer, hidden_states, attention_mask, *args, **kw)

    def _compiled_calls(self) -> _Calls | None:
        """Return the calls with the layer's parameters; None if C++ cannot run them."""
        layer = cast("Any", self.layer)
        matrices = _matrices(self.layer)
        if not matrices or any(unsupported_reason(Call(m[2].new_empty(1, m[0]), *m[1:])) for m in matrices):
            return None
        norms = layer.input_layernorm, layer.post_attention_layernorm
        eps, size = norms[0].variance_epsilon, layer.self_attn.head_dim
        before, after = calls.decoder_layer(matrices, [norm.weight for norm in norms], size, eps)
        return _Calls(before, after, Submodules(layer))


def _matrices(layer: nn.Module) -> list[tuple[Any, ...]]:
    """Return (in_features, packed tensors) of all linear layers of a decoder layer; [] unless all are quantized."""
    linear = [layer.get_submodule(name) for name in _LINEAR]
    packed = [layer for layer in linear if type(layer) is QuantizedLinear and layer.config.levels == "uniform"]
    return [(layer.in_features, *layer._tensors()) for layer in packed] if len(packed) == len(linear) else []


def fused_llama(layer: Any) -> FusedDecoderLayer | None:
    """Return the fused forward of a Llama decoder layer whose linear layers are all quantized; None for others."""
    config, norms = layer.self_attn.config, (layer.input_layernorm, layer.post_attention_layernorm)
    if any(class_name(norm) != _NORM or norm.weight.dtype != torch.float32 for norm in norms):
        return None  # a residual method has replaced a norm
    supported = config.hidden_act == "silu" and config._attn_implementation == "sdpa"
    patched = not isinstance(layer.__dict__.get("forward"), FusedDecoderLayer | None)
    return FusedDecoderLayer(layer) if supported and not patched and _matrices(layer) else None


def fuse_layers_(model: nn.Module) -> None:
    """Give the Llama decoder layers of ``model`` their fused forward, where there is one."""
    for layer in model.modules():
        if class_name(layer) == _LLAMA and (forward := fused_llama(layer)):
            layer.forward = forward  # stays in place: without caches it calls the class's forward


PREPARATIONS.append(fuse_layers_)
