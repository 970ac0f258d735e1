"""The rank of any operator's outputs, how linear it is, and how far training moved its parameters."""

# Legend: N sequences, T tokens of all sequences, I in_features, O out_features

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from relinear.analysis.analyses import Subject, layer_row, short_name
from relinear.analysis.effective_rank import decay_panel, decays, effective_rank, singular_values
from relinear.contract.linear_layers import embeds, linear_features
from relinear.contract.module_state import eval_mode, observe_forwards
from relinear.contract.operator import is_replaceable, named_operators
from relinear.pages.blocks import Block, Cell, Chart, Table
from relinear.pages.figures import PALETTE, REFERENCE, Axis, Guide, Panel, Series
from relinear.training.run import initial_values

#: how to read its figures, for the page
HOW_TO_READ = (
    "The effective rank of outputs is the number of directions that a layer writes to. The linear share is how much of "
    "the variance of its outputs the best dense layer with a bias explains: at 1 such a layer could replace it on this "
    "data. The update is the norm of trained minus initial parameters, relative to the initial ones."
)

#: bytes of statistics in memory at a time
_MEMORY = 2**30


@torch.no_grad()
def output_statistics(model: nn.Module, layers: Mapping[str, nn.Module], ids: Tensor) -> dict[str, dict[str, Any]]:
    """Return statistics of the inputs and outputs of ``layers`` on token ids (N, tokens in each), in eval mode.

    Returns:
        {name: {"tokens": T, "width": O, "effective_rank": {"data": of the centred outputs}, "singular_values": {"data":
        theirs, normalised to a largest one of 1}, "linear_share": of the variance of the outputs that an affine map of
        the inputs explains, adjusted for its number of inputs; None if these are over half of T}}.
    """
    statistics: dict[str, dict[str, Any]] = {}
    for group in _groups(layers):
        sums: dict[str, Tensor] = {}

        def add(name: str, module: nn.Module, args: tuple, output: Any, sums: dict[str, Tensor] = sums) -> None:
            x, y = (part.flatten(0, -2).double() for part in (args[0], output))
            columns = torch.cat([x.new_ones(len(x), 1), x, y], 1)
            sums[name] = sums.get(name, 0) + columns.T @ columns

        with eval_mode(model), observe_forwards(group.items(), add):
            for row in ids:
                model(row[None])
        used = [name for name in group if name in sums and sums[name][0, 0] > 1]  # an expert may get no token
        statistics |= {name: _statistics(sums[name], *linear_features(group[name])) for name in used}
    return statistics


def _groups(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, nn.Module]]:
    """Yield layers whose statistics fit into memory together; the model runs once for each group."""
    group: dict[str, nn.Module] = {}
    used = 0
    for name, module in layers.items():
        size = 8 * (1 + sum(linear_features(module))) ** 2
        if group and used + size > _MEMORY:
            yield group
            group, used = {}, 0
        group[name], used = module, used + size
    yield group


def _statistics(sums: Tensor, inputs: int, outputs: int) -> dict[str, Any]:
    """Return a layer's statistics from the products of [1, x, y], summed over tokens."""
    tokens, mean = sums[0, 0], sums[0] / sums[0, 0]
    centered = (sums - tokens * mean[:, None] * mean)[1:, 1:]
    of_inputs, crossed, of_outputs = centered[:inputs, :inputs], centered[:inputs, inputs:], centered[inputs:, inputs:]
    values, vectors = torch.linalg.eigh(of_inputs)
    used = values > 1e-10 * values[-1].clamp_min(1e-300)
    total, freedom = float(of_outputs.trace()), int(tokens) - 1 - int(used.sum())
    explained = float((vectors[:, used].T @ crossed).square().sum(1) @ (1 / values[used]))
    share = None
    if total > 0 and freedom > int(used.sum()):
        share = 1 - max(0.0, total - explained) / freedom / (total / (int(tokens) - 1))
    spectrum = singular_values(of_outputs)
    return {
        "tokens": int(tokens),
        "width": outputs,
        "effective_rank": {"data": effective_rank(spectrum)},
        "singular_values": {"data": (spectrum / spectrum[0].clamp_min(1e-300)).tolist()},
        "linear_share": share,
    }


@torch.no_grad()
def updates(layers: Mapping[str, nn.Module], initial: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the norm of trained minus initial parameters over that of the initial ones, by layer."""
    norms: dict[str, float] = {}
    for name, module in layers.items():
        moved = before = 0.0
        for key, parameter in module.named_parameters(name):
            if (first := initial.get(key)) is not None:
                moved += float((parameter - first.to(parameter)).double().square().sum())
                before += float(first.double().square().sum())
        if before:
            norms[name] = math.sqrt(moved / before)
    return norms


def _replaced(model: nn.Module) -> dict[str, nn.Module]:
    return {name: operator for name, operator in named_operators(model) if not embeds(operator)}


def applies(model: nn.Module) -> bool:
    """Return whether the model has operators as replacements of layers."""
    return bool(_replaced(model))


def run(subject: Subject) -> dict[str, Any]:
    """Return the statistics of every operator, and of the control's layers of the same names."""
    layers = _replaced(subject.model)
    numbers = {subject.name: output_statistics(subject.model, layers, subject.ids)}
    vocabulary = getattr(subject.model.config, "vocab_size", None)
    first = None if subject.folder is None else initial_values(subject.folder, vocabulary)
    moved = updates(layers, first or {})
    for name in moved.keys() & numbers[subject.name]:
        numbers[subject.name][name]["update"] = moved[name]
    if subject.control is not None:
        same_layers = {name: m for name, m in subject.control.named_modules() if name in layers and is_replaceable(m)}
        if same_layers:
            numbers[subject.control_name] = output_statistics(subject.control, same_layers, subject.ids)
    return numbers


def blocks(numbers: Mapping[str, Any]) -> list[Block]:
    """Return the page's blocks for ``numbers``: singular values and linear shares, and a row per layer."""
    palette = dict(zip(numbers, (PALETTE[0], REFERENCE, *PALETTE[1:])))
    rows, spectra, shares = [], [], []
    for number, (model, layers) in enumerate(numbers.items()):
        style: dict[str, Any] = {"name": model, "color": palette[model], "number": number, "mode": "points"}
        spectra += decays(layers, "data", model, palette[model])
        linear_shares = {layer: row["linear_share"] for layer, row in layers.items() if row["linear_share"] is not None}
        if linear_shares:
            shares.append(
                Series(x=list(linear_shares.values()), y=[short_name(layer) for layer in linear_shares], **style)
            )
        for layer, row in layers.items():
            rank = Cell(f"{row['effective_rank']['data']:.1f} of {row['width']}", row["effective_rank"]["data"])
            rows.append(layer_row(layer, model, rank, Cell.of(row["linear_share"]), Cell.of(row.get("update"))))
    text, title = "Singular values of the centred outputs, a line per layer.", "singular values of outputs"
    page_blocks: list[Block] = [Chart(text, decay_panel(spectra, title), stem="outputs", inline=True)]
    if shares:
        guide, x_axis = Guide(x=1, text="linear"), Axis(title="linear share")
        text = "Share of the outputs' variance that the best dense layer explains: at 1 the operator is linear here."
        panel = Panel(shares, x_axis, Axis(rows=True), [guide], title="linear share")
        page_blocks.append(Chart(text, panel, stem="outputs", inline=True))
    return [*page_blocks, Table(["layer", "model", "effective rank", "linear share", "update"], rows, (0, 1))]
