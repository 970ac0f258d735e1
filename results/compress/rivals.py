"""Roundings of the field for frontier.py, written from their papers; none has another number of bits for any layer.

    minmax  a group's range in even steps
    absmax  even steps about zero, as far as a group's largest magnitude; no zero points
    hqq     the same scales with zero points that minimise |W - W'|^0.7, half-quadratically (Badri and Shaji 2023)
    awq     inputs scaled by mean |x|^alpha, alpha from 0 to 0.95 by the least output error of the layers that share an
            input, folded into what comes before (Lin et al. 2306.00978); then to nearest on clipped grids

AWQ's search weighs the outputs of the linear layers where its authors' code weighs those of whole blocks, and its
clipping the squares of inputs alone. As there, ``o_proj`` keeps its inputs where heads share values. What llama.cpp
rounds is read from its files.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relinear import Quantized
from relinear.compression.budget import stored_bytes
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.functional.rounding import Grid, nearest_grid, round_to_nearest
from saved_statistics import SavedStatistics

__all__ = ["GRIDS", "clipped", "scale_inputs_", "take_gguf_"]

#: of HQQ: the norm's power, the penalty, its growth, iterations
POWER, PENALTY, GROWTH, ITERATIONS = 0.7, 10.0, 1.01, 20
ALPHAS = 20


def _grid(scale: Tensor, zero: Tensor, bits: int) -> Grid:
    """Scales and zero points as ``Quantized`` stores them."""
    step = 2.0 ** (bits - 8)
    top = torch.full((len(scale), 1), 2.0**bits - 1)
    return Grid(scale.bfloat16().float(), (zero / step).round().clamp(0, 255) * step, top)


def _groups(weight: Tensor, config: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    """A weight (O, K, group), the steps of its groups' ranges, and the codes of zero (O, K)."""
    w = F.pad(weight, (0, -weight.shape[1] % config.group)).unflatten(1, (-1, config.group))
    low, high = w.amin(2).clamp_max(0), w.amax(2).clamp_min(0)
    scale = ((high - low) / (2**config.bits - 1)).clamp_min(2.0**-17)
    return w, scale, -low / scale


def minmax(weight: Tensor, config: Quantized) -> Grid:
    """Grids from the least to the largest weight of each group."""
    _, scale, zero = _groups(weight, config)
    return _grid(scale, zero, config.bits)


def absmax(weight: Tensor, config: Quantized) -> Grid:
    """Grids about zero from the largest magnitude of each group; the largest code is cut, as it is in the field."""
    magnitude = _groups(weight, config)[0].abs().amax(2)
    scale = (magnitude / (2 ** (config.bits - 1) - 0.5)).clamp_min(2.0**-17)
    return _grid(scale, torch.full_like(scale, 2.0 ** (config.bits - 1)), config.bits)


def hqq(weight: Tensor, config: Quantized) -> Grid:
    """The same with HQQ's zero points."""
    w, scale, zero = _groups(weight, config)
    scale, best, penalty = scale[..., None], torch.inf, PENALTY
    found = zero = zero[..., None]
    for _ in range(ITERATIONS):
        codes = (w / scale + zero).round_().clamp_(0, 2**config.bits - 1)
        missed = w - (codes - zero) * scale
        if (error := float(missed.abs().mean())) >= best:
            break
        best, found = error, zero
        size = missed.abs()
        shrunk = missed.sign() * (size - size.clamp_min(1e-12).pow(POWER - 1) / penalty).relu()
        zero = (codes - (w - shrunk) / scale).mean(2, keepdim=True)
        penalty *= GROWTH
    return _grid(scale[..., 0], found[..., 0], config.bits)


GRIDS = {"minmax": minmax, "absmax": absmax, "hqq": hqq}


@torch.no_grad()
def _magnitudes(model: nn.Module, names: list[str], blocks: Tensor) -> dict[str, Tensor]:
    """Mean |x| of every layer's inputs (I,), over token ids (N, T)."""
    found = dict.fromkeys(names, 0.0)

    def watch(name: str):
        def seen(_, given) -> None:
            found[name] = found[name] + given[0].abs().flatten(0, -2).sum(0) / blocks.numel()

        return seen

    handles = [model.get_submodule(name).register_forward_pre_hook(watch(name)) for name in names]
    for ids in blocks.split(2):
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    for handle in handles:
        handle.remove()
    return found


@torch.no_grad()
def scale_inputs_(
    model: nn.Module, calibration: SavedStatistics, config: Quantized, blocks: Tensor
) -> dict[str, Tensor]:
    """Scale the inputs of a Llama's layers as AWQ does; the squared inputs after that, by layer, weigh its clipping."""
    magnitudes = _magnitudes(model, calibration.names, blocks)
    importance = {name: calibration.moments(name).input_moment.diagonal() for name in calibration.names}
    scales: dict[str, Tensor] = {}
    shared = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
    groups = [
        [f"model.layers.{index}.{name}" for name in group]
        for index in range(len(model.model.layers))
        for group in (*shared, ("mlp.down_proj",))
    ]
    for group in groups:  # all by the weights as they are, then all at once
        scale = _best_scale(
            [model.get_submodule(n).weight for n in group], calibration.moments(group[0]), magnitudes[group[0]], config
        )
        scales |= dict.fromkeys(group, scale)
    for group in groups:
        scale = scales[group[0]]
        for name in group:
            model.get_submodule(name).weight.mul_(scale)
            importance[name] = importance[name] / scale.double().square()
        layer, _, kind = group[0].partition(".self_attn." if "self_attn" in group[0] else ".mlp.")
        before = {"q_proj": "input_layernorm", "gate_proj": "post_attention_layernorm", "down_proj": "mlp.up_proj"}[
            kind
        ]
        weight = model.get_submodule(f"{layer}.{before}").weight
        weight.div_(scale if weight.ndim == 1 else scale[:, None])
    return importance


def _best_scale(weights: list[Tensor], moments: CalibrationStatistics, magnitude: Tensor, config: Quantized) -> Tensor:
    """The scale (I,) of least summed output error."""
    inputs = moments.input_moment.to(magnitude)
    best, found = torch.inf, torch.ones_like(magnitude)
    for step in range(ALPHAS):
        scale = magnitude.pow(step / ALPHAS).clamp_min(1e-4)
        scale = scale / (scale.max() * scale.min()).sqrt()
        error = 0.0
        for weight in weights:
            scaled = weight * scale
            grid = minmax(scaled, config)
            missed = grid.values(round_to_nearest(scaled, grid, config.group), config.group) / scale - weight
            error += float(CalibrationStatistics(inputs).error(missed))
        if error < best:
            best, found = error, scale
    return found


def clipped(weight: Tensor, config: Quantized, importance: Tensor) -> Grid:
    """Grids of least squared error, weighed by the squares of inputs."""
    return nearest_grid(weight, config.bits, config.group, config.symmetric, importance)


@torch.no_grad()
def take_gguf_(model: nn.Module, names: list[str], path: Path) -> dict[str, Any]:
    """Give a Llama's layers the values that a GGUF file has for them; return its size and the weights of each type."""
    from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
    from gguf.quants import dequantize

    places = get_tensor_name_map(MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    size, types = 0, Counter[str]()
    for name in names:
        weight, tensor = model.get_submodule(name).weight, tensors[f"{places.get_name(name)}.weight"]
        value = torch.tensor(dequantize(tensor.data, tensor.tensor_type)).view_as(weight)
        weight.copy_(_in_halves(value, heads.get(name.rpartition(".")[2])))
        size += int(tensor.n_bytes)
        types[tensor.tensor_type.name] += weight.numel()
    weights = sum(types.values())
    at_half = stored_bytes(model) - 2 * weights
    return {"bits": 8 * size / weights, "bytes": at_half + size, "types": dict(types)}


def _in_halves(weight: Tensor, heads: int | None) -> Tensor:
    """Rows of queries and keys as transformers has them: rotary pairs half of a head apart, neighbours in the file."""
    return weight if heads is None else weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
