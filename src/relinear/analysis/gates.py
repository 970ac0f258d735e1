"""How gates are used (CCL, Sections 4.5 and 4.6): how open, how busy, and which tokens open them."""

# Legend: N sequences, T tokens, K gates

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from relinear.analysis.record_gates import record_gates

__all__ = ["gate_statistics", "top_tokens"]

ACTIVE = (0.1, 0.9)  # gates between these are neither shut nor fully open
BINS = 40


def gate_statistics(model: nn.Module, ids: Tensor) -> dict[str, dict[str, dict[str, Any]]]:
    """Distribution of the gates of every layer over the tokens ``ids`` (N, T).

    Returns:
        {layer: {"basis" | "output": {
        "histogram": shares of ``BINS`` equal bins of [0, 1],
        "mean", "entropy": mean binary entropy -g ln g - (1 - g) ln(1 - g) in nats (at most ln 2 = 0.693),
        "active": share of gates between 0.1 and 0.9, "shut": below, "open": above,
        "variation": standard deviation of a gate over the tokens, averaged over gates (0 is a static scaling)}}}.
    """
    sums: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for sequence in record_gates(model, ids):
        for name, parts in sequence.items():
            for part, gates in parts.items():
                _add(sums[name, part], gates.double())
    found: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for (name, part), s in sums.items():
        values, tokens = s["count"] * s["total"].numel(), s["count"]
        mean = s["total"] / tokens
        found[name][part] = {
            "histogram": (s["histogram"] / values).tolist(),
            "mean": float(mean.mean()),
            "entropy": float(s["entropy"] / values),
            "active": float(s["active"] / values),
            "shut": float(s["shut"] / values),
            "open": 1 - float((s["active"] + s["shut"]) / values),
            "variation": float((s["squares"] / tokens - mean.square()).clamp_min(0).sqrt().mean()),
        }
    return dict(found)


def _add(sums: dict[str, Any], gates: Tensor) -> None:
    low, high = ACTIVE
    inside = gates.clamp(1e-12, 1 - 1e-12)
    new = {
        "count": gates.shape[0],
        "total": gates.sum(0),
        "squares": gates.square().sum(0),
        "entropy": -(inside * inside.log() + (1 - inside) * (1 - inside).log()).sum(),
        "active": ((gates >= low) & (gates <= high)).sum(),
        "shut": (gates < low).sum(),
        "histogram": torch.histc(gates, BINS, 0.0, 1.0),
    }
    for key, value in new.items():
        sums[key] = sums[key] + value if key in sums else value


def top_tokens(
    model: nn.Module,
    ids: Tensor,
    *,
    part: str = "basis",
    count: int = 5,
    min_occurrences: int = 3,
    top_share: float = 0.01,
) -> dict[str, list[dict[str, Any]]]:
    """The tokens that open every gate most, with how much of the gate they account for.

    Args:
        model: a model with gated operators.
        ids: (N, T) token ids; rare tokens say little, so take many.
        part: "basis" or "output".
        count: tokens a gate.
        min_occurrences: tokens seen less often are not listed.
        top_share: share of all positions that count as the gate's top ones (at least ten).

    Returns:
        {layer: a list by gate of {"tokens": ids, "values": mean gate of each, "purity", "base_rate",
        "explained_by_token"}}. purity: share of the gate's top positions at which one of the listed tokens stands;
        base_rate: the share of all positions that they take, so that purity / base_rate is the lift.
        explained_by_token: share of the gate's variance that lies between tokens; 1 for a context that is a function of
        the current token alone, whatever was learnt.
    """
    recorded: dict[str, list[Tensor]] = defaultdict(list)
    for sequence in record_gates(model, ids):
        for name, parts in sequence.items():
            if part in parts:
                recorded[name].append(parts[part])
    if not recorded:
        raise ValueError(f"no layer of this model has {part} gates")
    tokens, inverse, occurrences = ids.flatten().unique(return_inverse=True, return_counts=True)
    known = occurrences >= min_occurrences
    if known.sum() < count:
        raise ValueError(
            f"only {int(known.sum())} tokens occur {min_occurrences} times or more; give more text than {ids.numel()} "
            "tokens, or a smaller min_occurrences"
        )
    positions = max(10, math.ceil(top_share * ids.numel()))
    found = {}
    for name, pieces in recorded.items():
        gates = torch.cat(pieces).double()
        sums = torch.zeros(len(tokens), gates.shape[1], dtype=torch.float64)
        means = sums.index_add(0, inverse, gates) / occurrences[:, None]
        total = (gates - gates.mean(0)).square().sum(0)
        between = (occurrences[:, None] * (means - gates.mean(0)).square()).sum(0)
        best = means.masked_fill(~known[:, None], -1).topk(count, dim=0).indices
        highest = gates.topk(min(positions, len(gates)), dim=0).indices
        found[name] = [
            {
                "tokens": tokens[best[:, k]].tolist(),
                "values": means[best[:, k], k].tolist(),
                "purity": float(torch.isin(inverse[highest[:, k]], best[:, k]).double().mean()),
                "base_rate": float(occurrences[best[:, k]].sum() / ids.numel()),
                "explained_by_token": float(between[k] / total[k]) if total[k] > 0 else 0.0,
            }
            for k in range(gates.shape[1])
        ]
    return found
