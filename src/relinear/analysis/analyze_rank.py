"""``relinear analyze``: effective rank and singular-value decay of the operators realised along a sequence."""

from __future__ import annotations

from typing import Any

from torch import nn

from relinear.analysis.analyses import Result, Subject
from relinear.analysis.effective_rank import effective_ranks, is_ranked
from relinear.analysis.plots import PALETTE, REFERENCE, new_figure
from relinear.core.aux import named_operators

__all__ = ["applies", "plot_effective_rank", "run"]

SPACES = {"operators": "the operators as vectors", "outputs": "what they write to", "inputs": "what they read"}


def applies(model: nn.Module) -> bool:
    """Whether the model has operators that can be ranked."""
    return any(is_ranked(operator) for _, operator in named_operators(model))


def run(subject: Subject) -> Result:
    """Ranks of the model along its first sequence, and of the control along the same one."""
    sequence = subject.ids[:1]
    ranks = {subject.name: effective_ranks(subject.model, sequence)}
    if subject.control is not None:
        ranks[subject.control_name] = effective_ranks(subject.control, sequence)
    lines = []
    for name, layers in ranks.items():
        means = {s: sum(v["effective_rank"][s] for v in layers.values()) / len(layers) for s in SPACES}
        first = next(iter(layers.values()))
        lines.append(
            f"{name}: over {len(layers)} layers and {first['tokens']} tokens ({first['distinct_tokens']} distinct), "
            f"mean effective rank {means['operators']:.1f} of the operators, {means['outputs']:.1f} of their outputs, "
            f"{means['inputs']:.1f} of their inputs; a single one has rank {first['rank']} or less"
        )
    return Result(ranks, {"effective_rank": plot_effective_rank(ranks)}, "\n".join(lines))


def plot_effective_rank(ranks: dict[str, dict[str, dict[str, Any]]]) -> Any:
    """Singular-value decay in the three spaces, a line a layer, a colour a model; dotted: a single operator's rank."""
    figure, axes = new_figure(12.5, 4.2, 3)
    palette = dict(zip(ranks, (PALETTE[0], REFERENCE, *PALETTE[1:])))
    for axis, (space, meaning) in zip(axes, SPACES.items(), strict=True):
        longest = 1
        for name, layers in ranks.items():
            for index, layer in enumerate(layers.values()):
                values = [v for v in layer["singular_values"][space] if v > 1e-6]
                longest = max(longest, len(values))
                axis.plot(
                    range(1, len(values) + 1),
                    values,
                    color=palette[name],
                    alpha=0.5,
                    lw=1.2,
                    marker="o" if len(values) == 1 else None,
                    label=_label(name, layers, space) if index == 0 else None,
                )
        rank = max(layer["rank"] for layers in ranks.values() for layer in layers.values())
        axis.axvline(rank, color="#888888", ls=":", lw=1, label=f"rank of one operator: {rank}")
        axis.set_yscale("log")
        axis.set_ylim(5e-7, 2)
        axis.set_xlim(0, max(longest, rank) * 1.08)
        axis.set_title(f"{space}: {meaning}", loc="left")
        axis.set_xlabel("index of the singular value")
        axis.legend(loc="lower left", fontsize=8.5, framealpha=0.9)
    axes[0].set_ylabel("singular value, relative to the largest")
    return figure


def _label(name: str, layers: dict[str, dict[str, Any]], space: str) -> str:
    values = [layer["effective_rank"][space] for layer in layers.values()]
    span = f"{min(values):.1f}" if max(values) - min(values) < 0.05 else f"{min(values):.1f} to {max(values):.1f}"
    return f"{name}: effective rank {span}"
