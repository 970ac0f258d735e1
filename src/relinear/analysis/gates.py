"""How open every layer's gates are, and how much they vary (CCL, Sections 4.5 and 4.6)."""

# Legend: N sequences, T tokens, K gates

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from relinear.analysis.analyses import Subject, high_percentile, layer_row, short_name
from relinear.analysis.recording import gated_operators, record_gates
from relinear.pages.blocks import Block, Cell, Chart, Table
from relinear.pages.figures import Axis, Heat, Panel

#: how to read its figures, for the page
HOW_TO_READ = (
    "A gate near 0 closes a direction, one near 1 opens it. Two peaks in a histogram are a switch; one peak in the "
    "middle is a gate that does nothing. Low entropy means that few gates matter."
)

ACTIVE = (0.1, 0.9)  # gates between these are neither closed nor fully open
BINS = 40


def gate_statistics(model: nn.Module, ids: Tensor) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the distribution of the gates of every layer over the tokens ``ids`` (N, T).

    Returns:
        {layer: {"basis" | "output": {
        "histogram": shares of ``BINS`` equal bins of [0, 1],
        "mean", "entropy": mean binary entropy -g ln g - (1 - g) ln(1 - g) in nats (at most ln 2 = 0.693),
        "active": share of gates between 0.1 and 0.9, "shut": below, "open": above,
        "variation": standard deviation of a gate over the tokens, averaged over gates (0 is a static scaling)}}}.
    """
    sums: dict[tuple[str, str], dict[str, Any]] = defaultdict(lambda: defaultdict(float))
    for sequence in record_gates(model, ids):
        for name, parts in sequence.items():
            for part, gates in parts.items():
                for key, value in _token_sums(gates.double()).items():
                    sums[name, part][key] += value
    statistics: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for (name, part), s in sums.items():
        values, tokens = s["count"] * s["total"].numel(), s["count"]
        mean = s["total"] / tokens
        statistics[name][part] = {
            "histogram": (s["histogram"] / values).tolist(),
            "mean": float(mean.mean()),
            "entropy": float(s["entropy"] / values),
            "active": float(s["active"] / values),
            "shut": float(s["shut"] / values),
            "open": 1 - float((s["active"] + s["shut"]) / values),
            "variation": float((s["squares"] / tokens - mean.square()).clamp_min(0).sqrt().mean()),
        }
    return dict(statistics)


def _token_sums(gates: Tensor) -> dict[str, Any]:
    """Return sums over the tokens of gates (T, K)."""
    low, high = ACTIVE
    inside = gates.clamp(1e-12, 1 - 1e-12)
    return {
        "count": gates.shape[0],
        "total": gates.sum(0),
        "squares": gates.square().sum(0),
        "entropy": -(inside * inside.log() + (1 - inside) * (1 - inside).log()).sum(),
        "active": ((gates >= low) & (gates <= high)).sum(),
        "shut": (gates < low).sum(),
        "histogram": torch.histc(gates, BINS, 0.0, 1.0),
    }


def applies(model: nn.Module) -> bool:
    """Return whether the model has gates that read a context."""
    return bool(gated_operators(model))


def run(subject: Subject) -> dict[str, Any]:
    """Return the statistics over all tokens of the subject."""
    return gate_statistics(subject.model, subject.ids)


#: value -> title of its column
_COLUMNS = {
    "mean": "mean",
    "entropy": "entropy (nats)",
    "active": "active",
    "shut": "shut",
    "open": "open",
    "variation": "standard deviation over tokens",
}


def blocks(numbers: Mapping[str, Any]) -> list[Block]:
    """Return the page's blocks for ``numbers``: histograms of all gates, and a row per layer and kind of gate."""
    rows = [
        layer_row(name, part, *(Cell.of(values[key]) for key in _COLUMNS))
        for name, parts in numbers.items()
        for part, values in parts.items()
    ]
    page_blocks: list[Block] = []
    for part in (p for p in ("basis", "output") if any(p in layer for layer in numbers.values())):
        layers = {short_name(name): layer[part]["histogram"] for name, layer in numbers.items() if part in layer}
        table = [[round(share, 5) for share in histogram] for histogram in layers.values()]
        bins = [f"{i / BINS:.3f} to {(i + 1) / BINS:.3f}" for i in range(BINS)]
        bounds = (0, max(3 / BINS, high_percentile(table)))
        heat = Heat(values=table, x=bins, y=list(layers), bounds=bounds, what="share of gates")
        panel = Panel([heat], Axis(title=f"{part} gate, from shut to open"))
        text = f"{part} gates over all tokens, a row per layer: mass at both ends is a switch, in the middle undecided."
        page_blocks.append(Chart(text, panel, height=180 + 22 * len(layers), stem="gates"))
    return [*page_blocks, Table(["layer", "gates", *_COLUMNS.values()], rows, (0, 1))]
