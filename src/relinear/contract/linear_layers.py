"""Recognise a model's linear layers and embeddings, stock ones and operators; read their sizes, weight and bias."""

# Legend: I in_features, O out_features

import itertools
import re
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor, nn

from relinear.contract.module_state import is_unhooked

_CONV1D = "transformers.pytorch_utils.Conv1D"
# Operators replace and fit these layers of transformers, so the contract knows them, by name, without importing it.
#: transformers' own linear layers
_STOCK = (_CONV1D, "transformers.models.falcon.modeling_falcon.FalconLinear")
#: transformers' embeddings that only multiply their rows by a number
_SCALED = re.compile(r"transformers\.models\..*ScaledWordEmbedding")
#: plain tensors, as torch.func replaces parameters by them
_ORDINARY = (nn.Parameter, Tensor)


def class_name(module: Any) -> str:
    """Return the class of ``module`` with its Python module, to compare without importing it."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def is_conv1d(module: Any) -> bool:
    """Return whether ``module`` is GPT-2's transposed linear."""
    return class_name(module) == _CONV1D


def is_stock_linear(module: Any) -> bool:
    """Return whether ``module`` is exactly nn.Linear or one of transformers' ``_STOCK``.

    Other subclasses of nn.Linear are not: they may compute something else.
    """
    return type(module) is nn.Linear or class_name(module) in _STOCK


def is_plain_linear(module: Any) -> TypeGuard[nn.Linear]:
    """Return whether ``module`` is exactly ``nn.Linear``, without hooks and with an ordinary tensor as its weight.

    Subclasses, adapters, and layers with quantized, sharded or parametrised weights are not.
    """
    return type(module) is nn.Linear and type(module._parameters.get("weight")) in _ORDINARY and is_unhooked(module)


def is_embedding(module: Any) -> bool:
    """Return whether ``module`` is a stock embedding, which only looks up rows of its weight and scales them."""
    stock = type(module) is nn.Embedding or _SCALED.fullmatch(class_name(module)) is not None
    return stock and module.max_norm is None


class ReplacedLayer(NamedTuple):
    """What an operator has to know of the stock layer that it replaced.

    Attributes:
        is_conv1d: whether it was GPT-2's transposed linear; folding returns one.
        num_embeddings: size of the vocabulary if it was an embedding; None for other layers.
        row_scale: factor on the rows that an embedding looks up; 1 except for scaled ones (Gemma's).
        embedding_class: class of the embedding.
        padding_idx: its row that is not trained, if any.
    """

    is_conv1d: bool = False
    num_embeddings: int | None = None
    row_scale: float = 1.0
    embedding_class: type[nn.Module] = nn.Embedding
    padding_idx: int | None = None


def replaced_layer(module: Any) -> ReplacedLayer:
    """Return the facts on ``module`` or, if it is an operator, on the layer that it replaced."""
    if isinstance(known := getattr(module, "replaced", None), ReplacedLayer):
        return known
    if not is_embedding(module):
        return ReplacedLayer(is_conv1d(module))
    scale = getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", None))
    scale = 1.0 if scale is None else float(scale)
    return ReplacedLayer(False, module.num_embeddings, scale, type(module), module.padding_idx)


def embeds(module: Any) -> bool:
    """Return whether ``module`` maps token ids to rows: an nn.Embedding, or an operator that replaces one."""
    return getattr(module, "num_embeddings", None) is not None


def linear_features(module: Any) -> tuple[int, int]:
    """Return (in_features, out_features) of an nn.Linear, a Conv1D, an operator or (as a head's) an nn.Embedding.

    Raises ValueError for anything without such sizes.
    """
    if is_embedding(module):
        return module.embedding_dim, module.num_embeddings
    if is_conv1d(module):
        return int(module.weight.shape[0]), int(module.weight.shape[1])
    if not hasattr(module, "in_features") or not hasattr(module, "out_features"):
        raise _not_linear(module)
    return int(module.in_features), int(module.out_features)


def reference_tensor(module: nn.Module) -> Tensor:
    """Return the first floating-point parameter or buffer, whose device, dtype and ``requires_grad`` new ones take.

    Raises ValueError if there is none, as in a layer with integer weights.
    """
    tensors = itertools.chain(module.parameters(), module.buffers())
    reference = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    if reference is None:
        raise ValueError(f"{type(module).__name__} has no floating-point tensor; load the model unquantized")
    return reference


def dense_weight(module: Any) -> Tensor:
    """Return the (out_features, in_features) matrix of an nn.Linear, a Conv1D or an operator that has one."""
    if hasattr(module, "to_dense"):
        return module.to_dense()
    if is_conv1d(module):
        return module.weight.T
    if isinstance(module, nn.Linear) or is_embedding(module):
        return module.weight
    raise _not_linear(module)


def _not_linear(module: Any) -> ValueError:
    return ValueError(f"expected nn.Linear, Conv1D or a relinear operator, got {type(module).__name__}")


def dense_bias(module: Any) -> Tensor | None:
    """Return the bias that belongs to ``dense_weight``, or None."""
    return module.dense_bias() if hasattr(module, "dense_bias") else getattr(module, "bias", None)


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Return a frozen nn.Linear that shares the memory of ``weight`` (O, I) and ``bias`` (O,)."""
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear
