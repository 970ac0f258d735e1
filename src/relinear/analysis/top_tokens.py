"""The tokens that open every basis gate, and how pure the gates are (CCL, Section 4.6)."""

# Legend: N sequences, T tokens, K gates

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from relinear.analysis.analyses import Subject, layer_row
from relinear.analysis.recording import gated_operators, record_gates
from relinear.pages.blocks import Block, Cell, Chart, Table, Text
from relinear.pages.figures import Axis, Guide, Panel, Series
from relinear.system.grouped import grouped

#: how to read its figures, for the page
HOW_TO_READ = (
    "Each row is a gate with the tokens that open it most. With a purity far above the base rate the gate stands for "
    "one kind of token; near the base rate the list is chance."
)


def top_tokens(
    model: nn.Module,
    ids: Tensor,
    *,
    count: int = 5,
    min_occurrences: int = 3,
    top_share: float = 0.01,
) -> dict[str, list[dict[str, Any]]]:
    """Return the tokens that open every basis gate most, and the share of the gate that they account for.

    Args:
        model: a model with gated operators.
        ids: (N, T) token ids; rare tokens say little, so take many.
        count: tokens per gate.
        min_occurrences: tokens seen less often are not listed.
        top_share: share of all positions that count as the gate's top ones (at least ten).

    Returns:
        {layer: a list by gate of {"tokens": ids, "values": mean gate of each, "purity", "base_rate",
        "explained_by_token"}}. purity: share of the gate's top positions at which one of the listed tokens stands;
        base_rate: the share of all positions that they take, so that purity / base_rate is the lift.
        explained_by_token: share of the gate's variance that lies between tokens; 1 for a context that is a function of
        the current token alone, whatever was learnt.
    """
    recorded_parts = (item for sequence in record_gates(model, ids) for item in sequence.items())
    recorded = grouped((name, parts["basis"]) for name, parts in recorded_parts if "basis" in parts)
    tokens, inverse, occurrences = ids.flatten().unique(return_inverse=True, return_counts=True)
    frequent = occurrences >= min_occurrences
    if frequent.sum() < count:
        raise ValueError(
            f"only {int(frequent.sum())} tokens occur {min_occurrences} times; give more text, or lower it"
        )
    positions = max(10, math.ceil(top_share * ids.numel()))
    by_layer = {}
    for name, sequences in recorded.items():
        gates = torch.cat(sequences).double()
        sums = torch.zeros(len(tokens), gates.shape[1], dtype=torch.float64)
        means = sums.index_add(0, inverse, gates) / occurrences[:, None]
        total = (gates - gates.mean(0)).square().sum(0)
        between = (occurrences[:, None] * (means - gates.mean(0)).square()).sum(0)
        best = means.masked_fill(~frequent[:, None], -1).topk(count, dim=0).indices
        highest = gates.topk(min(positions, len(gates)), dim=0).indices
        by_layer[name] = [
            {
                "tokens": tokens[best[:, k]].tolist(),
                "values": means[best[:, k], k].tolist(),
                "purity": float(torch.isin(inverse[highest[:, k]], best[:, k]).double().mean()),
                "base_rate": float(occurrences[best[:, k]].sum() / ids.numel()),
                "explained_by_token": float(between[k] / total[k]) if total[k] > 0 else 0.0,
            }
            for k in range(gates.shape[1])
        ]
    return by_layer


def applies(model: nn.Module) -> bool:
    """Return whether the model has basis gates that read a context."""
    return any(op.config.basis_gate for op in gated_operators(model).values() if hasattr(op.config, "basis_gate"))


def run(subject: Subject) -> dict[str, Any]:
    """Return top tokens of every basis gate."""
    by_layer: dict[str, list[dict[str, Any]]] = top_tokens(subject.model, subject.ids)
    for gates in by_layer.values():
        for gate in gates:
            gate["text"] = [subject.token_text(token) for token in gate["tokens"]]
    return {"layers": by_layer}


LISTED = 200  # gates in the table of a page


def blocks(numbers: Mapping[str, Any]) -> list[Block]:
    """Return the blocks of a page: purity against chance for every gate, and those of largest lift by name."""
    gates = [(name, k, gate) for name, layer in numbers["layers"].items() for k, gate in enumerate(layer)]
    gates.sort(key=lambda item: item[2]["base_rate"] - item[2]["purity"])
    texts = [f"{name}, gate {k}: {'  '.join(gate['text'])}" for name, k, gate in gates]
    chance, purity = ([round(gate[key], 4) for _, _, gate in gates] for key in ("base_rate", "purity"))
    dots = Series(name="gates", x=chance, y=purity, texts=texts, mode="points", opacity=0.6, legend=False)
    x_axis = Axis(title="share of all positions (chance)", bounds=(0, 1.1 * max(chance, default=1.0) or 1))
    panel = Panel([dots], x_axis, Axis(title="purity", bounds=(0, 1.05)), [Guide()])
    text = "Every gate: how pure its highest positions are against chance (dashed). Point at a dot for its tokens."
    rows = [
        layer_row(name, Cell.of(k, "d"), "  ".join(gate["text"]), *(Cell.of(gate[value]) for value in _COLUMNS))
        for name, k, gate in gates[:LISTED]
    ]
    head = ["layer", "gate", "tokens", *_COLUMNS.values()]
    note = f"The {len(rows)} gates of largest lift of {len(gates)}." if len(gates) > len(rows) else ""
    chart = Chart(text, panel, stem="top_tokens")
    return [chart, Table(head, rows, (0, 2)), *([Text(note, soft=True)] if note else [])]


#: value -> title of its column
_COLUMNS = {"purity": "purity", "base_rate": "chance", "explained_by_token": "variance explained by the token"}
