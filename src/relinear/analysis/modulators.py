"""Gates of modulators by depth, module and token (Transponder, Figures 2 and 3), and how they vary.

A modulator is any module with ``is_modulator``, ``gates_of(x)`` and ``alphas()``, such as the gates of a
``Transponder`` or a ``PathTransponder``.
"""

# Legend: N sequences, T tokens of all sequences, O channels, L layers

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relinear.analysis.analyses import Subject, layer_row
from relinear.contract.module_state import eval_mode, observe_forwards
from relinear.hf.model_layout import layer_finder
from relinear.pages.blocks import Block, Cell, Chart, Table
from relinear.pages.figures import PALETTE, REFERENCE, Axis, Guide, Heat, Panel, Series, numbered
from relinear.system.grouped import grouped

#: how to read its figures, for the page
HOW_TO_READ = (
    "A gate of 1 leaves its module unchanged, below 1 it damps and above 1 it amplifies. Look for changes with depth "
    "and with the token: gates that are equal for all tokens could be folded into the weights."
)


def modulators(model: nn.Module) -> dict[str, nn.Module]:
    """Return every modulator of ``model`` by the name of the layer or sub-block that it modulates."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if getattr(module, "is_modulator", False):
            parts = name.split(".")
            index = next(i for i, part in enumerate(parts) if part.endswith("modulator"))
            modules.setdefault(".".join(parts[:index]), module)
    return modules


def variance_split(gate: Tensor) -> dict[str, float]:
    """Divide a gate's variance into parts of tokens and channels (two-way analysis of variance; the parts add up).

    Args:
        gate: (T, O), or (T, 1) for a scalar gate.

    Returns:
        ``total``: variance over all entries. ``static``: of the channels' means over the tokens, which constant gains
        could replace. ``token``: of the tokens' means over the channels, one gain per token. ``token_channel``: the
        remainder, which needs both. ``varying``: the share of ``token`` and ``token_channel`` in the total (0 if there
        is no variance).
    """
    gate = gate.double()
    channels, tokens = gate.mean(0), gate.mean(1)
    total = gate.var(unbiased=False).item()
    static, token = channels.var(unbiased=False).item(), tokens.var(unbiased=False).item()
    rest = (gate - channels - tokens[:, None] + gate.mean()).square().mean().item()
    varying = (token + rest) / total if total > 0 else 0.0
    return {"total": total, "static": static, "token": token, "token_channel": rest, "varying": varying}


@dataclasses.dataclass(frozen=True)
class GateRecord:
    """Statistics of a model's gates on some tokens.

    Attributes:
        statistics: name of the modulated layer -> its decoder layer, its module's name, its alphas and its gates, each
            with mean, least and largest value and ``variance_split``.
        scalar: name -> (T,) values of the scalar gate, for layers that have one.
        channel: name -> (T, O) values of the channel gate, for the last module of a layer that has one.
    """

    statistics: dict[str, dict[str, Any]]
    scalar: dict[str, Tensor]
    channel: dict[str, Tensor]


@torch.no_grad()
def record_modulators(model: Any, ids: Tensor, *, tokens: int = 128) -> GateRecord:
    """Run ``model`` on ``ids`` in eval mode and return statistics of every gate.

    Args:
        model: a model with modulators.
        ids: (N, tokens in each) token ids.
        tokens: number of tokens of the first sequence whose gates are returned; the statistics are over all of ``ids``.
    """
    by_name = modulators(model)
    statistics: dict[str, dict[str, Any]] = {}
    scalar: dict[str, Tensor] = {}
    channel: dict[str, Tensor] = {}
    last_module = [name.rpartition(".")[2] for name, module in by_name.items() if _has_channel_gate(module)][-1:]
    layer_of = layer_finder(model)

    def record(name: str, module: Any, args: tuple, output: Any) -> None:
        row: dict[str, Any] = {"layer": layer_of(name) or 0, "module": name.rpartition(".")[2]}
        row["alphas"], row["gates"] = module.alphas(), {}
        for kind, gate in module.gates_of(args[0]).items():
            flat = gate.reshape(-1, gate.shape[-1]).float().cpu()
            extent = {"mean": flat.mean().item(), "least": flat.min().item(), "largest": flat.max().item()}
            row["gates"][kind] = extent | variance_split(flat)
            first = flat[: min(tokens, ids.shape[1])]
            if kind == "scalar":
                scalar[name] = first[:, 0].clone()
            elif row["module"] in last_module:
                channel[name] = first.clone()
        statistics[name] = row

    with observe_forwards(by_name.items(), record), eval_mode(model):
        model(ids.to(next(model.parameters()).device), use_cache=False)
    return GateRecord({name: statistics[name] for name in by_name if name in statistics}, scalar, channel)


def _has_channel_gate(module: nn.Module) -> bool:
    return any(name in ("channel_up", "channel_beta") for name, _ in module.named_parameters(recurse=False))


def applies(model: nn.Module) -> bool:
    """Return whether the model has modulators."""
    return bool(modulators(model))


def run(subject: Subject) -> dict[str, Any]:
    """Return the statistics over all tokens of the subject; figures of the first tokens of its first sequence."""
    record = record_modulators(subject.model, subject.ids, tokens=TOKENS)
    labels = [subject.token_text(int(token)) for token in subject.ids[0, :TOKENS]]
    return {
        "modules": record.statistics,
        "scalar": {name: [round(v, 5) for v in gate.tolist()] for name, gate in record.scalar.items()},
        "channel": _shown_channels(record),
        "tokens": labels,
    }


TOKENS = 48  # tokens shown in maps
LINES = 12  # tokens with a line of their own in the figure of scalar gates
CHANNELS, MAPS = 96, 3  # channels and layers whose gates are written to the file
#: kind of gate -> the statistics that are plotted, with titles (a scalar gate varies only with the token)
PANELS = {
    "scalar": (("total", "standard deviation over tokens"), ("mean", "mean over tokens")),
    "channel": (("total", "standard deviation"), ("varying", "share of variance with the token")),
}


def _shown_channels(record: GateRecord) -> dict[str, Any]:
    """Return layer -> some channels and their gates by token, and the colour range of all maps; {} if there is none."""
    if not record.channel:
        return {}
    distances = np.concatenate([np.abs(gate.numpy() - 1).ravel() for gate in record.channel.values()])
    # the range without half a per cent of the values on either side
    color_range = round(max(float(np.quantile(distances, 0.99)), 0.02), 4)
    names = list(record.channel)
    maps = {}
    for name in (names[i] for i in _spaced(len(names), MAPS)):
        gate = record.channel[name].numpy()
        channels = _spaced(gate.shape[1], CHANNELS)
        values = [[round(v, 3) for v in row] for row in gate[:, channels].tolist()]
        maps[name] = {"channels": channels, "values": values, "color_range": color_range}
    return maps


def _spaced(count: int, most: int) -> list[int]:
    """Return at most ``most`` of ``count`` indices, evenly spaced, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(int)).tolist()


def blocks(numbers: Mapping[str, Any]) -> list[Block]:
    """Return the blocks of a page: gates by depth and token, how far they vary, and a row per layer and gate."""
    maps = [_channels(numbers, name) for name in numbers.get("channel", {})]  # older versions wrote no values
    return [*_scalars(numbers), *_variances(numbers["modules"]), *maps, _table(numbers["modules"])]


def _table(modules: Mapping[str, Any]) -> Table:
    rows = []
    for name, row in modules.items():
        for kind, gate in row["gates"].items():
            values = [Cell.of(gate[key]) for key in ("mean", "least", "largest")]
            varying = Cell(f"{100 * gate['varying']:.0f} %", gate["varying"])
            rows.append(layer_row(name, kind, *values, varying, Cell.of(row["alphas"].get(kind))))
    return Table(["module", "gate", "mean", "least", "largest", "variance with the token", "alpha"], rows, (0, 1))


def _scalars(numbers: Mapping[str, Any]) -> list[Chart]:
    """Return scalar gates against depth, a figure per module, a line per token (Figure 2)."""
    rows = ((numbers["modules"][name], values) for name, values in numbers["scalar"].items())
    modules = grouped((row["module"], (row["layer"], values)) for row, values in rows)
    charts = []
    for number, (module, by_layer) in enumerate(modules.items()):
        by_layer.sort(key=lambda pair: pair[0])
        depth: dict[str, Any] = {"x": [layer for layer, _ in by_layer], "size": 4}
        series = []
        for token in _spaced(len(by_layer[0][1]), LINES):
            label = f"{token} {numbers['tokens'][token]}" if token < len(numbers["tokens"]) else str(token)
            gates = [values[token] for _, values in by_layer]
            series.append(Series(name=label, color=PALETTE[number % len(PALETTE)], y=gates, opacity=0.45, **depth))
        mean = [float(np.mean(values)) for _, values in by_layer]
        series.append(Series(name="mean of all tokens", color=REFERENCE, number=1, y=mean, **depth))
        axes = Axis(title="decoder layer"), Axis(title=f"scalar gate of {module}")
        text = f"{module}: a line per token, the strong one their mean. Lines apart are gates that read the token."
        panel = Panel(series, *axes, [Guide(y=1)], title=module, legend=False)
        charts.append(Chart(text, panel, height=320, inline=True, stem="modulators_scalar"))
    return charts


def _variances(modules: Mapping[str, Any]) -> list[Chart]:
    """Return how far gates spread, against depth, a line per module: both panels of every kind."""
    charts: list[Chart] = []
    for kind, value, title in [(name, *panel) for name, panels in PANELS.items() for panel in panels]:
        rows = [(row, row["gates"][kind][value]) for row in modules.values() if kind in row["gates"]]
        scale = math.sqrt if value == "total" else float
        lines = grouped((row["module"], (row["layer"], scale(statistic))) for row, statistic in rows)
        series = []
        for number, (module, points) in enumerate(lines.items()):
            x, y = zip(*sorted(points), strict=True)
            series.append(Series(name=module, number=number, x=x, y=y))
        if series:
            hint = "1 changes nothing." if value == "mean" else "Near 0 a constant would do."
            text = f"{kind} gates: {title}, a line per module. {hint}"
            panel = Panel(series, Axis(title="decoder layer"), Axis(title=title), title=f"{kind} gates")
            charts.append(Chart(text, panel, height=380, inline=True, stem="modulators_variance"))
    return charts


def _channels(numbers: Mapping[str, Any], name: str) -> Chart:
    """Return the channel gate of a layer as a heat map."""
    row, shown = numbers["modules"][name], numbers["channel"][name]
    color_range = shown.get("color_range") or shown["spread"]  # "spread": files of earlier versions
    words = numbered(numbers["tokens"][: len(shown["values"])])
    channels = [f"channel {channel}" for channel in shown["channels"]]
    scale: dict[str, Any] = {"bounds": (1 - color_range, 1 + color_range), "what": "gate", "diverging": True}
    heat = Heat(values=shown["values"], x=channels, y=words, **scale)
    text = (
        f"Channel gates of {row['module']} in layer {row['layer']}, {len(channels)} channels: a row per token, a "
        "column per channel. Stripes down are the same channel at every token, which a constant gain would do as well; "
        "stripes across are tokens that open or shut a whole layer."
    )
    panel = Panel([heat], title=f"{row['module']}, layer {row['layer']}")
    return Chart(text, panel, height=520, stem="modulators_channel")
