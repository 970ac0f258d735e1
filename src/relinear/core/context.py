"""The context carrier: a tensor computed once a forward pass by one owner and read by many operators.

How it travels. A keyword-aware pre-hook on the base model lets the owner compute the context and adds it to the
keyword arguments, which every decoder layer hands on to its attention; a pre-hook there takes it out again and puts it
into the carrier, from which the operators of that block read it, those of the attention and those of the MLP after it.
The context is thus an argument of the layer: gradient checkpointing recomputes a block with the very tensor of the
forward that it belongs to, however many forwards lie between. The carrier itself owns nothing (it holds a weak
reference), so no operator can read the context of a forward that is over.
"""

# Legend: B batch, T tokens, C context_dim

from __future__ import annotations

import inspect
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from relinear.core.operator import Operator

__all__ = [
    "ContextOwner",
    "attention_blocks",
    "check_carries_context",
    "check_conditioned",
    "check_context_is_there",
    "conditioned_operators",
    "context",
    "context_owner",
    "current_context",
]

#: name of the owner's submodule in the base model
OWNER_NAME = "relinear_context"
_KEY = "relinear_context"
_ATTENTION_NAMES = ("self_attn", "attn", "attention", "self_attention")


class _Carrier(threading.local):
    """What operators read, by thread: the innermost ``context`` block's tensor, or that of the running block."""

    given: Tensor | None = None
    block: Any = None


_carrier = _Carrier()


class context:
    """``with relinear.context(c): y = module(x)`` gives a conditioned operator its context by hand.

    Args:
        c: (..., T, C), the leading sizes those of the operator's input, or ones to broadcast.

    Blocks nest; the innermost counts. Inside a model that has a context manager, the manager's context counts, except
    in a block that is opened within the forward pass. Recomputation by gradient checkpointing sees a block only if the
    block lies inside the checkpointed function.
    """

    def __init__(self, c: Tensor) -> None:
        if not isinstance(c, Tensor) or not c.is_floating_point() or c.ndim < 1:
            kind = f"{c.dtype} of shape {tuple(c.shape)}" if isinstance(c, Tensor) else type(c).__name__
            raise ValueError(f"a context is a floating-point tensor (..., T, context_dim), got {kind}")
        self._value = c
        self._saved: list[tuple[Tensor | None, Any]] = []

    def __enter__(self) -> Tensor:
        self._saved.append((_carrier.given, _carrier.block))
        _carrier.given, _carrier.block = self._value, None
        return self._value

    def __exit__(self, *exception: object) -> None:
        _carrier.given, _carrier.block = self._saved.pop()


def current_context(x: Tensor | None, context_dim: int, kind: str) -> Tensor:
    """The context that belongs to the input ``x`` of a conditioned operator.

    Args:
        x: (..., T, I), the operator's input; None to take the context whatever its tokens.
        context_dim: C, the width that the operator was built for.
        kind: the operator's kind, for messages.

    Returns:
        (..., T, C), or with ones where one context holds for several tokens; fewer leading dimensions are possible.

    Raises:
        ValueError: if there is no context, its width differs, or its tokens are not those of ``x``.
    """
    value = _carrier.block
    if isinstance(value, weakref.ref):
        value = value()
    if value is None:
        value = _carrier.given
    if value is None:
        raise ValueError(
            f"{kind} needs a context and there is none. In a model: relinear.attach_(model, "
            f"relinear.ContextManager(dim={context_dim})); alone: with relinear.context(c): ... If the model has a "
            "manager, this layer lies outside its attention blocks, or the model does not hand keyword arguments on to "
            "its attention, and cannot be conditioned"
        )
    if value.shape[-1] != context_dim:
        raise ValueError(
            f"{kind} was built for context_dim={context_dim}, the context has width {value.shape[-1]}; make "
            "ContextManager(dim=) and the operator's context_dim equal"
        )
    if x is None:
        return value
    lead, own = tuple(value.shape[:-1]), tuple(x.shape[:-1])
    if len(lead) > len(own) or any(a not in (1, b) for a, b in zip(reversed(lead), reversed(own))):
        raise ValueError(
            f"{kind}: the context is for tokens {lead}, the input has {own}. A layer that sees flattened or routed "
            "tokens (experts) cannot be conditioned; by hand, give a context of shape (..., T, context_dim)"
        )
    return value


def check_conditioned(model: nn.Module, name: str, config: Any) -> None:
    """Raise ValueError if the owner attached to ``model`` cannot serve an operator of ``config`` at ``name``."""
    owner = context_owner(model)
    if owner is None or not config.conditioned:
        return
    if owner.context_dim != config.context_dim:
        raise ValueError(
            f"{name}: {config.kind} with context_dim={config.context_dim}, but the model's context manager has "
            f"dim={owner.context_dim}; make them equal"
        )
    base: Any = getattr(model, "base_model", model)
    target = model.get_submodule(name)
    if not any(target is module for layer, _ in attention_blocks(base) for module in layer.modules()):
        raise ValueError(f"{name}: {config.kind} outside the decoder layers, where no context reaches it")


def check_context_is_there(model: nn.Module) -> None:
    """Raise ValueError if ``model`` has conditioned operators and no owner: its first forward would fail."""
    name, operator = next(iter(conditioned_operators(model).items()), (None, None))
    if operator is not None and context_owner(model) is None:
        dim = operator.config.context_dim
        raise ValueError(
            f"{name} ({operator.config.kind}) needs a context: relinear.attach_(model, relinear.ContextManager("
            f"dim={dim})), or in a recipe attachments: [{{kind: context_manager, dim: {dim}}}]"
        )


def conditioned_operators(model: nn.Module) -> dict[str, Any]:
    """Every operator of ``model`` that reads the context, by name (also those that another operator holds)."""
    return {n: m for n, m in model.named_modules() if isinstance(m, Operator) and m.config.conditioned}


def context_owner(model: Any) -> Any:
    """The owner attached to ``model`` (what runs in its place, where PEFT keeps a copy to train), or None."""
    return next((m._modules[OWNER_NAME] for m in model.modules() if OWNER_NAME in m._modules), None)


def attention_blocks(base: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """(decoder layer, its self-attention) of a base model, in order.

    Raises:
        ValueError: if there is no list of layers, or a layer without one attention block of a known name.
    """
    layers = next((m for m in base.children() if isinstance(m, nn.ModuleList) and len(m)), None)
    if layers is None:
        raise ValueError(f"{type(base).__name__} has no list of decoder layers, so no block can be given a context")
    found = []
    for index, layer in enumerate(layers):
        names = [name for name in _ATTENTION_NAMES if isinstance(getattr(layer, name, None), nn.Module)]
        if len(names) != 1:
            raise ValueError(
                f"layer {index} ({type(layer).__name__}) has no attention block by one of the names "
                f"{', '.join(_ATTENTION_NAMES)}; the context is handed to a block where its attention starts"
            )
        attention = getattr(layer, names[0])
        for module in (layer, attention):
            kinds = [p.kind for p in inspect.signature(module.forward).parameters.values()]
            if inspect.Parameter.VAR_KEYWORD not in kinds:
                raise ValueError(
                    f"{type(module).__name__}.forward takes no further keyword arguments, so the context cannot travel "
                    "through it"
                )
        found.append((layer, attention))
    return found


def check_carries_context(model: Any) -> nn.Module:
    """The base model that an owner can be installed on; changes nothing.

    Raises:
        ValueError: saying why the context cannot be right in this model.
    """
    name = type(model).__name__
    config = getattr(model, "config", None)
    base = getattr(model, "base_model", None)
    if config is None or not isinstance(base, nn.Module) or not hasattr(model, "get_input_embeddings"):
        raise ValueError(f"a context manager needs a Hugging Face decoder, not {name}; use relinear.context by hand")
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"{name} is an encoder-decoder or has cross-attention: encoder and decoder tokens differ, and one causal "
            "context cannot serve both; use a decoder-only model"
        )
    if hasattr(config, "get_text_config") and config.get_text_config() is not config:
        raise ValueError(f"{name} is made of several models; attach the context manager to its language model alone")
    if context_owner(model) is not None:
        raise ValueError(f"{name} has a context manager already; a model has one, shared by all conditioned layers")
    blocks = attention_blocks(base)
    inside = {id(module) for layer, _ in blocks for module in layer.modules()}
    for key, operator in conditioned_operators(model).items():
        if id(operator) not in inside:
            raise ValueError(
                f"{key} lies outside the decoder layers, where no context reaches it; replace it by another operator"
            )
    return base


class ContextOwner(nn.Module):
    """Base of the one module that computes the context of every forward pass of a model.

    Subclasses implement ``contexts`` and set ``context_dim``. ``install`` registers the module and the hooks; hooks are
    bound methods of the module itself, so that ``deepcopy`` of the model gives the copy its own.
    """

    context_dim: int

    def contexts(self, base: Any, inputs: dict[str, Any]) -> Tensor:
        """The context (B, T, C) for the arguments ``inputs`` of the base model's forward, which it may change."""
        raise TypeError(f"{type(self).__name__} does not say how it computes a context")

    def install(self, base: nn.Module) -> None:
        """Register this module on ``base`` and hook it up; ``check_carries_context`` must have passed."""
        parameters = inspect.signature(base.forward).parameters.values()
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
        self._argument_names = tuple(p.name for p in parameters if p.kind in named)
        base.add_module(OWNER_NAME, self)
        base.register_forward_pre_hook(self._before_model, with_kwargs=True)
        base.register_forward_hook(_after_model)
        for _, attention in attention_blocks(base):
            attention.register_forward_pre_hook(_enter_block, with_kwargs=True)

    def _before_model(self, base: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if getattr(base, "_is_replica", False):
            raise ValueError(
                "nn.DataParallel copies modules without their hooks' owners; use DistributedDataParallel (torchrun)"
            )
        if base.training and getattr(base, "gradient_checkpointing", False):
            keywords = getattr(getattr(base, "_gradient_checkpointing_func", None), "keywords", {})
            if keywords.get("use_reentrant", False):
                raise ValueError(
                    "reentrant gradient checkpointing runs backward through the context once for every block and "
                    'cannot be right; use model.gradient_checkpointing_enable({"use_reentrant": False})'
                )
        inputs = dict(zip(self._argument_names, args)) | kwargs
        # looked up by name, so that PEFT may put a wrapper in its place
        inputs[_KEY] = getattr(base, OWNER_NAME).contexts(base, inputs)
        return (), inputs


def _enter_block(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    kwargs = dict(kwargs)
    value = kwargs.pop(_KEY, None)
    if value is not None:
        # A compiled graph cannot follow a weak reference, and cannot outlive its own forward either.
        _carrier.block = value if torch.compiler.is_compiling() else weakref.ref(value)
    return args, kwargs


def _after_model(module: nn.Module, args: tuple, output: Any) -> None:
    _carrier.block = None
