"""Pass one value per forward pass from a model to each of its decoder layers.

1. A pre-hook on the decoder computes the value and adds it to the keyword arguments, which the decoder passes on.
2. A pre-hook on each layer reads it. If the decoder drops unknown keywords (GPT-J, BLOOM), the hook takes the value of
   the forward that runs in this thread and makes it an argument of the layer.
3. A pre-hook on the layer's attention removes it from the arguments.

Gradient checkpointing calls a layer again with the same arguments, and so with the value of the right forward. If a
layer does not pass keywords on to its attention (StableLM), the recomputation would miss the value: gradient
checkpointing then raises an error.
"""

import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from relinear.hf.model_layout import attention_of, decoder_layers, find_decoder, is_recomputed, takes_keywords

#: per thread: attribute ``key`` is a weak reference to the value of the forward that is running
_running = threading.local()


def weak_ref(value: Any) -> Any:
    """Return a weak reference, or in a compiled graph, which cannot trace references, the value itself."""
    return value if torch.compiler.is_compiling() else weakref.ref(value)


def deref(reference: Any) -> Any:
    """Return the value that ``weak_ref`` was called with, or None if it no longer exists."""
    return reference() if isinstance(reference, weakref.ref) else reference


def check_passes_to_layers(model: nn.Module) -> None:
    """Raise ValueError, saying why, if a value cannot be passed to every layer of ``model``; changes nothing."""
    for index, layer in enumerate(decoder_layers(model)):
        attention_of(index, layer)


def install_layer_context(
    model: nn.Module, key: str, compute: Callable[[Any, dict[str, Any]], Any], set_value: Callable[[int, Any], None]
) -> None:
    """Install the hooks on a decoder and its layers.

    Args:
        model: a model with one decoder.
        key: name of the keyword argument that carries the value.
        compute: ``compute(decoder, inputs)`` returns a forward's value; it may change ``inputs``, its arguments.
        set_value: ``set_value(index, value)`` is called before layer ``index`` and before its attention,
            ``set_value(-1, None)`` at the end. Both must be module-level functions or bound methods that ``deepcopy``
            copies.
    """
    decoder = find_decoder(model)
    decoder_hooks = _DecoderHooks(key, decoder, compute, set_value)
    decoder.register_forward_pre_hook(decoder_hooks.start, with_kwargs=True)
    decoder.register_forward_hook(decoder_hooks.finish, always_call=True)  # also if the forward fails
    for index, layer in enumerate(decoder_layers(model)):
        hooks = _LayerHooks(key, index, layer, set_value)
        layer.register_forward_pre_hook(hooks.enter_layer, with_kwargs=True)
        attention_of(index, layer).register_forward_pre_hook(hooks.enter_attention, with_kwargs=True)


class _DecoderHooks:
    """Compute the value before the decoder runs and forget it afterwards."""

    def __init__(
        self, key: str, decoder: nn.Module, compute: Callable[..., Any], set_value: Callable[..., None]
    ) -> None:
        self.key, self.compute, self.set_value = key, compute, set_value
        parameters = inspect.signature(decoder.forward).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
        self.names = tuple(p.name for p in parameters if p.kind in positional)

    def start(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        inputs = dict(zip(self.names, args)) | kwargs
        value = self.compute(decoder, inputs)
        setattr(_running, self.key, weak_ref(value))  # weak: only the arguments keep the value alive
        return (), inputs | {self.key: value}

    def finish(self, decoder: nn.Module, args: tuple, output: Any) -> None:
        setattr(_running, self.key, None)
        self.set_value(-1, None)


class _LayerHooks:
    """Take the value from the arguments of one layer and of its attention, and pass it to ``set_value``."""

    def __init__(self, key: str, index: int, layer: nn.Module, set_value: Callable[[int, Any], None]) -> None:
        self.key, self.index, self.layer, self.set_value = key, index, layer, set_value
        self.label = key.removeprefix("relinear_")
        self.takes_keywords = takes_keywords(layer)

    def enter_layer(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if is_recomputed(layer):
            keywords = getattr(getattr(layer, "_gradient_checkpointing_func", None), "keywords", {})
            if keywords.get("use_reentrant") is True:  # ``is``: a mock of the function returns any value
                raise ValueError(
                    f"reentrant gradient checkpointing gives wrong gradients for the {self.label}; use "
                    'model.gradient_checkpointing_enable({"use_reentrant": False})'
                )
        kwargs = dict(kwargs)
        value = kwargs.pop(self.key, None)
        if value is None:
            value = deref(getattr(_running, self.key, None))
        if value is not None:
            self.set_value(self.index, value)
            if self.takes_keywords:
                kwargs[self.key] = value
        return args, kwargs

    def enter_attention(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        kwargs = dict(kwargs)
        value = kwargs.pop(self.key, None)
        if value is not None:
            self.set_value(self.index, value)
        elif is_recomputed(self.layer):
            raise ValueError(
                f"{type(self.layer).__name__} does not pass keyword arguments on to its attention, so it cannot be "
                f"checkpointed with the {self.label}; call model.gradient_checkpointing_disable()"
            )
        return args, kwargs
