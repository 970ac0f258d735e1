"""The shared context: a tensor that one owner computes once a forward pass and many operators read.

A pre-hook on the decoder lets the owner compute the context, and every decoder layer gets it as an argument (see
``layer_context``). Before a layer runs, a hook puts the context into a thread-local carrier, from which operators read
it. The carrier holds a weak reference, so no operator can read the context of an earlier forward.
"""

# Legend: B batch, T tokens, C context_dim

import threading
from typing import Any

from torch import Tensor, nn

from relinear.activations.layer_context import check_passes_to_layers, deref, install_layer_context, weak_ref
from relinear.contract.operator import Operator
from relinear.hf.model_config import is_encoder_decoder, text_config
from relinear.hf.model_layout import decoder_layers, find_decoder, takes_keywords
from relinear.hf.peft_models import unwrapped

#: name of the owner's submodule in the decoder
OWNER_NAME = "relinear_context"
_KEY = "relinear_context"


class _Carrier(threading.local):
    """Hold, per thread, the context of the innermost ``context`` block and a weak reference to the running layer's."""

    block_context: Tensor | None = None
    running_context: Any = None


_carrier = _Carrier()


class context:
    """Give conditioned operators their context within a ``with`` block.

    Blocks nest; operators read the innermost. In a model with a ``ContextManager`` they read its context, unless the
    block is opened within the forward pass. Gradient checkpointing's recomputation sees a block only if that lies
    inside the checkpointed function.

    Args:
        c: (..., T, C), with the leading sizes of the operator's input, or ones to broadcast.

    Raises:
        ValueError: if ``c`` is not a floating-point tensor; by the operator, if it does not fit the operator's input.

    Examples:
        >>> layer = relinear.CCL(rank=8, context_dim=4).build(16, 32)
        >>> with relinear.activations.context(torch.randn(1, 6, 4)):
        ...     layer(torch.randn(1, 6, 16)).shape
        torch.Size([1, 6, 32])
    """

    def __init__(self, c: Tensor) -> None:
        if not isinstance(c, Tensor) or not c.is_floating_point() or c.ndim < 1:
            kind = f"{c.dtype} of shape {tuple(c.shape)}" if isinstance(c, Tensor) else type(c).__name__
            raise ValueError(f"a context is a floating-point tensor (..., T, context_dim), got {kind}")
        self._value = c
        self._saved: list[tuple[Tensor | None, Any]] = []

    def __enter__(self) -> Tensor:
        self._saved.append((_carrier.block_context, _carrier.running_context))
        _carrier.block_context, _carrier.running_context = self._value, None
        return self._value

    def __exit__(self, *exception: object) -> None:
        _carrier.block_context, _carrier.running_context = self._saved.pop()


def current_context(x: Tensor | None, context_dim: int, kind: str) -> Tensor:
    """Return the context for the input ``x`` of a conditioned operator.

    Args:
        x: (..., T, I), the operator's input; None skips the check of shapes.
        context_dim: C, the width that the operator was built for.
        kind: the operator's kind, for messages.

    Returns:
        (..., T, C); sizes may be 1, and leading dimensions missing, to broadcast.

    Raises:
        ValueError: if there is no context, its width differs, or its tokens are not those of ``x``.
    """
    value = deref(_carrier.running_context)
    if value is None:
        value = _carrier.block_context
    if value is None:
        raise ValueError(
            f"{kind} needs a context and there is none: call relinear.attach_(model, "
            f"relinear.ContextManager(dim={context_dim})), or use `with relinear.activations.context(c):`. Layers "
            "outside the decoder layers cannot be conditioned"
        )
    if value.shape[-1] != context_dim:
        raise ValueError(f"{kind} was built for {context_dim=}, not for a context of width {value.shape[-1]}")
    if x is None:
        return value
    context_tokens, tokens = tuple(value.shape[:-1]), tuple(x.shape[:-1])
    pairs = zip(reversed(context_tokens), reversed(tokens))
    if len(context_tokens) > len(tokens) or any(a not in (1, b) for a, b in pairs):
        raise ValueError(
            f"{kind}: the context is for tokens {context_tokens}, the input has {tokens}. A layer that sees flattened "
            "or routed tokens (experts) cannot be conditioned"
        )
    return value


def check_context_serves(model: nn.Module, name: str, config: Any) -> None:
    """Raise ValueError if the context owner of ``model`` cannot serve an operator of ``config`` at ``name``."""
    owner = context_owner(model) if config.conditioned else None
    if owner is None:
        return
    if owner.context_dim != config.context_dim:
        raise ValueError(
            f"{name}: {config.kind} has context_dim={config.context_dim}, relinear.ContextManager "
            f"dim={owner.context_dim}; make them equal"
        )
    _check_reached(model, name, f"{name}: {config.kind}")


def _check_reached(model: nn.Module, name: str, subject: str) -> None:
    """Raise ValueError if no context reaches the layer ``name``."""
    target = model.get_submodule(name)
    if not any(module is target for layer in decoder_layers(model) for module in layer.modules()):
        raise ValueError(f"{subject} lies outside the decoder layers, where no context reaches it")


def check_context_is_there(model: nn.Module) -> None:
    """Raise ValueError if ``model`` has conditioned operators but no context owner."""
    name, operator = next(iter(conditioned_operators(model).items()), (None, None))
    if operator is not None and context_owner(model) is None:
        dim = operator.config.context_dim
        raise ValueError(
            f"{name} ({operator.config.kind}) needs a context: relinear.attach_(model, relinear.ContextManager("
            f"dim={dim})), or in a recipe attachments: [{{kind: context_manager, dim: {dim}}}]"
        )


def conditioned_operators(model: nn.Module) -> dict[str, Any]:
    """Return every operator of ``model`` that reads the context, by name, also those inside other operators."""
    return {n: m for n, m in model.named_modules() if isinstance(m, Operator) and m.config.conditioned}


def context_owner(model: Any) -> Any:
    """Return the context owner attached to ``model`` (or PEFT's wrapper of the owner), or None."""
    return next((m._modules[OWNER_NAME] for m in model.modules() if OWNER_NAME in m._modules), None)


def decoder_for_context(model: Any) -> nn.Module:
    """Return the decoder of ``model``, on which an owner can be installed; changes nothing.

    Raises:
        ValueError: if the model cannot carry a context, saying why.
    """
    model = unwrapped(model)
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "base_model") or not hasattr(model, "get_input_embeddings"):
        raise ValueError(
            f"relinear.ContextManager and SecondEmbedding need a Hugging Face decoder, not {name}; outside of one use "
            "relinear.activations.context"
        )
    if is_encoder_decoder(model) or getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"{name} is an encoder-decoder or has cross-attention: encoder and decoder tokens differ, and one causal "
            "context cannot serve both; use a decoder-only model"
        )
    if text_config(model) is not config:
        raise ValueError(f"{name} is several models in one; attach relinear.ContextManager to its language model alone")
    if context_owner(model) is not None:
        raise ValueError(f"{name} has a ContextManager or SecondEmbedding already; a model has one")
    decoder = find_decoder(model)
    check_passes_to_layers(model)
    if not hasattr(decoder, "get_input_embeddings") or not takes_keywords(decoder):
        raise ValueError(f"{type(decoder).__name__}, which runs the layers of {name}, cannot pass a context on to them")
    for key in conditioned_operators(model):
        _check_reached(model, key, key)
    return decoder


class ContextOwner(nn.Module):
    """Base of the module that computes a model's context in every forward pass.

    Subclasses implement ``contexts`` and set ``context_dim``. ``install`` registers the module and its hooks. Hooks are
    bound methods of the module, so that a deepcopy of the model has its own.
    """

    context_dim: int
    #: attribute with this module's own token embedding, if any, which is resized with the model's
    token_table_attribute: str | None = None

    def contexts(self, decoder: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the context (B, T, C) for ``inputs``, the arguments of the decoder's forward; may change them."""
        raise NotImplementedError(f"{type(self).__name__} does not implement contexts")

    def install(self, decoder: nn.Module) -> None:
        """Register this module and its hooks on ``decoder``, which ``decoder_for_context`` returned."""
        decoder.add_module(OWNER_NAME, self)
        install_layer_context(decoder, _KEY, self._context, _enter_layer)

    def _context(self, decoder: Any, inputs: dict[str, Any]) -> Tensor:
        if getattr(decoder, "_is_replica", False):
            raise ValueError("nn.DataParallel does not copy hooks correctly; use DistributedDataParallel (torchrun)")
        # looked up by name, so that PEFT may wrap it
        return getattr(decoder, OWNER_NAME).contexts(decoder, inputs)


def _enter_layer(index: int, value: Tensor | None) -> None:
    _carrier.running_context = None if value is None else weak_ref(value)
