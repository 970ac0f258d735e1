"""Fitting the chosen operators from the first layer to the last, on the inputs that the compressed model has there.

For a layer of weight W let x be what the original model feeds it and x' what the compressed one does. Among all
matrices, W* = W C A'^(-1) with C = E[x x'^T] and A' = E[x' x'^T] is nearest to the original's outputs, and for any
other W' the excess is tr((W* - W') A' (W* - W')^T): the operator is fitted to W* under A'. A ridge draws W* towards W
where the data say little.
"""

# Legend: N blocks, T tokens, D hidden size, I in_features, O out_features

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from relinear.compress.calibrate import Calibration
from relinear.compress.layerwise import LayerByLayer
from relinear.compress.refine import refine
from relinear.core.moments import Moments
from relinear.core.operator import Operator, OperatorConfig, dense_bias, dense_weight, linear_of
from relinear.surgery.plan import Replacement
from relinear.surgery.states import flat_states, place_
from relinear.system.files import atomic_path

__all__ = ["fit_in_order", "fit_without_order"]

#: pull of the original weight on the corrected one, as a share of the inputs' mean square
ANCHOR_RIDGE = 1e-2

OnLayer = Callable[[str, int, int], None]


class _Reached(Exception):
    """Ends a pass once every module of interest has been seen."""


def _fitted(config: OperatorConfig, source: nn.Module, weight: Tensor, moments: Moments) -> Operator:
    """The operator that replaces ``source``, fitted to ``weight`` and the source's bias."""
    operator = config.convert(source)
    return operator.from_moments(linear_of(weight, dense_bias(source)), moments)


def fit_without_order(calibration: Calibration, replacements: Sequence[Replacement]) -> dict[str, Operator]:
    """Every operator fitted to its own layer under the original model's moments."""
    fitted = {}
    for replacement in replacements:
        source = replacement.target.module
        weight = dense_weight(source).detach().double()
        fitted[replacement.name] = _fitted(replacement.config, source, weight, calibration.moments(replacement.name))
    return fitted


@torch.no_grad()
def fit_in_order(
    model: Any,
    blocks: Tensor,
    calibration: Calibration,
    groups: Mapping[int, Sequence[Replacement]],
    folder: Path,
    *,
    batch: int,
    refine_steps: int = 0,
    refine_learning_rate: float = 1e-4,
    seed: int = 0,
    on_layer: OnLayer = lambda phase, done, total: None,
) -> None:
    """Replace layers of ``model`` in place; killed, it goes on from the decoder layer it was at, to the same bits.

    Args:
        model: the original, in eval mode; becomes the compressed one.
        blocks: token ids (N, T).
        calibration: for the moments of output gradients.
        groups: index of a decoder layer -> what is replaced in it.
        folder: of the state.
        batch: blocks a pass.
        refine_steps, refine_learning_rate, seed: of the refinement of each decoder layer after it was fitted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    layers = LayerByLayer(model)
    parts = blocks.to(next(model.parameters()).device).split(batch)
    last = max(groups)
    embedded = [layers.embed(part) for part in parts]
    start = _restore(model, groups, folder)
    wanted, states = (embedded, embedded) if start == 0 else _streams(folder, start)
    for index in range(start, last + 1):
        original = copy.deepcopy(layers.layers[index]) if index in groups else layers.layers[index]
        for group in _by_input(groups.get(index, ()), calibration):
            _replace_group(model, layers, index, original, group, calibration, wanted, states)
        wanted = [layers.run(original, index, x) for x in wanted]
        if refine_steps and index in groups:
            refine(
                partial(layers.layer, index),
                [model.get_submodule(r.name) for r in groups[index]],
                states,
                wanted,
                steps=refine_steps,
                learning_rate=refine_learning_rate,
                seed=seed,
            )
        states = [layers.layer(index, x) for x in states]
        _keep(model, groups.get(index, ()), folder, index, wanted, states)
        on_layer("fit", index + 1, last + 1)


def _by_input(replacements: Sequence[Replacement], calibration: Calibration) -> Iterator[list[Replacement]]:
    """Replacements of a decoder layer, those that read one tensor together, in the order in which they run."""
    found: dict[str, list[Replacement]] = {}
    order = {name: place for place, name in enumerate(calibration.names)}
    for replacement in sorted(replacements, key=lambda r: order[r.name]):
        found.setdefault(calibration.input_of(replacement.name), []).append(replacement)
    yield from found.values()


def _replace_group(model, layers, index, original, group, calibration, wanted, states) -> None:
    seen = _moments(layers, index, original, model, group[0].name, wanted, states)
    for replacement in group:
        source = replacement.target.module
        weight, moments = dense_weight(source).detach().double(), calibration.moments(replacement.name)
        if seen is not None:
            own, cross = seen
            pull = ANCHOR_RIDGE * own.diagonal().mean() * torch.eye(len(own), dtype=own.dtype, device=own.device)
            weight = torch.linalg.solve(own + pull, weight @ (cross + pull), left=False)
            moments = Moments(own, moments.outputs)
        operator = _fitted(replacement.config, source, weight, moments)
        place_(model, [replacement], flat_states({replacement.name: operator}))


def _moments(layers, index, original, model, name, wanted, states) -> tuple[Tensor, Tensor] | None:
    """E[x' x'^T] and E[x x'^T] (I, I) of the input of ``name``, in float64.

    None where the two models do not send the same tokens there: to an expert, after routing.
    """
    compressed = layers.layers[index]
    inside = _name_inside(model, compressed, name)
    own, cross, tokens = torch.zeros(()), torch.zeros(()), 0
    for x, y in zip(wanted, states, strict=True):
        there = _input_of(layers, original, index, original.get_submodule(inside), x)
        here = _input_of(layers, compressed, index, compressed.get_submodule(inside), y)
        if here is None or there is None or here.shape != there.shape:
            return None
        tokens += len(here)
        own, cross = own + (here.T @ here).double(), cross + (there.T @ here).double()
    return own / tokens, cross / tokens


def _name_inside(model: nn.Module, layer: nn.Module, name: str) -> str:
    prefix = next(key for key, module in model.named_modules() if module is layer)
    return name.removeprefix(f"{prefix}.")


def _input_of(layers: LayerByLayer, layer: nn.Module, index: int, module: nn.Module, hidden: Tensor) -> Tensor | None:
    """What reaches ``module`` (tokens, I) when ``layer`` runs on hidden states, which stops there; None if nothing."""
    found: list[Tensor] = []

    def hook(module: nn.Module, args: tuple) -> None:
        found.append(args[0].detach().flatten(0, -2).float())
        raise _Reached

    handle = module.register_forward_pre_hook(hook)
    try:
        with contextlib.suppress(_Reached):
            layers.run(layer, index, hidden)
    finally:
        handle.remove()
    return found[0] if found else None


# State on disk


def _streams(folder: Path, index: int) -> tuple[list[Tensor], list[Tensor]]:
    values = load_file(folder / f"streams-{index:04d}.safetensors")
    count = len(values) // 2
    return tuple([values[f"{kind} {i}"] for i in range(count)] for kind in ("wanted", "states"))  # type: ignore


def _keep(model, replacements, folder: Path, index: int, wanted: list[Tensor], states: list[Tensor]) -> None:
    """The layer's operators, then the hidden states behind it, which say that it is done."""
    weights = flat_states({r.name: model.get_submodule(r.name) for r in replacements})
    if weights:
        with atomic_path(folder / f"layer-{index:04d}.safetensors") as path:
            save_file(weights, path)
    streams = {f"wanted {i}": x.contiguous() for i, x in enumerate(wanted)}
    streams |= {f"states {i}": x.contiguous() for i, x in enumerate(states)}
    with atomic_path(folder / f"streams-{index + 1:04d}.safetensors") as path:
        save_file(streams, path)
    (folder / f"streams-{index:04d}.safetensors").unlink(missing_ok=True)


def _restore(model: nn.Module, groups: Mapping[int, Sequence[Replacement]], folder: Path) -> int:
    """Put back the layers that are done; the index of the first that is not."""
    found = [int(path.stem.rpartition("-")[2]) for path in folder.glob("streams-*.safetensors")]
    start = max(found, default=0)
    for index, replacements in groups.items():
        if index >= start:
            continue
        place_(model, replacements, load_file(folder / f"layer-{index:04d}.safetensors"))
    return start
