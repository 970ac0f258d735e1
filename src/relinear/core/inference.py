"""Inference with weights that are promised to stay: layers keep what they compute from them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

from torch import nn

from relinear.core.parameter_cache import CachingModule

__all__ = ["build_for_inference", "for_inference_", "keeping_for_inference"]

Model = TypeVar("Model", bound=nn.Module)


def for_inference_(model: Model, mode: bool = True) -> Model:
    """Let the layers of ``model`` keep what they compute from their weights, which from now on must not change.

    Without it every forward pass computes from the parameters as they are. With it small linear operators multiply with
    a dense matrix that is built once, rotors with factors that are exponentiated once, Transponder's gates have their
    curvature inside, and a few rows through HDPL, CCL and Transponder are one call, prepared once; kernels for a few
    rows are built where they are not there yet. The model is put into eval mode. What is kept is used where no
    gradients are recorded, and by several threads at once.

    The promise ends with ``model.train()`` (of a submodule for that submodule), or with ``for_inference_(model,
    False)``, which leaves the mode alone; what was kept is freed then. After a change of weights in between, call this
    function again. Changes that torch counts are noticed all the same. Writes past it are not (through ``.data``,
    ``parameter.numpy()``, or another pointer to the memory): outputs are then those of the weights before. Copies,
    pickles and checkpoints of the model hold nothing of it, and a copy does not keep anything.

    Args:
        model: any module with operators in it, placed and loaded: layers whose parameters are on the meta device
            (offloaded by accelerate) or of another class than torch's own (sharded, quantised) keep nothing.
        mode: False to end the promise.

    Returns:
        the model.

    Raises:
        ValueError: if ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"for_inference_ expects a module, got {type(model).__name__}")
    if mode:
        model.eval()
    for module in _caching(model):
        module.keep_for_inference(mode)
    return model


def build_for_inference(model: nn.Module) -> None:
    """Have the compiled kernels built, once a machine, that inference with ``model`` runs, and keep no values.

    For whoever times layers: where nobody has asked for inference yet, a few rows are not worth a build.
    """
    with keeping_for_inference(model):
        pass


@contextlib.contextmanager
def keeping_for_inference(model: nn.Module) -> Iterator[None]:
    """``for_inference_`` for code that owns the weights meanwhile: modes are left alone, and what was kept before."""
    fresh = [module for module in _caching(model) if module._kept is None]
    for module in fresh:
        module.keep_for_inference(True)
    try:
        yield
    finally:
        for module in fresh:
            module.keep_for_inference(False)


def _caching(model: nn.Module) -> list[CachingModule]:
    return [module for module in model.modules() if isinstance(module, CachingModule)]
