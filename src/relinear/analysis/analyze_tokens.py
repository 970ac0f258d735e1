"""``relinear analyze``: the tokens that open every basis gate, and how pure the gates are."""

from __future__ import annotations

from typing import Any

from torch import nn

from relinear.analysis.analyses import Result, Subject
from relinear.analysis.gates import top_tokens
from relinear.analysis.plots import PALETTE, new_figure
from relinear.analysis.record_gates import gated_operators

__all__ = ["applies", "plot_top_tokens", "run"]

SHOWN = 12  # gates in the figure and in print


def applies(model: nn.Module) -> bool:
    """Whether the model has basis gates that read a context."""
    return any(op.config.basis_gate for op in gated_operators(model).values() if hasattr(op.config, "basis_gate"))


def run(subject: Subject) -> Result:
    """Top tokens of every basis gate; the figure shows the gates with the largest lift of the middle layer."""
    found: dict[str, list[dict[str, Any]]] = top_tokens(subject.model, subject.ids)
    for gates in found.values():
        for gate in gates:
            gate["text"] = [subject.token_text(token) for token in gate["tokens"]]
    layer = list(found)[len(found) // 2]
    order = sorted(range(len(found[layer])), key=lambda k: found[layer][k]["purity"] - found[layer][k]["base_rate"])
    chosen = order[::-1][:SHOWN]
    every = [gate for gates in found.values() for gate in gates]
    mean = {k: sum(g[k] for g in every) / len(every) for k in ("purity", "base_rate", "explained_by_token")}
    lines = [
        f"{len(every)} basis gates: purity {mean['purity']:.2f} on average, where chance is {mean['base_rate']:.2f}; "
        f"{mean['explained_by_token']:.0%} of their variance is explained by the current token",
        f"{layer}, gates of largest lift:",
    ]
    for k in chosen:
        gate = found[layer][k]
        lines.append(f"  gate {k:3d}  purity {gate['purity']:.2f} ({gate['base_rate']:.2f})  {'  '.join(gate['text'])}")
    return Result({"layers": found}, {"top_tokens": plot_top_tokens(found[layer], chosen, layer)}, "\n".join(lines))


def plot_top_tokens(gates: list[dict[str, Any]], chosen: list[int], layer: str) -> Any:
    """Purity of the chosen gates beside what chance would give, with their tokens written at the bars."""
    figure, (axis,) = new_figure(9.0, 1.2 + 0.36 * len(chosen))
    rows = range(len(chosen))
    axis.barh(rows, [gates[k]["purity"] for k in chosen], color=PALETTE[0], height=0.62, label="purity")
    axis.barh(rows, [gates[k]["base_rate"] for k in chosen], color="#B0B0B0", height=0.62, label="by chance")
    for row, k in enumerate(chosen):
        axis.text(
            1.02, row, "   ".join(_plain(text) for text in gates[k]["text"]), va="center", fontsize=9, clip_on=False
        )
    axis.set_yticks(list(rows), [f"gate {k}" for k in chosen], fontsize=8.5)
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.set_xlabel("share of the gate's top positions at which one of its five tokens stands")
    axis.set_title(f"Tokens that open the basis gates of {layer}", loc="left")
    axis.legend(loc="lower right", bbox_to_anchor=(1.6, 1.0), ncols=2, fontsize=8.5, frameon=False)
    return figure


def _plain(text: str) -> str:
    """Text that matplotlib's font has and its markup does not read."""
    return text.replace("\u2423", "_").replace("$", r"\$").encode("ascii", "replace").decode()
