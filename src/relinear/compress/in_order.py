"""Fitting the chosen operators from the first layer to the last, on the inputs that the compressed model has there.

For a layer of weight W let x be what the original model feeds it and x' what the compressed one does. Among all
matrices, W* = W C A'^(-1) with C = E[x x'^T] and A' = E[x' x'^T] is nearest to the original's outputs, and for any
other W' the excess is tr((W* - W') A' (W* - W')^T): the operator is fitted to W* under A'. A ridge draws W* towards W
where the data say little. A layer that stays dense takes W* itself, which costs no parameter.
"""

# Legend: N blocks, T tokens, D hidden size, I in_features, O out_features

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import le
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relinear.compress.calibrate import Calibration
from relinear.compress.checked import Streams, load_tensors, save_tensors
from relinear.compress.layerwise import LayerByLayer
from relinear.compress.work import Work
from relinear.core.modes import frozen
from relinear.core.moments import Moments
from relinear.core.operator import Operator, OperatorConfig, dense_bias, dense_weight, is_conv1d, linear_of
from relinear.distill.fit import Course, Goal, improve
from relinear.distill.record import first_call
from relinear.surgery.plan import Replacement
from relinear.surgery.states import flat_states, load_states_, place_

__all__ = ["fit_in_order", "fit_operator", "fit_without_order", "refine"]

#: pull of the original weight on the corrected one, as a share of the inputs' mean square
ANCHOR_RIDGE = 1e-2
#: of hidden states: what the original has between two layers, and what the compressed model has
KINDS = ("wanted", "states")


def fit_operator(config: OperatorConfig, source: nn.Module, weight: Tensor, moments: Moments) -> Operator:
    """Make the operator that replaces ``source``, fitted to ``weight`` and the source's bias."""
    operator = config.convert(source)
    return operator.from_moments(linear_of(weight, dense_bias(source)), moments)


def fit_without_order(
    work: Work, calibration: Calibration, replacements: Mapping[str, Replacement]
) -> dict[str, Operator]:
    """Return every operator fitted to its own layer under the original model's moments."""
    fitted = {}
    for done, (name, replacement) in enumerate(replacements.items(), start=1):
        source = replacement.target.module
        weight = dense_weight(source).detach().double()
        fitted[name] = fit_operator(replacement.config, source, weight, calibration.moments(name))
        work.on_progress("fit", done, len(replacements))
    return fitted


@torch.no_grad()
def fit_in_order(
    work: Work,
    blocks: Tensor,
    calibration: Calibration,
    replacements: Mapping[str, Replacement],
    kept: Mapping[int, Sequence[str]],
    folder: Path,
) -> None:
    """Replace layers of the model in place; killed, it goes on from the decoder layer it was at, to the same bits.

    Args:
        work: whose model, in eval mode, becomes the compressed one.
        blocks: token ids (N, T).
        calibration: for the moments of output gradients.
        replacements: by name of the layer.
        kept: index of a decoder layer -> linear layers in it that stay dense, whose weights are to make up for what
            changed before them.
        folder: of the state.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model, settings, layers = work.model, work.settings, LayerByLayer(work.model)
    groups = {i: {n: replacements[n] for n in names if n in replacements} for i, names in work.by_layer.items()}
    parts = blocks.to(next(model.parameters()).device).split(settings.batch_size)
    last = max(index for index in groups if groups[index] or kept.get(index))
    embedded = [layers.embed(part) for part in parts]
    streams = Streams(folder, len(parts))
    start = min(max(streams.indices(kind), default=0) for kind in KINDS)
    _restore(model, groups, kept, folder, start)
    wanted, states = (list(streams.read(kind, start)) if start else embedded for kind in KINDS)
    for index in range(start, last + 1):
        planned = groups.get(index, {})
        names = [*planned, *kept.get(index, ())]
        original = copy.deepcopy(layers.layers[index]) if names else layers.layers[index]
        for group in _by_input(names, calibration):
            _fit_group(model, layers, index, original, group, planned, calibration, wanted, states)
        wanted = [layers.run(original, index, x) for x in wanted]
        if settings.refine_steps and planned:
            operators = [model.get_submodule(name) for name in planned]
            steps = settings.refine_steps
            course = Course(steps, 1, settings.refine_learning_rate, settings.seed, most=steps)
            with frozen(layers.layers[index]):
                refine(partial(layers.layer, index), operators, states, wanted, course)
        states = [layers.layer(index, x) for x in states]
        _keep(model, names, folder, index, streams, wanted, states)
        work.on_progress("fit", index + 1, last + 1)


def _by_input(names: Iterable[str], calibration: Calibration) -> Iterable[list[str]]:
    """Linear layers of a decoder layer, those that read one tensor together, in the order in which they run."""
    found: dict[str, list[str]] = {}
    order = {name: place for place, name in enumerate(calibration.names)}
    for name in sorted(names, key=lambda name: order[name]):
        found.setdefault(calibration.input_of(name), []).append(name)
    return found.values()


def _fit_group(model, layers, index, original, group, planned, calibration, wanted, states) -> None:
    """Fit the layers of one input: replace those that are planned, correct the others."""
    seen = _moments(layers, index, original, model, group[0], wanted, states)
    for name in group:
        source = model.get_submodule(name)
        weight, moments = dense_weight(source).detach().double(), calibration.moments(name)
        if seen is not None:
            weight, moments = _corrected(weight, *seen), Moments(seen[0], moments.outputs)
        if name in planned:
            operator = fit_operator(planned[name].config, source, weight, moments)
            place_(model, [planned[name]], flat_states({name: operator}))
        elif seen is not None:
            _give_weight_(source, weight)


def _give_weight_(linear: Any, weight: Tensor) -> None:
    """A parameter of its own: the original that heals the model later goes on holding the one that was there."""
    stored = weight.T if is_conv1d(linear) else weight
    old = linear.weight
    linear.weight = nn.Parameter(stored.to(old).contiguous(), requires_grad=old.requires_grad)


def _corrected(weight: Tensor, own: Tensor, cross: Tensor) -> Tensor:
    """W* (O, I): nearest to the original's outputs on the compressed model's inputs."""
    pull = ANCHOR_RIDGE * own.diagonal().mean() * torch.eye(len(own), dtype=own.dtype, device=own.device)
    return torch.linalg.solve(own + pull, weight @ (cross + pull), left=False)


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
    seen = first_call(module, lambda: layers.run(layer, index, hidden))
    return None if seen is None else seen[0][0].detach().flatten(0, -2).float()


def refine(
    run: Callable[[Tensor], Tensor],
    operators: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    wanted: Sequence[Tensor],
    course: Course,
) -> tuple[float, float]:
    """Train ``operators`` together on the squared error of their layer's output; undone where it does not help.

    The last batch judges and is not trained on (unless it is the only one).

    Args:
        run: the decoder layer, (B, T, D) -> (B, T, D).
        inputs, wanted: batches of the layer's inputs and of the outputs it should have.
        course: its samples are batches, one a step.

    Returns:
        relative squared errors on the last batch before and after.
    """
    scale = float(wanted[-1].double().square().mean()) or 1.0

    @torch.no_grad()
    def error() -> float:
        return float((run(inputs[-1]).double() - wanted[-1].double()).square().mean()) / scale

    def loss(at: Tensor) -> Tensor:
        return (run(inputs[int(at)]).float() - wanted[int(at)].float()).square().mean() / scale

    return improve(operators, Goal(max(1, len(inputs) - 1), loss, error, le), course)


# State on disk


def _keep(
    model: nn.Module, names: Iterable[str], folder: Path, index: int, streams: Streams, *kept: Sequence[Tensor]
) -> None:
    """What was fitted of the layer, then the hidden states behind it, which say that it is done."""
    weights = flat_states({name: model.get_submodule(name) for name in names})
    if weights:
        save_tensors(folder / f"layer-{index:04d}.safetensors", weights)
    for kind, batches in zip(KINDS, kept, strict=True):
        streams.write(kind, index + 1, batches)
    for kind in KINDS:
        streams.remove(kind, index)


def _restore(
    model: nn.Module,
    groups: Mapping[int, Mapping[str, Replacement]],
    kept: Mapping[int, Sequence[str]],
    folder: Path,
    start: int,
) -> None:
    """Put back the layers that are done, those before ``start``."""
    for index in sorted(groups):
        planned, others = groups[index], kept.get(index, ())
        if index < start and (planned or others):
            weights, _ = load_tensors(folder / f"layer-{index:04d}.safetensors")
            place_(model, planned.values(), weights)
            load_states_(model, others, weights)
