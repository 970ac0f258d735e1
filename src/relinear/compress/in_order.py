"""Fitting the chosen operators from the first layer to the last, on the inputs that the compressed model has there.

For a layer of weight W let x be what the original model feeds it and x' what the compressed one does. Among all
matrices, W* = W C A'^(-1) with C = E[x x'^T] and A' = E[x' x'^T] is nearest to the original's outputs, and for any
other W' the excess is tr((W* - W') A' (W* - W')^T): the operator is fitted to W* under A'. A ridge draws W* towards W
where the data say little. A layer that stays dense takes W* itself, which costs no parameter.
"""

# Legend: N blocks, T tokens, D hidden size, I in_features, O out_features

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relinear.compress.calibrate import Calibration
from relinear.compress.checksums import Streams, load_tensors, save_tensors
from relinear.compress.layerwise import LayerByLayer
from relinear.compress.work import Work
from relinear.core.modes import frozen
from relinear.core.moments import Moments
from relinear.core.operator import Operator, OperatorConfig, dense_bias, dense_weight, is_conv1d, linear_of
from relinear.distill.fit import Course, FitError, Goal, improve
from relinear.distill.record import first_call
from relinear.surgery.plan import Replacement
from relinear.surgery.states import flat_states, load_states_, place_
from relinear.system.grouped import grouped

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


class InOrder:
    """The fit of a plan from the first decoder layer to the last.

    Args:
        work: whose model, in eval mode, becomes the compressed one.
        calibration: for the moments of output gradients.
        replacements: by name of the layer.
        kept: index of a decoder layer -> linear layers in it that stay dense, whose weights are to make up for what
            changed before them.
        folder: of the state.
    """

    def __init__(
        self,
        work: Work,
        calibration: Calibration,
        replacements: Mapping[str, Replacement],
        kept: Mapping[int, Sequence[str]],
        folder: Path,
    ) -> None:
        self.work, self.model, self.calibration, self.planned = work, work.model, calibration, replacements
        self.folder, self.kept, self.layers = folder, kept, LayerByLayer(work.model)
        self.names = {
            index: [*(name for name in names if name in replacements), *kept.get(index, ())]
            for index, names in work.by_layer.items()
        }

    @torch.no_grad()
    def run(self, blocks: Tensor) -> None:
        """Replace layers in place, on token ids (N, T); killed, it goes on where it was, to the same bits."""
        self.folder.mkdir(parents=True, exist_ok=True)
        parts = blocks.to(next(self.model.parameters()).device).split(self.work.settings.batch_size)
        embedded, streams = [self.layers.embed(part) for part in parts], Streams(self.folder, len(parts))
        start = min(max(streams.indices(kind), default=0) for kind in KINDS)
        for index in sorted(index for index, names in self.names.items() if names and index < start):  # they are done
            weights, _ = load_tensors(self._file(index))
            place_(self.model, [self.planned[name] for name in self.names[index] if name in self.planned], weights)
            load_states_(self.model, self.kept.get(index, ()), weights)
        self.wanted, self.states = (list(streams.read(kind, start)) if start else embedded for kind in KINDS)
        last = max(index for index, names in self.names.items() if names)
        for index in range(start, last + 1):
            self._fit_layer(index)
            if names := self.names.get(index):  # then the hidden states behind it, which say that it is done
                weights = flat_states({name: self.model.get_submodule(name) for name in names})
                save_tensors(self._file(index), weights)
            for kind, batches in zip(KINDS, (self.wanted, self.states), strict=True):
                streams.write(kind, index + 1, batches)
            for kind in KINDS:
                streams.remove(kind, index)
            self.work.on_progress("fit", index + 1, last + 1)

    def _file(self, index: int) -> Path:
        return self.folder / f"layer-{index:04d}.safetensors"

    def _fit_layer(self, index: int) -> None:
        """Fit what is planned of a layer, and carry both models' hidden states to behind it."""
        settings, names, layer = self.work.settings, self.names.get(index, []), self.layers.layers[index]
        original = copy.deepcopy(layer) if names else layer
        for group in self._by_input(names):
            self._fit_group(index, original, group)
        self.wanted = [self.layers.run(original, index, x) for x in self.wanted]
        planned = [self.model.get_submodule(name) for name in names if name in self.planned]
        if settings.refine_steps and planned:
            course = Course(1, 1, settings.refine_learning_rate, settings.seed, draws=settings.refine_steps)
            with frozen(layer):
                refine(partial(self.layers.layer, index), planned, self.states, self.wanted, course)
        self.states = [self.layers.layer(index, x) for x in self.states]

    def _by_input(self, names: Iterable[str]) -> Iterable[list[str]]:
        """Linear layers of a decoder layer, those that read one tensor together, in the order in which they run."""
        ordered = sorted(names, key=self.calibration.names.index)
        return grouped((self.calibration.input_of(name), name) for name in ordered).values()

    def _fit_group(self, index: int, original: nn.Module, group: Sequence[str]) -> None:
        """Fit the layers of one input: replace those that are planned, correct the others."""
        seen = self._moments(index, original, group[0])
        for name in group:
            source = self.model.get_submodule(name)
            weight, moments = dense_weight(source).detach().double(), self.calibration.moments(name)
            if seen is not None:
                weight, moments = _corrected(weight, *seen), Moments(seen[0], moments.outputs)
            if name in self.planned:
                operator = fit_operator(self.planned[name].config, source, weight, moments)
                place_(self.model, [self.planned[name]], flat_states({name: operator}))
            elif seen is not None:
                _give_weight_(source, weight)

    def _moments(self, index: int, original: nn.Module, name: str) -> tuple[Tensor, Tensor] | None:
        """E[x' x'^T] and E[x x'^T] (I, I) of the input of ``name``, in float64.

        None where the two models do not send the same tokens there: to an expert, after routing.
        """
        compressed = self.layers.layers[index]
        prefix = next(key for key, module in self.model.named_modules() if module is compressed)
        inside = name.removeprefix(f"{prefix}.")
        own, cross, tokens = torch.zeros(()), torch.zeros(()), 0
        for x, y in zip(self.wanted, self.states, strict=True):
            there, here = (self._input_of(inside, *one) for one in ((original, index, x), (compressed, index, y)))
            if here is None or there is None or here.shape != there.shape:
                return None
            tokens += len(here)
            own, cross = own + (here.T @ here).double(), cross + (there.T @ here).double()
        return own / tokens, cross / tokens

    def _input_of(self, inside: str, layer: nn.Module, index: int, hidden: Tensor) -> Tensor | None:
        """What reaches a module (tokens, I) when ``layer`` runs on hidden states, up to there; None if nothing."""
        seen = first_call(layer.get_submodule(inside), lambda: self.layers.run(layer, index, hidden))
        return None if seen is None else seen[0][0].detach().flatten(0, -2).float()


def _give_weight_(linear: Any, weight: Tensor) -> None:
    """A parameter of its own: the original that heals the model later goes on holding the one that was there."""
    stored = weight.T if is_conv1d(linear) else weight
    old = linear.weight
    linear.weight = nn.Parameter(stored.to(old).contiguous(), requires_grad=old.requires_grad)


def _corrected(weight: Tensor, own: Tensor, cross: Tensor) -> Tensor:
    """W* (O, I): nearest to the original's outputs on the compressed model's inputs."""
    pull = ANCHOR_RIDGE * own.diagonal().mean() * torch.eye(len(own), dtype=own.dtype, device=own.device)
    return torch.linalg.solve(own + pull, weight @ (cross + pull), left=False)


def refine(
    run: Callable[[Tensor], Tensor],
    operators: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    wanted: Sequence[Tensor],
    course: Course,
) -> tuple[FitError, FitError]:
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
    def error() -> FitError:
        return FitError(float((run(inputs[-1]).double() - wanted[-1].double()).square().mean()) / scale)

    def loss(at: Tensor) -> Tensor:
        return (run(inputs[int(at)]).float() - wanted[int(at)].float()).square().mean() / scale

    return improve(operators, Goal(max(1, len(inputs) - 1), loss, error), course)
