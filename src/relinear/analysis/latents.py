"""Active dimensions of each operator's latent, and its divergence from the prior (HDPL, Section 2.1)."""

# Legend: N sequences, T tokens of all sequences, R latent dimensions

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from relinear.activations.hooks import Activation, LatentOperator, observe
from relinear.analysis.analyses import Subject, layer_row
from relinear.contract.module_state import eval_mode
from relinear.pages.blocks import Block, Cell, Chart, Table
from relinear.pages.figures import Axis, Guide, Panel, Series

#: how to read its figures, for the page
HOW_TO_READ = (
    "A latent dimension whose mean hardly changes between tokens carries no information about the token. Few active "
    "dimensions mean that the latent is too large. Nats are the divergence of a token's posterior from the prior. With "
    "sigma near 1 and a constant mean the posterior is the prior, and the dimension carries only noise."
)

#: a dimension is active if the variance of its mean over tokens is above this (Burda et al. 2016)
ACTIVE = 0.01


@torch.no_grad()
def latent_statistics(model: nn.Module, ids: Tensor) -> dict[str, dict[str, Any]]:
    """Return every operator's latent over the tokens ``ids`` (N, tokens in each), in eval mode.

    Returns:
        {layer: {"std": standard deviation of every dimension's mean over tokens, largest first, (R,); "sigma": mean
        standard deviation of the posterior; "nats": mean divergence from the prior a token, over all dimensions,
        None if nothing is sampled; "active": how many dimensions vary by more than ``ACTIVE``; "size": R}}.

    Raises:
        ValueError: if no operator of the model has a latent.
    """
    sums: dict[str, dict[str, Any]] = defaultdict(lambda: defaultdict(float))

    def add(name: str, latent: Activation) -> None:
        mu, logvar = (part.flatten(0, -2).double() for part in (latent.mu, latent.logvar))
        total = sums[name]
        total["tokens"] += len(mu)
        total["mu"] += mu.sum(0)
        total["squares"] += mu.square().sum(0)
        total["sigma"] += float((0.5 * logvar).exp().sum())
        total["nats"] += float(0.5 * (mu.square() + logvar.exp() - 1 - logvar).sum())

    with eval_mode(model), observe(model, add):
        for row in ids:
            model(input_ids=row[None])
    statistics = {}
    for name, total in sums.items():
        tokens = total["tokens"]
        variance = (total["squares"] / tokens - (total["mu"] / tokens).square()).clamp_min(0)
        nats = total["nats"] / tokens
        statistics[name] = {
            "std": variance.sqrt().sort(descending=True).values.tolist(),
            "sigma": total["sigma"] / tokens / len(variance),
            "nats": nats if math.isfinite(nats) else None,
            "active": int((variance > ACTIVE).sum()),
            "size": len(variance),
        }
    return statistics


def applies(model: nn.Module) -> bool:
    """Return whether the model has operators with a latent."""
    return any(isinstance(module, LatentOperator) for module in model.modules())


def run(subject: Subject) -> dict[str, Any]:
    """Return the statistics over all tokens of the subject."""
    return latent_statistics(subject.model, subject.ids)


def blocks(numbers: Mapping[str, Any]) -> list[Block]:
    """Return the page's blocks for ``numbers``: a row per layer, and how far its dimensions vary."""
    rows, series = [], []
    for number, (name, row) in enumerate(numbers.items()):
        active = Cell(f"{row['active']} of {row['size']}", row["active"])
        rows.append(layer_row(name, active, Cell.of(row["nats"]), Cell.of(row["sigma"])))
        x = range(1, row["size"] + 1)
        y = [round(v, 5) for v in row.get("std") or row["deviation"]]  # "deviation": files of earlier versions
        text = f"{name}: {active.text} active"
        line = Series(name=name, x=x, y=y, number=number, texts=text, mode="plain", opacity=0.7, legend=False)
        series.append(line)
    x_axis = Axis(title="dimension, sorted by standard deviation")
    y_axis = Axis(title="standard deviation of its mean over tokens", from_zero=True)
    panel = Panel(series, x_axis, y_axis, [Guide(y=ACTIVE**0.5, text="not active below")])
    text = "How far each dimension's mean moves over tokens, a line per layer; below the dashed line it is not active."
    head = ["layer", "active dimensions", "nats per token", "mean sigma"]
    return [Chart(text, panel, stem="latents"), Table(head, rows)]
